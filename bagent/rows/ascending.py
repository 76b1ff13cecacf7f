"""Ids that only ascend need no search for repeats; most inputs number their rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import lt
from typing import Any

from bagent.types import Json

Held = Iterator[tuple[Sequence[int], list[bytes]]]
"""Keys and notes of rows, some at a time."""


class Ascending:
    """Holds rows back from a table of what came before, for as long as every id is above the last.

    Whole numbers ascend by value, text by length and then by character, so that ``r9`` stands
    before ``r10``. What is held takes 8 bytes a row and its note; nothing where rows can be read
    again.

    Args:
        note_size: bytes of the note beside each key.
    """

    def __init__(self, note_size: int) -> None:
        self._note_size = note_size
        self._kind: type | None = None
        self._last: Any = None
        self._ended = False
        self._held: list[tuple[array[int], bytes] | Callable[[], Held]] = []

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
        if not self._goes_on(kind, order[0]):
            return False
        if not all(map(lt, order, islice(order, 1, None))):
            return False
        self._kind, self._last = kind, order[-1]
        self._held.append((array("Q", keys), b"".join(notes)))
        return True

    def pass_over(self, first: int | str, last: int | str, again: Callable[[], Held]) -> bool:
        """Take in rows known to ascend from one id to another, if they go on from those before.

        Args:
            first: the lowest id.
            last: the highest, of the same type.
            again: reads their keys and notes when they are needed.
        """
        kind = type(first)
        low: Any = first if isinstance(first, int) else (len(first), first)
        if self._ended or not self._goes_on(kind, low):
            return False
        self._kind = kind
        self._last = last if isinstance(last, int) else (len(last), last)
        self._held.append(again)
        return True

    def swap(self, mark: int, again: Callable[[], Held]) -> None:
        """Forget what was held since :attr:`held` was ``mark``: ``again`` can read it."""
        if not self._ended:
            self._held[mark:] = [again]

    @property
    def held(self) -> int:
        """How many times rows were taken in."""
        return len(self._held)

    @property
    def ended(self) -> bool:
        """Whether the order was broken."""
        return self._ended

    def _goes_on(self, kind: type, first: Any) -> bool:
        return self._kind is None or (kind is self._kind and bool(self._last < first))

    def give_up(self) -> Held:
        """Keys and notes of all rows held, once; from then on nothing is held."""
        self._ended = True
        self._held.reverse()
        size = self._note_size
        while self._held:
            held = self._held.pop()
            if callable(held):
                yield from held()
                continue
            keys, flat = held
            yield keys, [flat[at : at + size] for at in range(0, len(flat), size)]
