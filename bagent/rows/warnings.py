"""Warnings about rows: each kind is said once, with its first example and how often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Found:
    example: str
    count: int


class RowWarnings:
    """Collects warnings; memory does not grow with their number.

    One thread writes; another may read :attr:`lines` meanwhile.
    """

    def __init__(self) -> None:
        self._found: dict[str, _Found] = {}

    def add(self, kind: str, example: str, count: int = 1) -> None:
        """Count ``count`` more of a kind.

        Args:
            kind: the warning, with the places ``{count}`` and ``{example}`` in it.
            example: kept only for the first of its kind.
            count: how many at once.
        """
        known = self._found.get(kind)
        if known is None:
            self._found[kind] = _Found(example, count)
        else:
            known.count += count

    def is_new(self, kind: str) -> bool:
        """Whether nothing of this kind was added yet, so that an example is worth making."""
        return kind not in self._found

    @property
    def lines(self) -> list[str]:
        """One line for each kind, in the order of their first appearance."""
        return [
            kind.format(count=f"{found.count:,}", example=found.example)
            for kind, found in list(self._found.items())
        ]
