"""Warnings about rows: one line a kind, with its first example and a count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Entry:
    example: str
    count: int


class RowWarnings:
    """Collects warnings; memory does not grow with their number.

    One thread writes; another may read :attr:`lines` meanwhile.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def add(self, kind: str, example: str, count: int = 1) -> None:
        """Count ``count`` more of a kind.

        Args:
            kind: the warning, with the places ``{count}`` and ``{example}`` in it.
            example: kept only for the first of its kind.
            count: how many at once.
        """
        entry = self._entries.get(kind)
        if entry is None:
            self._entries[kind] = _Entry(example, count)
        else:
            entry.count += count

    def is_new(self, kind: str) -> bool:
        """Return whether nothing of this kind was added yet, so that an example is worth making."""
        return kind not in self._entries

    @property
    def lines(self) -> list[str]:
        """One line for each kind, in the order of their first appearance."""
        return [
            kind.format(count=f"{entry.count:,}", example=entry.example)
            for kind, entry in list(self._entries.items())
        ]
