"""Places for rows that are still to come: what keeps an order while everything ends out of order.

A stage announces one ticket for each row that it will make, in the order of its input, long
before the row is there. A ticket is filled with an item, or split into tickets of its own. Who
needs rows as they come watches tickets; who needs them in order reads :class:`OrderedReader`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from bagent.stages.row import StageRow


class Slot:
    """The place of one row, or, once it was split, of as many as it has ``children``."""

    __slots__ = ("_watchers", "children", "item")

    def __init__(self) -> None:
        self.item: StageRow | None = None
        self.children: list[Slot] | None = None
        self._watchers: list[Callable[[Slot], None]] = []

    @property
    def known(self) -> bool:
        """Whether it was filled or split."""
        return self.item is not None or self.children is not None

    def fill(self, item: StageRow) -> None:
        """Put the row in its place."""
        self.item = item
        self._tell()

    def split(self, count: int) -> list[Slot]:
        """Make it the place of ``count`` rows; 0: nothing comes of it."""
        self.children = children = [Slot() for _ in range(count)]
        self._tell()
        return children

    def watch(self, watcher: Callable[[Slot], None]) -> None:
        """Call ``watcher`` once it is filled or split; at once where it is."""
        if self.known:
            watcher(self)
        else:
            self._watchers.append(watcher)

    def _tell(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher(self)


class Reader(Protocol):
    """What reads a stream of tickets."""

    def take(self, ticket: Slot) -> None:
        """Take the next ticket."""
        ...

    def end(self) -> None:
        """No more tickets come; those that came may still be open."""
        ...


class Stream:
    """Hands the tickets of one stage to everybody who reads it."""

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def read_by(self, reader: Reader) -> None:
        """Let ``reader`` take every ticket from now on."""
        self._readers.append(reader)

    def push(self, ticket: Slot) -> None:
        """Announce the next row."""
        for reader in self._readers:
            reader.take(ticket)

    def end(self) -> None:
        """Announce the end."""
        for reader in self._readers:
            reader.end()


class UnorderedReader:
    """A reader that gets each item as soon as it is there, with a ticket for what it makes of it.

    Args:
        on_item: gets the item, and the ticket at the same place of ``out``.
        on_idle: called when the stream has ended and each item was handed over.
        out: the stream of what is made; None: what is made has no places.
    """

    def __init__(
        self,
        on_item: Callable[[StageRow, Slot], None],
        on_idle: Callable[[], None],
        out: Stream | None = None,
    ) -> None:
        self._on_item = on_item
        self._on_idle = on_idle
        self._out = out
        self._open = 0
        self._ended = False
        self._idle = False

    def take(self, ticket: Slot) -> None:
        """Announce the same place in ``out``, and wait for what comes."""
        twin = Slot()
        self._open += 1
        if self._out is not None:
            self._out.push(twin)
        self._follow(ticket, twin)

    def _follow(self, ticket: Slot, twin: Slot) -> None:
        ticket.watch(lambda known: self._known(known, twin))

    def _known(self, ticket: Slot, twin: Slot) -> None:
        if ticket.children is not None:
            self._open += len(ticket.children)
            twins = twin.split(len(ticket.children))
            for child, place in zip(ticket.children, twins, strict=True):
                self._follow(child, place)
        elif ticket.item is not None:
            self._on_item(ticket.item, twin)
        self._open -= 1
        self._look()

    def end(self) -> None:
        """No more tickets come."""
        self._ended = True
        if self._out is not None:
            self._out.end()
        self._look()

    def _look(self) -> None:
        if self._ended and not self._open and not self._idle:
            self._idle = True
            self._on_idle()


class OrderedReader:
    """A reader that gets the items in the order of their tickets.

    Of a row that is there before an earlier one only the ticket is held: where its text stands,
    not the text.

    Args:
        on_item: gets each item.
        on_end: called once all items were handed over.
    """

    def __init__(self, on_item: Callable[[StageRow], None], on_end: Callable[[], None]) -> None:
        self._on_item = on_item
        self._on_end = on_end
        self._waiting: deque[Slot] = deque()
        self._watched: Slot | None = None
        self._ended = False
        self._over = False
        self._busy = False

    def take(self, ticket: Slot) -> None:
        """Queue a ticket behind the others."""
        self._waiting.append(ticket)
        if len(self._waiting) == 1:
            self._advance()

    def end(self) -> None:
        """No more tickets come."""
        self._ended = True
        self._advance()

    def _advance(self, _: Slot | None = None) -> None:
        if self._busy:  # what an item led to came back here; the loop below goes on with it
            return
        self._busy = True
        waiting = self._waiting
        while waiting and waiting[0].known:
            ticket = waiting.popleft()
            if ticket.children is not None:
                waiting.extendleft(reversed(ticket.children))
            elif ticket.item is not None:
                self._on_item(ticket.item)
        self._busy = False
        if waiting:
            if self._watched is not waiting[0]:
                self._watched = waiting[0]
                waiting[0].watch(self._advance)
        elif self._ended and not self._over:
            self._over = True
            self._on_end()
