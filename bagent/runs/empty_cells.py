"""Rows that have no value in a column of the prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bagent.job.templates.prompt import Prompt
from bagent.types import Row


def required_columns(prompt: Prompt | None) -> list[str]:
    """Return the columns that a prompt always uses: no condition of its templates tests them."""
    if prompt is None or prompt.fields is None:
        return []
    return sorted(prompt.fields - prompt.tested)


EMPTY = (None, "")
"""The values of an empty cell."""


class EmptyCells:
    """Counts the rows to be sent that have no value in a column of the prompt.

    Args:
        prompt: the prompt of the job; None where stages have their own.
    """

    def __init__(self, prompt: Prompt | None) -> None:
        self._columns = required_columns(prompt)
        self.counts: Counter[str] = Counter()
        """The rows by the column in which they have no value."""

    def count(self, rows: Sequence[Row], pending: Sequence[Sequence[int]]) -> None:
        """Count those of ``rows`` that have ``pending`` answers."""
        for row, answers in zip(rows, pending, strict=True):
            if answers and row.error is None:
                for name in self._columns:
                    if row.data.get(name, "-") in EMPTY:
                        self.counts[name] += 1
