"""SQL over a run, also while it runs, without locking its files."""

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
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from bagent.duck import NOTHING, Access, Setting, connect, file_source, quoted
from bagent.errors import UsageError, WriteError
from bagent.store.journal.segments import Report
from bagent.store.run_dir import RunDir, RunInfo
from bagent.store.tables.freshness import read_freshness, signatures, stale_tables
from bagent.store.tables.schema import TABLES, VIEWS

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

T = TypeVar("T")


@contextmanager
def open_tables(
    runs: RunDir | Sequence[RunDir],
    report: Report,
    *,
    access: Access = NOTHING,
    settings: Mapping[str, Setting] | None = None,
) -> Iterator[DuckDBPyConnection]:
    """Open an in-memory DuckDB connection with a view for each table of one or several runs.

    ``VIEWS`` are included where ``access`` says that the SQL is the user's. The tables of several
    runs are concatenated. A child process rebuilds stale tables in the run directory, or in a
    temporary folder if the run directory is read-only or full, keeps no Parquet files, or has a
    damaged ``run.json``.

    Args:
        runs: one or several runs.
        report: called with messages for the user.
        access: files that may be read besides the tables.
        settings: DuckDB settings.

    Raises:
        WriteError: the tables could not be made.
    """
    several = [runs] if isinstance(runs, RunDir) else runs
    with connect_tables(several, report, access=access, settings=settings) as (connection, _):
        yield connection


@contextmanager
def connect_tables(
    runs: Sequence[RunDir],
    report: Report,
    *,
    access: Access = NOTHING,
    settings: Mapping[str, Setting] | None = None,
) -> Iterator[tuple[DuckDBPyConnection, list[Path]]]:
    """Yield the connection of :func:`open_tables`, and the folder of the tables of each run.

    One connection checks the tables that are there and reads them: opening DuckDB takes 30 ms. It
    spills to the temporary folder of the node.

    Raises:
        WriteError: the tables could not be made.
    """
    with tempfile.TemporaryDirectory(prefix="bagent-") as temporary:
        spares = [Path(temporary) / str(number) for number in range(len(runs))]
        possible = [*(run.path for run in runs), *spares]
        paths = [folder / f"{table}.parquet" for folder in possible for table in TABLES]
        with connect(replace(access, files=[*access.files, *paths]), settings=settings) as opened:
            folders = [
                _fresh_folder(run, spare, report, opened)
                for run, spare in zip(runs, spares, strict=True)
            ]
            _create_tables(opened, folders)
            if access.everything:
                create_views(opened)
            yield opened, folders


def _create_tables(connection: DuckDBPyConnection, folders: Sequence[Path]) -> None:
    """Create a view for each table over the Parquet files of all folders."""
    manifests = [read_freshness(folder) for folder in folders]
    by_name = ", union_by_name=true" if len(folders) > 1 else ""
    for table in TABLES:
        files = file_source(*(folder / f"{table}.parquet" for folder in folders))
        source = f"read_parquet({files}{by_name})"
        is_json = {name for m in manifests for name in m.json_columns.get(table, ())}
        described = connection.execute(f"describe from {source}").fetchall() if is_json else ()
        replaced = ", ".join(
            f"try_cast({quoted(name)} as json) as {quoted(name)}"
            for name, kind, *_ in described
            if name in is_json and kind == "VARCHAR"
        )
        columns = f"* replace ({replaced})" if replaced else "*"
        connection.execute(f"create view {table} as select {columns} from {source}")


def create_views(connection: DuckDBPyConnection) -> None:
    """Create ``VIEWS`` over the tables; DuckDB takes 30 ms to plan them."""
    for name, text in VIEWS.items():
        connection.execute(f"create view {name} as {text}")


def read_unchanged(folders: Sequence[Path], read: Callable[[], T]) -> T:
    """Return what ``read`` returns, calling it again where tables were replaced meanwhile.

    DuckDB opens a file by its name twice in a query: for the footer and for the data. If another
    process replaces the file in between, the query fails or mixes both files.

    Args:
        folders: the folders of the tables.
        read: runs queries; its effects are those of the last call.
    """
    paths = [folder / f"{table}.parquet" for folder in folders for table in TABLES]
    while True:
        before = _identities(paths)
        try:
            result = read()
        except Exception:
            if _identities(paths) == before:
                raise
        else:
            if _identities(paths) == before:
                return result


def _identities(paths: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    """Return what tells each file from one that replaces it; None without a file."""
    identities: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            identities.append(None)
        else:
            identities.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return identities


def has_fresh_tables(run: RunDir) -> bool:
    """Return whether the tables in the run directory are up to date."""
    damaged: list[str] = []
    info = run.load_or_report(damaged.append)
    if info is None or damaged or not info.parquet:
        return False
    return not stale_tables(run.path, info, signatures(run.path, info))


def _fresh_folder(run: RunDir, spare: Path, report: Report, connection: DuckDBPyConnection) -> Path:
    """Return the folder of up-to-date tables, after rebuilding them if needed."""
    damaged: list[str] = []
    info = run.load_or_report(damaged.append) or RunInfo(run.path.name)
    for message in damaged:
        report(message)
    # Tables that were made before run.json was damaged are better than new ones.
    if info.parquet and not damaged:
        if not stale_tables(run.path, info, signatures(run.path, info), connection):
            return run.path
        if os.access(run.path, os.W_OK):
            with contextlib.suppress(WriteError):
                _renew(run.path, run.path)
                return run.path
    _renew(run.path, spare)
    return spare


def plain_rows(cursor: DuckDBPyConnection, *, raw_json: bool) -> Iterator[Sequence[Any]]:
    """Yield the rows of a query, with wide integers (stored as decimals) as ints.

    Args:
        cursor: the query.
        raw_json: return JSON columns as ``msgspec.Raw`` instead of text.
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
    "DECIMAL(38,0)[]": lambda values: [None if value is None else int(value) for value in values],
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
    """Make tables in a child process, so that its memory is returned to the system.

    Args:
        arguments: the command line of :mod:`bagent.store.tables.build`.

    Returns:
        The exit code and what the child wrote to stderr.
    """
    # -P: import no module from the current folder, which may be the run directory.
    command = [sys.executable, "-P", "-m", "bagent.store.tables.build", *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    return done.returncode, done.stderr.decode("utf-8", "replace")


def one_statement(sql: str) -> str:
    """Return ``sql`` without surrounding blanks and a final semicolon.

    Raises:
        UsageError: it is empty.
    """
    text = sql.strip().rstrip(";").strip()
    if not text:
        raise UsageError("no SQL was given", hint='bagent query RUN "select count(*) from results"')
    return text
