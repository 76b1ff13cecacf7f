"""The input rows of a stored run: read again, or taken from ``results.parquet``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.duck import Access, connect, file_source
from bagent.errors import BagentError, UsageError
from bagent.files import is_regular
from bagent.store.journal.codec import decode_outcome_line
from bagent.store.journal.segments import Report
from bagent.store.run_dir import RunDir, RunInfo
from bagent.store.tables.freshness import valid_tables
from bagent.store.tables.row_feed import InputFinder, InputRows, InputText, ReadInput

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_ROWS = 256
_RAW = msgspec.json.Decoder(msgspec.Raw)


class ParquetInput:
    """Finds the input of journal lines, in order of stage and row, in a Parquet file.

    Args:
        results: the Parquet file of ``results``.
    """

    def __init__(self, results: Path) -> None:
        self.problem: str | None = None
        self._connection: DuckDBPyConnection = connect(
            Access(files=[results]), settings={"threads": 1}
        )
        self._source = f"read_parquet({file_source(results)})"
        self._stage: str | None = None
        self._reached = -1
        self._rows: list[tuple[int, str | None, str]] = []

    def find(self, row: int, key: str, line: bytes) -> InputText:
        """Return the input of a journal line; empty if there is none."""
        try:
            outcome = decode_outcome_line(line)
        except msgspec.DecodeError:
            return InputText()
        if outcome.stage != self._stage or row < self._reached:
            self._begin(outcome.stage, row)
        self._reached = row
        while self._rows and self._rows[-1][0] < row:
            self._rows.pop()
            if not self._rows:
                self._fetch()
        for number, name, text in reversed(self._rows):
            if number != row:
                break
            if name == outcome.id:
                return _checked(text.encode())
        return InputText()

    def _begin(self, stage: str, row: int) -> None:
        self._stage = stage
        self._connection.execute(
            f"SELECT row, id, input FROM {self._source}"
            " WHERE stage = ? AND row >= ? AND input IS NOT NULL",
            [stage, row],
        )
        self._fetch()

    def _fetch(self) -> None:
        self._rows = self._connection.fetchmany(_ROWS)[::-1]

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def _checked(text: bytes) -> InputText:
    """Return JSON text as one line; empty if it is not JSON."""
    try:
        _RAW.decode(text)
    except msgspec.DecodeError:
        return InputText()
    return InputText(text.replace(b"\n", b" ").replace(b"\r", b" "))


def input_reader(rows: str | bytes) -> ReadInput:
    """Return a function that reads the input of a trusted rows configuration.

    Filters, samples, limits and shards are ignored, since an earlier start may have selected other
    rows; the number and key of a row do not depend on them.
    """
    from bagent.rows import RowsConfig, read_again

    config = RowsConfig.from_json(rows)
    all_rows = replace(config, where=None, sample=None, limit=None, shard=None)
    return lambda: read_again(all_rows)


def find_input(run: RunDir, info: RunInfo, spool: Path, report: Report) -> InputFinder | None:
    """Return a finder of the input of a run's journal lines; None if there is no input.

    Files named by another user's ``run.json`` are not read, and its SQL is not executed.

    Args:
        run: the run directory.
        info: the content of its ``run.json``.
        spool: path for a copy of the input.
        report: called with the reason if there is no input.
    """
    if info.rows is None:
        return None
    try:
        return InputRows(_reader(run, info), spool)
    except (BagentError, TypeError, ValueError) as error:
        if "results" in valid_tables(run.path, info):
            return ParquetInput(run.path / "results.parquet")
        report(f"the input is left out: {error}")
        return None


def _reader(run: RunDir, info: RunInfo) -> ReadInput:
    """Return a function that reads the files that ``run.json`` names.

    Raises:
        UsageError: it was not written by this user for this directory, or names SQL.
        InputError, TypeError, ValueError: the configuration is wrong.
    """
    from bagent.rows import RowsConfig

    text = info.rows if isinstance(info.rows, str) else msgspec.json.encode(info.rows).decode()
    config = RowsConfig.from_json(text)
    if any(not isinstance(item, str) and "sql" in item for item in config.inputs):
        raise UsageError(
            "it is SQL, which only bagent run executes",
            hint="bagent results without --with-input shows the results",
        )
    if run.is_own(info):
        return input_reader(text)
    spool = run.path / "input.jsonl"
    if config.inputs == ("-",) and is_regular(spool):
        return input_reader(replace(config, stdin_spool=spool).to_json())
    raise UsageError(
        f"you did not run {run.path} here; bagent run reads it",
        hint="bagent results without --with-input shows the results",
    )
