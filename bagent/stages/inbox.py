"""Where the rows of a stage wait until the fleet has room for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sized

from bagent.stages.feeder import Work
from bagent.types import Row

BATCH = 16
"""Rows that are made ready at once: what they read from the journal is in memory from then on."""

MOST_WAITING = 64
"""So many rows may wait for a stage before no more of the input is read.

A fleet has rows enough standing ready by itself; those here are only names of rows.
"""


class Gate:
    """Says whether more of the input may be read: the backpressure of a pipeline on its feeder.

    It bounds reading alone: a row that ended is always taken, so nothing can wait in a circle.
    """

    def __init__(self) -> None:
        self._inboxes: list[Sized] = []
        self._changed = asyncio.Event()

    def watch(self, inbox: Sized) -> None:
        """Count ``inbox`` too."""
        self._inboxes.append(inbox)

    def look(self) -> None:
        """Some inbox has fewer rows than before."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait until no inbox is full."""
        while any(len(inbox) >= MOST_WAITING for inbox in self._inboxes):
            self._changed.clear()
            await self._changed.wait()


class Inbox:
    """Rows to ask about, in order of arrival; iterate over it asynchronously, once.

    A row is given as what makes it, called just before it is sent: its prompt may hold what many
    earlier rows answered.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._waiting: deque[tuple[Callable[[], Row], int]] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        gate.watch(self)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, make: Callable[[], Row], answer: int) -> None:
        """Take one answer of one row."""
        self._waiting.append((make, answer))
        self._changed.set()

    def close(self) -> None:
        """No more rows come."""
        self._closed = True
        self._changed.set()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Work:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        taken = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        self._gate.look()
        return [(make(), [answer]) for make, answer in taken]
