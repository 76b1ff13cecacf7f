"""Rows in batches of earlier starts that were edited since."""

from __future__ import annotations

from collections.abc import Callable

from bagent.batches.files import BatchItem
from bagent.store.journal.edited_rows import UnseenRows
from bagent.types import Outcome, Row


class EditedItems:
    """Finds the items whose row has another content in the input by now.

    The answer to such an item would take the place of the current answer of its row.

    Args:
        stage: the stage of the items.
        units: the units of the items; the reader of the input marks those that it holds.
        rows: the numbers of their rows; rows that this start has to do are marked.
        replaces: whether an earlier start wrote an outcome of the row with another content.
    """

    def __init__(
        self,
        stage: str,
        units: UnseenRows,
        rows: UnseenRows,
        replaces: Callable[[Outcome], bool],
    ) -> None:
        self._stage = stage
        self._units = units
        self._rows = rows
        self._replaces = replaces
        self._position = -1
        self._has_ended = False

    def read(self, row: Row) -> None:
        """Note a row that this start has to do; those before it were read too."""
        self._rows.mark_seen(row.index)
        self._position = row.index

    def end(self) -> None:
        """Note that the whole input was read."""
        self._has_ended = True

    def has(self, item: BatchItem) -> bool:
        """Return whether the input holds the row of ``item`` with another content.

        An item of this start is read from the input, and so never edited.
        """
        row = item.row
        if not self._has_ended and row.index >= self._position:
            return False
        if self._units.has_seen(item.unit(self._stage)) is not False:
            return False
        if self._rows.has_seen(row.index):
            return True
        outcome = Outcome(
            key=f"{row.key:016x}",
            row=row.index,
            id=row.id,
            source=row.source,
            line=row.line,
            stage=self._stage,
            status="ok",
            answer=item.answer,
        )
        return self._replaces(outcome)
