"""SQL over a run, while it goes on or after it, without ever holding a lock on its files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.duck import NOTHING, Access, Setting, connect, file_literal, quoted
from bagent.errors import UsageError, WriteError
from bagent.store.journal.segments import Report
from bagent.store.run_dir import RunDir, RunInfo
from bagent.store.tables.freshness import read_freshness, signatures, stale_tables
from bagent.store.tables.schema import TABLES
from bagent.store.tables.views import VIEWS

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


@contextmanager
def open_tables(
    runs: RunDir | Sequence[RunDir],
    report: Report,
    *,
    access: Access = NOTHING,
    settings: Mapping[str, Setting] | None = None,
) -> Iterator[DuckDBPyConnection]:
    """A DuckDB connection in memory with a view for each table of a run, as it is now.

    The tables of several runs follow each other; ``VIEWS`` are there too.
    Stale tables are made anew by a child process: in the run directory, or in a temporary one
    where that cannot be written, is full, keeps no Parquet files, or has a damaged ``run.json``.
    ``report`` is told of that.

    Args:
        runs: one or several runs.
        report: told what people should know.
        access: what may be reached beside the tables.
        settings: of DuckDB.

    Raises:
        WriteError: the tables could not be made.
    """
    several = [runs] if isinstance(runs, RunDir) else runs
    with (
        table_folders(several, report) as folders,
        connect_tables(folders, access=access, settings=settings) as connection,
    ):
        yield connection


@contextmanager
def table_folders(runs: Sequence[RunDir], report: Report) -> Iterator[list[Path]]:
    """For each run a folder with its Parquet tables, as they are now; see :func:`open_tables`.

    Raises:
        WriteError: the tables could not be made.
    """
    with tempfile.TemporaryDirectory(prefix="bagent-") as spare:
        yield [_fresh_folder(run, Path(spare) / str(n), report) for n, run in enumerate(runs)]


@contextmanager
def connect_tables(
    folders: Sequence[Path],
    *,
    access: Access = NOTHING,
    settings: Mapping[str, Setting] | None = None,
) -> Iterator[DuckDBPyConnection]:
    """A DuckDB connection in memory with views over the Parquet tables of these folders.

    What does not fit its memory goes to the node's temporary folder, never to the current one.
    See :func:`open_tables` for the other arguments.
    """
    paths = {table: [folder / f"{table}.parquet" for folder in folders] for table in TABLES}
    files = [*access.files, *(path for group in paths.values() for path in group)]
    with connect(replace(access, files=files), settings=settings) as connection:
        manifests = [read_freshness(folder) for folder in folders]
        for table, group in paths.items():
            listed = ", ".join(map(file_literal, group))
            by_name = ", union_by_name=true" if len(folders) > 1 else ""
            source = f"read_parquet([{listed}]{by_name})"
            is_json = {name for m in manifests for name in m.json_columns.get(table, ())}
            described = connection.execute(f"describe from {source}").fetchall()
            replaced = ", ".join(
                f"try_cast({quoted(name)} as json) as {quoted(name)}"
                for name, kind, *_ in described
                if name in is_json and kind == "VARCHAR"
            )
            columns = f"* replace ({replaced})" if replaced else "*"
            connection.execute(f"create view {table} as select {columns} from {source}")
        for name, text in VIEWS.items():
            connection.execute(f"create view {name} as {text}")
        yield connection


def has_fresh_tables(run: RunDir) -> bool:
    """Whether the run directory holds tables of the journal as it is now."""
    damaged: list[str] = []
    info = run.load_or_report(damaged.append)
    if info is None or damaged or not info.parquet:
        return False
    return not stale_tables(run.path, info, signatures(run.path, info))


def _fresh_folder(run: RunDir, spare: Path, report: Report) -> Path:
    """Where tables are that fit the journal: those in the run directory are used where they do."""
    damaged: list[str] = []
    info = run.load_or_report(damaged.append) or RunInfo(run.path.name)
    for message in damaged:
        report(message)
    # Tables that were made while run.json was whole know more than those made now.
    if info.parquet and not damaged:
        if not stale_tables(run.path, info, signatures(run.path, info)):
            return run.path
        if os.access(run.path, os.W_OK):
            with contextlib.suppress(WriteError):
                _renew(run.path, run.path)
                return run.path
    _renew(run.path, spare)
    return spare


def plain_rows(cursor: DuckDBPyConnection, *, raw_json: bool) -> Iterator[Sequence[Any]]:
    """The rows of a query; wide integers, decimals in the tables, are whole numbers.

    Args:
        cursor: the query.
        raw_json: JSON columns come as raw JSON (``msgspec.Raw``), not as text.
    """
    kinds = [str(column[1]) for column in cursor.description or []]
    converters = [_CONVERTERS.get(k) if raw_json or k != "JSON" else None for k in kinds]
    if not any(converters):
        yield from iter(cursor.fetchone, None)
        return
    for row in iter(cursor.fetchone, None):
        yield [
            value if convert is None or value is None else convert(value)
            for convert, value in zip(converters, row, strict=True)
        ]


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "JSON": lambda text: msgspec.Raw(text.encode()),
    "DECIMAL(38,0)": int,
    "DECIMAL(38,0)[]": lambda values: [None if one is None else int(one) for one in values],
}


def _renew(run_dir: Path, folder: Path) -> None:
    arguments = [str(run_dir), "--only-stale"]
    if folder != run_dir:
        arguments += ["--out", str(folder)]
    code, output = run_tables_child(arguments)
    if code:
        lines = output.strip().splitlines()
        last = lines[-1].removeprefix("bagent: error: ") if lines else f"exit {code}"
        raise WriteError(f"the tables of {run_dir} could not be made: {last}")


def run_tables_child(arguments: list[str]) -> tuple[int, str]:
    """Make tables in a child process, which alone pays for DuckDB's memory.

    Args:
        arguments: the command line of :mod:`bagent.store.tables.build`.

    Returns:
        The exit code and what the child wrote to stderr.
    """
    # -P: never a module of the current folder, which may be the run directory.
    command = [sys.executable, "-P", "-m", "bagent.store.tables.build", *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    return done.returncode, done.stderr.decode("utf-8", "replace")


def one_statement(sql: str) -> str:
    """``sql`` itself, without blanks and the semicolon at its end.

    Raises:
        UsageError: it is empty.
    """
    text = sql.strip().rstrip(";").strip()
    if not text:
        raise UsageError("no SQL was given", hint='bagent query RUN "select count(*) from results"')
    return text
