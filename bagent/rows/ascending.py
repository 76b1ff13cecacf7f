"""Ids that only ascend need no search for repeats; most inputs number their rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import lt
from typing import Any

from bagent.types import Json


class Ascending:
    """Holds rows back from a table of what came before, for as long as every id is above the last.

    Whole numbers ascend by value, text by length and then by character, so that ``r9`` stands
    before ``r10``. What is held takes 8 bytes a row and its note.

    Args:
        note_size: bytes of the note beside each key.
    """

    def __init__(self, note_size: int) -> None:
        self._note_size = note_size
        self._kind: type | None = None
        self._last: Any = None
        self._ended = False
        self._held: list[tuple[array[int], bytes]] = []

    def hold(self, ids: list[Json], keys: Sequence[int], notes: list[bytes]) -> bool:
        """Take rows in, if their ids ascend, also from those before; else change nothing."""
        if self._ended:
            return False
        kinds = set(map(type, ids))
        order: list[Any] = ids
        if kinds == {str}:
            order = list(zip(map(len, ids), ids, strict=True))
        elif kinds != {int}:
            return False
        kind = type(ids[0])
        if self._kind is not None and (kind is not self._kind or not self._last < order[0]):
            return False
        if not all(map(lt, order, islice(order, 1, None))):
            return False
        self._kind, self._last = kind, order[-1]
        self._held.append((array("Q", keys), b"".join(notes)))
        return True

    def give_up(self) -> Iterator[tuple[Sequence[int], list[bytes]]]:
        """Keys and notes of all rows held, once; from then on nothing is held."""
        self._ended = True
        self._held.reverse()
        size = self._note_size
        while self._held:
            keys, flat = self._held.pop()
            yield keys, [flat[at : at + size] for at in range(0, len(flat), size)]
