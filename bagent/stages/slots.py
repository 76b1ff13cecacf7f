"""Slots for rows that are still to come: they keep an order while rows end out of order.

A stage announces one slot for each row that it will make, in the order of its input, before the row
exists. A slot is filled with a row, or split into slots of its own. :class:`UnorderedReader` takes
rows as they come, :class:`OrderedReader` in the order of their slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from bagent.stages.row import StageRow


class Slot:
    """The place of one row or, once it was split, of its ``children``."""

    __slots__ = ("_watchers", "children", "item")

    def __init__(self) -> None:
        self.item: StageRow | None = None
        self.children: list[Slot] | None = None
        self._watchers: list[Callable[[Slot], None]] = []

    @property
    def is_known(self) -> bool:
        """Whether it was filled or split."""
        return self.item is not None or self.children is not None

    def fill(self, item: StageRow) -> None:
        """Put a row in it."""
        self.item = item
        self._notify()

    def split(self, count: int) -> list[Slot]:
        """Replace it by ``count`` slots; 0: no row comes."""
        self.children = children = [Slot() for _ in range(count)]
        self._notify()
        return children

    def watch(self, watcher: Callable[[Slot], None]) -> None:
        """Call ``watcher`` once it is filled or split, at once if it is already."""
        if self.is_known:
            watcher(self)
        else:
            self._watchers.append(watcher)

    def _notify(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher(self)


class Reader(Protocol):
    """A reader of a stream of slots."""

    def take(self, slot: Slot) -> None:
        """Take the next slot."""
        ...

    def end(self) -> None:
        """Handle the end of the stream; slots that came may still be open."""
        ...


class Stream:
    """The slots of one stage, passed to every reader."""

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def read_by(self, reader: Reader) -> None:
        """Add a reader; it gets all slots from now on."""
        self._readers.append(reader)

    def push(self, slot: Slot) -> None:
        """Announce the next row."""
        for reader in self._readers:
            reader.take(slot)

    def end(self) -> None:
        """Announce the end."""
        for reader in self._readers:
            reader.end()


class UnorderedReader:
    """A reader that passes each row on as soon as it exists, with a slot for what is made of it.

    Args:
        on_row: gets the row, and the slot at the same position of ``out``.
        on_idle: called when the stream has ended and all rows were passed on.
        out: the stream of what is made; None: no rows are announced.
    """

    def __init__(
        self,
        on_row: Callable[[StageRow, Slot], None],
        on_idle: Callable[[], None],
        out: Stream | None = None,
    ) -> None:
        self._on_row = on_row
        self._on_idle = on_idle
        self._out = out
        self._open = 0
        self._ended = False
        self._idle = False

    def take(self, slot: Slot) -> None:
        """Announce the same position in ``out``, and wait for the row."""
        twin = Slot()
        self._open += 1
        if self._out is not None:
            self._out.push(twin)
        self._follow(slot, twin)

    def _follow(self, slot: Slot, twin: Slot) -> None:
        slot.watch(lambda _: self._on_known(slot, twin))

    def _on_known(self, slot: Slot, twin: Slot) -> None:
        if slot.children is not None:
            self._open += len(slot.children)
            twins = twin.split(len(slot.children))
            for child, child_twin in zip(slot.children, twins, strict=True):
                self._follow(child, child_twin)
        elif slot.item is not None:
            self._on_row(slot.item, twin)
        self._open -= 1
        self._check_idle()

    def end(self) -> None:
        """Handle the end of the stream."""
        self._ended = True
        if self._out is not None:
            self._out.end()
        self._check_idle()

    def _check_idle(self) -> None:
        if self._ended and not self._open and not self._idle:
            self._idle = True
            self._on_idle()


class OrderedReader:
    """A reader that passes rows on in the order of their slots.

    A row that ends before an earlier one is held as a slot, which has its location, not its text.

    Args:
        on_row: gets each row.
        on_end: called once all rows were passed on.
    """

    def __init__(self, on_row: Callable[[StageRow], None], on_end: Callable[[], None]) -> None:
        self._on_row = on_row
        self._on_end = on_end
        self._waiting: deque[Slot] = deque()
        self._watched: Slot | None = None
        self._ended = False
        self._finished = False
        self._busy = False

    def take(self, slot: Slot) -> None:
        """Queue a slot behind the others."""
        self._waiting.append(slot)
        if len(self._waiting) == 1:
            self._advance()

    def end(self) -> None:
        """Handle the end of the stream."""
        self._ended = True
        self._advance()

    def _advance(self, _: Slot | None = None) -> None:
        if self._busy:  # called from within on_row: the loop below continues
            return
        self._busy = True
        waiting = self._waiting
        while waiting and waiting[0].is_known:
            slot = waiting.popleft()
            if slot.children is not None:
                waiting.extendleft(reversed(slot.children))
            elif slot.item is not None:
                self._on_row(slot.item)
        self._busy = False
        if waiting:
            if self._watched is not waiting[0]:
                self._watched = waiting[0]
                waiting[0].watch(self._advance)
        elif self._ended and not self._finished:
            self._finished = True
            self._on_end()
