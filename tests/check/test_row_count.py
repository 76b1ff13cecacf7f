"""The first rows and how many there are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from bagent.check import check
from bagent.check.check import RowCount, count_rows
from bagent.rows import RowsConfig, open_rows
from bagent.types import Row


@pytest.fixture(autouse=True)
def two_megabytes_are_a_large_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be small."""
    monkeypatch.setattr(check, "COUNT_BYTES", 2 << 20)


def file_of(path: Path, count: int, width: int) -> Path:
    """A file of ``count`` rows, each of about ``width`` bytes."""
    line = '{"id":"%09d","text":"' + "x" * (width - 32) + '"}\n'
    with path.open("w") as file:
        for number in range(count):
            file.write(line % number)
    return path


def look(path: Path, keep: int = 200, **fields: object) -> tuple[list[Row], RowCount]:
    config = RowsConfig(inputs=(str(path),), base=path.parent, **fields)  # type: ignore[arg-type]
    rows = open_rows(config)
    try:
        return count_rows(rows, keep, limit=config.limit)
    finally:
        rows.close()


@pytest.mark.parametrize(("count", "width"), [(10_000, 600), (75, 100_000)])
def test_a_large_file_is_estimated_and_not_read_to_its_end(
    tmp_path: Path, count: int, width: int
) -> None:
    path = file_of(tmp_path / "r.jsonl", count, width)
    config = RowsConfig(inputs=(str(path),), base=tmp_path)
    rows = open_rows(config)
    kept, found = count_rows(rows, 20)
    read, size = rows.progress()
    rows.close()
    assert found.how == "about"
    assert found.rows == pytest.approx(count, rel=0.02)
    assert len(kept) == 20
    assert size is not None and read < size and read < 2 * check.COUNT_BYTES


def test_a_limit_bounds_the_estimate(tmp_path: Path) -> None:
    path = file_of(tmp_path / "r.jsonl", 10_000, 600)
    assert look(path, limit=9_750)[1] == RowCount(9_750, "counted")
    assert look(path, limit=22_500)[1].how == "about"


class Pipe:
    """Rows one by one; counts how many were taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0

    def batches(self) -> Iterable[list[Row]]:
        for number in range(self.count):
            self.taken += 1
            yield [Row(number, number, None, {}, "stdin", number + 1)]

    def progress(self) -> tuple[int, int | None]:
        return 0, None


def test_a_pipe_is_read_no_further_than_the_rows_that_are_looked_at() -> None:
    pipe = Pipe(1000)
    kept, found = count_rows(pipe, 10, piped=True)
    assert (len(kept), found.how) == (10, "at least")
    assert pipe.taken <= 11


def test_a_pipe_that_ends_early_and_a_file_without_rows_are_counted(tmp_path: Path) -> None:
    assert count_rows(Pipe(7), 10, piped=True)[1] == RowCount(7, "counted")
    (tmp_path / "r.jsonl").write_text("\n\n")
    assert look(tmp_path / "r.jsonl") == ([], RowCount(0, "counted"))
