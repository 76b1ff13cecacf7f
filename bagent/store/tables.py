"""Makes the tables of a run from its journal, in a process of its own.

``python -m bagent.store.tables RUN_DIR [--only-stale] [--out DIR] [--memory MB] [--wait]``

Each table is made under a temporary name and put in place by renaming, so that who reads the old
one, or holds a lock on it, neither stops this nor is stopped by it. The journal may still grow:
what is there at the start is read, up to the last whole line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bagent.duck import Access, connect
from bagent.errors import BagentError, WriteError
from bagent.store.columns import TABLES
from bagent.store.feed import ReadInput
from bagent.store.freshness import signatures, stale_tables
from bagent.store.run_input import input_reader
from bagent.store.rundir import RunDir, RunInfo
from bagent.store.segments import Report


@dataclass(frozen=True, slots=True)
class Options:
    """How to make the tables.

    ``out`` is where they go, None means the run directory. ``only_stale`` leaves alone what is
    up to date. ``read_input`` reads the input rows; None: as anybody may.
    ``wait`` is called between two looks at a locked ``run.duckdb`` with seconds.
    """

    out: Path | None = None
    only_stale: bool = False
    memory_mb: int = 150
    read_input: ReadInput | None = None
    wait: Callable[[float], None] = time.sleep


def make_tables(run_dir: Path, options: Options, report: Report) -> list[str]:
    """Make the tables of a run; the names of those that were made anew.

    Args:
        run_dir: the run directory.
        options: how.
        report: told what people should know, one line each.

    Raises:
        WriteError: a table cannot be written.
        UsageError: ``run.json`` is damaged.
    """
    out = options.out or run_dir
    info = RunDir(run_dir).look(report) or RunInfo(run_dir.name)
    if options.out is not None:
        info.parquet, info.duckdb = True, False
    now = signatures(run_dir, info)
    stale = list(TABLES)
    if options.only_stale:
        stale = stale_tables(out, info, now)
    if not stale:
        return []
    import duckdb

    from bagent.store.maker import Maker, work_directory

    try:
        out.mkdir(parents=True, exist_ok=True)
        with work_directory(out) as work:
            Maker(run_dir, info, Path(work), options, report).make(stale, now)
    except (duckdb.OutOfMemoryException, MemoryError) as error:
        raise WriteError(
            f"the tables of {run_dir} need more memory than there is: {error}",
            hint="the journal is whole; on a machine with more memory: bagent query RUN",
        ) from error
    except (OSError, duckdb.Error) as error:
        raise WriteError(
            f"cannot make the tables of {run_dir}: {error}",
            hint="the journal is whole; make room, then: bagent query RUN",
        ) from error
    return stale


def main(argv: list[str] | None = None, rows: bytes = b"") -> int:
    """The command line of this module; the exit code.

    ``rows`` is what ``--wait`` reads from stdin.
    """
    parser = argparse.ArgumentParser(prog="python -m bagent.store.tables", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--only-stale", action="store_true", help="leave fresh tables alone")
    parser.add_argument("--out", type=Path, help="put the tables there, not in the run directory")
    parser.add_argument(
        "--memory", type=int, default=150, help="of each DuckDB in MB, to begin with"
    )
    parser.add_argument(
        "--wait", action="store_true", help="begin at a line on stdin: the rows to read, or a word"
    )
    asked = parser.parse_args(argv)
    if asked.wait:
        rows = _first_line()
        if not rows:
            return 0
    read_input = input_reader(rows) if rows.startswith(b"{") else None
    options = Options(asked.out, asked.only_stale, asked.memory, read_input)

    def report(words: str) -> None:
        sys.stderr.write(f"{words}\n")  # whoever started this says whose words they are

    try:
        make_tables(asked.run_dir, options, report)
    except BagentError as error:
        sys.stderr.write(f"bagent: error: {error}\n")
        return error.exit_code
    return 0


def _first_line() -> bytes:
    """Load what takes long, then wait for a line; empty: whoever was to write it is gone."""
    import bagent.rows
    import bagent.store.maker  # noqa: F401

    connect(Access()).execute("SELECT 1").close()
    return sys.stdin.buffer.readline()


if __name__ == "__main__":
    sys.exit(main())
