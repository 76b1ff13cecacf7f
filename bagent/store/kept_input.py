"""The input that an earlier ``results.parquet`` holds, where it cannot be read again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.duck import Access, connect, file_literal
from bagent.store.codec import decode_outcome_line
from bagent.store.feed import InputText

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_ROWS = 256
_RAW = msgspec.json.Decoder(msgspec.Raw)


class KeptInput:
    """Finds the input of journal lines that come in order of stage and row.

    Args:
        results: the Parquet file, with the columns of ``results``.
    """

    def __init__(self, results: Path) -> None:
        self.problem: str | None = None
        self._connection: DuckDBPyConnection = connect(
            Access(files=[results]), settings={"threads": 1}
        )
        self._source = f"read_parquet({file_literal(results)})"
        self._stage: str | None = None
        self._reached = -1
        self._rows: list[tuple[int, str | None, str]] = []

    def find(self, row: int, key: str, line: bytes) -> InputText:
        """The input of a journal line, nothing where there is none."""
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
    """JSON text in one line; nothing where the file holds something else."""
    try:
        _RAW.decode(text)
    except msgspec.DecodeError:
        return InputText()
    return InputText(text.replace(b"\n", b" ").replace(b"\r", b" "))
