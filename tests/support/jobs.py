"""Writing jobs and rows, and reading what a run left behind."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from bagent.cli.app import main
from support.in_process import make_due_tables

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Json = Any

PROMPT = "id={{ id }} {{ text }}"


def rows(count: int) -> list[dict[str, Json]]:
    """Return rows r1..rN of the usual form: ``id`` and ``text``."""
    return [{"id": f"r{n}", "text": f"text number {n}"} for n in range(1, count + 1)]


def write_rows(path: Path, values: int | Iterable[Json]) -> Path:
    """Write ``values`` (a number: that many usual rows) as JSONL and return ``path``."""
    lines = rows(values) if isinstance(values, int) else values
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def write_job(
    folder: Path, url: str, values: int | Iterable[Json] | None = None, **keys: Json
) -> Path:
    """Write ``job.yaml`` into ``folder`` and return its path.

    Args:
        url: the backend.
        values: rows for ``rows.jsonl``, see :func:`write_rows`; None writes none.
        keys: keys of the job file, replacing the usual ones; a key set to None is left out.
    """
    job: dict[str, Json] = {
        "name": "job",
        "backend": url,
        "model": "fake-model",
        "input": "rows.jsonl",
        "prompt": {"user": PROMPT},
        "sampling": {"temperature": 0, "max_tokens": 64},
    }
    if values is not None:
        write_rows(folder / "rows.jsonl", values)
    job = {key: value for key, value in (job | keys).items() if value is not None}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def results(folder: Path, run: str = "runs/job") -> list[dict[str, Json]]:
    """Return the rows that ``bagent results RUN`` prints, in input order.

    Args:
        folder: the folder of the job.
        run: the run directory, from there.
    """
    out, err = io.BytesIO(), io.StringIO()
    args = ["results", str(folder / run), "--format", "jsonl", "--ordered"]
    with redirect_stdout(io.TextIOWrapper(out, encoding="utf-8")) as text, redirect_stderr(err):
        code = main(args)  # in this process: a tenth of the time of a new one
        text.flush()
    assert code == 0, err.getvalue()
    return [msgspec.json.decode(line) for line in out.getvalue().split(b"\n") if line]


def results_by_id(folder: Path, run: str = "runs/job") -> dict[Json, dict[str, Json]]:
    """Return :func:`results` by row id, and fail where an id comes twice."""
    found: dict[Json, dict[str, Json]] = {}
    for row in results(folder, run):
        assert row["id"] not in found, f"row {row['id']} is there twice"
        found[row["id"]] = row
    return found


def journal_files(run: Path) -> list[Path]:
    """Return the journal's segments in the order of their names."""
    return sorted((run / "journal").glob("*.jsonl"))


def journal_lines(run: Path) -> list[dict[str, Json]]:
    """Return every whole line of the journal, segment by segment."""
    lines: list[dict[str, Json]] = []
    for path in journal_files(run):
        whole = path.read_bytes().rpartition(b"\n")[0]
        lines += [msgspec.json.decode(line) for line in whole.splitlines() if line.strip()]
    return lines


def wait_until(done: Callable[[], bool]) -> None:
    """Block until ``done`` is true.

    Raises:
        AssertionError: it was not within a minute.
    """
    for _ in range(6000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen in a minute")


def wait_for_text(folder: Path, files: str, *texts: str) -> None:
    """Block until the files that match a pattern have these texts."""

    def written() -> bool:
        content = "".join(path.read_text("utf-8", "replace") for path in folder.glob(files))
        return all(text in content for text in texts)

    wait_until(written)


def parquet(run: Path, table: str = "results") -> list[dict[str, Json]]:
    """Return the rows of ``TABLE.parquet`` in a run directory."""
    make_due_tables()
    return sql(f"select * from read_parquet('{run / table}.parquet')")


def database(run: Path, query: str) -> list[dict[str, Json]]:
    """Return what ``query`` finds in the run's DuckDB file, opened for reading."""
    make_due_tables()
    return sql(query, run / "run.duckdb")


def sql(query: str, path: Path | None = None) -> list[dict[str, Json]]:
    """Return the rows of a DuckDB query as dicts; ``path`` is a file to read."""
    import duckdb

    with duckdb.connect(str(path), read_only=True) if path else memory().cursor() as connection:
        cursor = connection.execute(query)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


@cache
def memory() -> DuckDBPyConnection:
    """Open a DuckDB for all tests of this process; opening one takes 30 ms."""
    import duckdb

    return duckdb.connect(config={"enable_external_file_cache": False})


def run_json(run: Path) -> dict[str, Json]:
    """Return ``run.json`` of a run directory."""
    return msgspec.json.decode((run / "run.json").read_bytes())
