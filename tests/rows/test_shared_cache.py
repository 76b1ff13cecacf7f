"""Following the notes of another process must show in nothing but the time it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bagent.rows import RowReader, RowsConfig, open_rows
from bagent.rows.resume_cache import InputPiece, ResumeCache, digest_of, identity_of
from bagent.types import Row

COUNT = 800
PARTS = 3
PAD = "x" * 1200


def line(number: int, text: str = PAD) -> str:
    return json.dumps({"id": f"r{number}", "text": text}) + "\n"


def lines(start: int, stop: int) -> str:
    return "".join(map(line, range(start, stop)))


# Each with what is unusual about it behind some pieces that are as usual.
INPUTS = {
    "ascending": [lines(0, COUNT)],
    "blank lines and a mark": [
        "\ufeff" + lines(0, 300) + "\n \n\r\n" + lines(300, COUNT),
    ],
    "a line that is blank in an unusual way": [lines(0, 600) + "\u3000\n" + lines(600, COUNT)],
    "two files": [lines(0, 400), lines(400, COUNT)],
    "a repeated row": [lines(0, COUNT) + line(7) + line(8, "other") + lines(COUNT, 2 * COUNT)],
    "a broken row": [lines(0, 600) + '{"id": \n' + lines(600, COUNT)],
    "rows without an id": [lines(0, 600) + '{"text": "a"}\n' * 3 + lines(600, COUNT)],
    "no line feed at the end": [lines(0, COUNT).rstrip()],
}


def write(folder: Path, texts: list[str]) -> RowsConfig:
    for number, text in enumerate(texts):
        (folder / f"in{number}.jsonl").write_text(text, encoding="utf-8")
    return RowsConfig(("*.jsonl",), folder)


def plain(config: RowsConfig) -> tuple[list[Row], list[str]]:
    source = open_rows(config)
    return [row for batch in source.batches() for row in batch], source.warnings


def noting(config: RowsConfig) -> RowReader:
    source = open_rows(config)
    source.remember(config.base / "notes", lambda _: True)
    return source


def following(config: RowsConfig, peek: int = 0) -> RowReader:
    source = open_rows(config)
    source.share(config.base / "notes")
    source.peek(peek)
    source.remember(config.base / "own", lambda _: False)
    return source


def all_of(source: RowReader) -> list[Row]:
    return [row for batch in source.batches() for row in batch]


def part_of(config: RowsConfig, part: int) -> RowsConfig:
    return replace(config, shard=(part, PARTS))


@pytest.fixture(params=INPUTS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> RowsConfig:
    return write(tmp_path, INPUTS[request.param])


@pytest.mark.parametrize("peek", [0, 300])
def test_each_part_has_the_same_rows_and_warnings_as_without_notes(config, peek):
    noting(config).note_all()
    for part in range(1, PARTS + 1):
        source = following(part_of(config, part), peek)
        assert (all_of(source), source.warnings) == plain(part_of(config, part))
    assert not (config.base / "own").exists()


def test_notes_that_another_process_is_still_making_are_used_as_they_come(config):
    part = part_of(config, 2)
    noted = noting(config).batches()
    source = following(part)
    found: list[Row] = []
    for step, batch in enumerate(source.batches()):
        found += batch
        ahead: Iterator[object] = noted if step % 3 else iter(())
        for _ in range(4):
            next(ahead, None)
    assert (found, source.warnings) == plain(part)


def note(config: RowsConfig, data: bytes, keys: list[int]) -> None:
    """Write notes of one file with rows r0 to r19."""
    packed = b"".join(key.to_bytes(8, "big") for key in keys)
    memory = ResumeCache()
    memory.attach(config.base / "notes", identity_of(config), None)
    name = plain(config)[0][0].source
    memory.note(InputPiece(name, 0, len(data), digest_of(data), 20, 20, "r0", "r19", packed))
    memory.stop()


def test_rows_of_other_parts_are_not_decoded(tmp_path):
    config = write(tmp_path, [lines(0, 20)])
    rows, _ = plain(config)
    mine, _ = plain(part_of(config, 1))
    numbers = {row.index for row in mine}
    assert 0 < len(numbers) < 20
    broken = "".join(line(n) if n in numbers else "{\n" for n in range(20))
    write(tmp_path, [broken])
    note(config, broken.encode(), [row.key for row in rows])
    assert all_of(following(part_of(config, 1))) == mine


def test_a_file_that_changed_since_it_was_noted_is_read_anew(tmp_path):
    config = write(tmp_path, INPUTS["ascending"])
    noting(config).note_all()
    write(tmp_path, [lines(0, 300) + line(300, "new") + lines(301, COUNT)])
    for part in range(1, PARTS + 1):
        source = following(part_of(config, part))
        assert (all_of(source), source.warnings) == plain(part_of(config, part))


def test_keys_that_are_not_those_of_the_rows_are_not_believed(tmp_path):
    config = write(tmp_path, [lines(0, 20)])
    rows, _ = plain(config)
    note(config, lines(0, 20).encode(), [row.key + PARTS for row in rows])
    for part in range(1, PARTS + 1):
        assert all_of(following(part_of(config, part))) == plain(part_of(config, part))[0]
