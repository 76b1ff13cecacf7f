"""The input of a run for who only looks at it: what may be read again, or what was kept of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from bagent.errors import BagentError, UsageError
from bagent.store.feed import InputFinder, InputRows, ReadInput
from bagent.store.freshness import sound_tables
from bagent.store.inside import is_regular
from bagent.store.kept_input import KeptInput
from bagent.store.rundir import RunDir, RunInfo
from bagent.store.segments import Report


def input_reader(rows: str | bytes) -> ReadInput:
    """Reads the input of a configuration of rows that this process or its parent made.

    All rows are read, whatever ``where``, a sample, a limit or a shard picked among them: an
    earlier start may have picked others, and each row has the same number and key in all.
    """
    from bagent.rows import RowsConfig, read_again

    config = RowsConfig.from_json(rows)
    whole = replace(config, where=None, sample=None, limit=None, shard=None)
    return lambda: read_again(whole)


def find_input(run: RunDir, info: RunInfo, spool: Path, report: Report) -> InputFinder | None:
    """Finds the input of a run's journal lines, without running or reading what others name.

    Args:
        run: the run directory, which may be somebody else's.
        info: what its ``run.json`` says.
        spool: path of a copy of the input that may be needed.
        report: told why there is no input.
    """
    if info.rows is None:
        return None
    try:
        return InputRows(_reader(run, info), spool)
    except (BagentError, TypeError, ValueError) as error:
        if "results" in sound_tables(run.path, info):
            return KeptInput(run.path / "results.parquet")
        report(f"the input is left out: {error}")
        return None


def _reader(run: RunDir, info: RunInfo) -> ReadInput:
    """Reads the files that ``run.json`` names.

    Raises:
        UsageError: it was not written by this user for this directory, or names SQL.
        InputError, TypeError, ValueError: the configuration is wrong.
    """
    from bagent.rows import RowsConfig

    text = info.rows if isinstance(info.rows, str) else msgspec.json.encode(info.rows).decode()
    config = RowsConfig.from_json(text)
    if any(not isinstance(one, str) and "sql" in one for one in config.inputs):
        raise UsageError("it is SQL, which only bagent run executes")
    if run.is_own(info):
        return input_reader(text)
    spool = run.path / "input.jsonl"
    if config.inputs == ("-",) and is_regular(spool):
        return input_reader(replace(config, stdin_spool=spool).to_json())
    raise UsageError(f"you did not run {run.path} here; bagent run reads it")
