"""SQL over a run, while it goes on or after it, without ever holding a lock on its files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bagent.errors import UsageError, WriteError
from bagent.store.rundir import RunDir

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TABLES = ("results", "answers", "attempts", "tool_calls", "endpoints")


@contextmanager
def open_tables(run: RunDir) -> Iterator[DuckDBPyConnection]:
    """A DuckDB connection in memory with a view for each table of ``run``, as it is now.

    Stale tables are made anew by a child process: in the run directory, or in a temporary one
    where that cannot be written or keeps no Parquet files.

    Raises:
        WriteError: the tables could not be made.
    """
    import duckdb

    info = run.load()
    keeps = info is None or info.parquet
    with tempfile.TemporaryDirectory(prefix="bagent-") as spare:
        folder = run.path if keeps and os.access(run.path, os.W_OK) else Path(spare)
        _renew(run.path, folder)
        connection = duckdb.connect()
        try:
            for table in TABLES:
                file = str(folder / f"{table}.parquet").replace("'", "''")
                connection.execute(f"create view {table} as from read_parquet('{file}')")
            yield connection
        finally:
            connection.close()


def _renew(run_dir: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "bagent.store.tables", str(run_dir), "--only-stale"]
    if folder != run_dir:
        command += ["--out", str(folder)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        last = words[-1].removeprefix("bagent: error: ") if words else f"exit {done.returncode}"
        raise WriteError(f"the tables of {run_dir} could not be made: {last}")


def one_statement(sql: str) -> str:
    """``sql`` itself, without blanks and the semicolon at its end.

    Raises:
        UsageError: it is empty.
    """
    text = sql.strip().rstrip(";").strip()
    if not text:
        raise UsageError("no SQL was given", hint='bagent query RUN "select count(*) from results"')
    return text
