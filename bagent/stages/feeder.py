"""Reads rows in a thread of their own and hands them to the event loop, a few batches ahead.

Reading, parsing and skipping what was finished earlier never stall the requests in flight, and a
slow pipe never blocks the loop. The semaphore is the backpressure: memory holds a few batches.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sized

from bagent.errors import BagentError
from bagent.types import Row

BATCHES_AHEAD = 4

Work = list[tuple[Row, list[int]]]
"""Rows with the numbers of their answers that are still to do."""


class Feeder:
    """Iterate over it asynchronously for batches of work; use it once.

    ``read`` counts rows, ``skipped`` those of them that were finished earlier, ``wanted`` the
    answers that the others are to get. ``exhausted``: all rows were read; ``ended``: and handed on.

    Args:
        batches: the rows, read in the thread.
        pending: which answers of a row are still to do; called in the thread.
    """

    def __init__(self, batches: Iterator[list[Row]], pending: Callable[[Row], list[int]]) -> None:
        self.read = 0
        self.skipped = 0
        self.wanted = 0
        self.exhausted = False
        self.ended = False
        self._batches = batches
        self._pending = pending
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Work | BaseException | None] = asyncio.Queue()
        self._ahead = threading.Semaphore(BATCHES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="bagent-rows", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Read no more; a read that waits on a pipe is left to end with the process."""
        self._closed.set()
        self._ahead.release()

    def __aiter__(self) -> Feeder:
        return self

    async def __anext__(self) -> Work:
        item = await self._queue.get()
        self._ahead.release()
        if item is None:
            self.ended = True
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def _work(self) -> None:
        told = False
        try:
            for batch in self._batches:
                work = []
                for row in batch:
                    answers = self._pending(row)
                    if answers:
                        work.append((row, answers))
                        self.wanted += len(answers)
                    else:
                        self.skipped += 1
                self.read += len(batch)
                if work and not self._put(work):
                    return
            self.exhausted = True
            told = self._put(None) or True
        except (BagentError, OSError, ValueError, RuntimeError) as error:
            told = self._put(error) or True
        finally:
            if not told and not self._closed.is_set():
                # Whatever else ended this thread, nobody may wait for it for ever.
                self._put(RuntimeError("the reader of the rows ended by a fault"))

    def _put(self, item: Work | BaseException | None) -> bool:
        self._ahead.acquire()
        if self._closed.is_set():
            return False
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return False
        return True


BATCH = 16
"""Rows that are made ready at once: what they read from the journal is in memory from then on."""

MOST_WAITING = 64
"""So many rows may wait for a stage before no more of the input is read.

A fleet has rows enough standing ready by itself; those here are only names of rows.
"""


class Backpressure:
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


class StageQueue:
    """Rows to ask about, in order of arrival; iterate over it asynchronously, once.

    A row is given as what makes it, called just before it is sent: its prompt may hold what many
    earlier rows answered.
    """

    def __init__(self, gate: Backpressure) -> None:
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

    def __aiter__(self) -> StageQueue:
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
