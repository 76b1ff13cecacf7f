"""Row queues: the thread that reads the input, and the queue and backpressure of each stage."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
    Sized,
)
from functools import partial
from typing import NamedTuple

from bagent.agents.plan import ImageLoader
from bagent.errors import BagentError
from bagent.types import Row

BATCHES_AHEAD = 4

Work = list[tuple[Row, list[int]]]
"""Rows with the numbers of their answers that are still to do."""


IMAGES_AT_ONCE = 16
"""Rows whose images are read from a bucket at once, and are in memory together."""


async def with_images(source: AsyncIterable[Work], images: ImageLoader) -> AsyncIterator[Work]:
    """Yield the work in parts, each after the images of its rows were read."""
    from bagent.tools.threads import AbandonableThreads  # few jobs read images

    threads = AbandonableThreads("images")
    try:
        async for batch in source:
            for start in range(0, len(batch), IMAGES_AT_ONCE):
                part = batch[start : start + IMAGES_AT_ONCE]
                reads = [threads.run(partial(images.load_images, row)) for row, _ in part]
                urls = await asyncio.gather(*reads)
                yield part
                images.release_images([url for row_urls in urls for url in row_urls])
    finally:
        threads.close()


class Repeats(NamedTuple):
    """Rows that are handed on after all others."""

    answers: Callable[[Row], list[int]]
    """Returns which answers of such a row are still to do; none of any other row."""
    batches: Callable[[], Iterator[list[Row]]]
    """Reads all rows once more."""


class Feeder:
    """Reads rows in a thread and hands batches of work to the event loop, as an async iterator.

    Reading, parsing and skipping finished rows never stall requests in flight, and a slow pipe
    never blocks the loop. A semaphore bounds how many batches are in memory. Iterate only once.

    Args:
        batches: the rows, read in the thread.
        pending: returns which answers of rows are still to do; called in the thread.
        threaded: False reads in the event loop, when a batch is asked for.
        with_finished: hand on rows without remaining answers too.
        repeats: rows that are handed on after all others, which takes a second reading; None: each
            row is handed on where it stands.
    """

    def __init__(
        self,
        batches: Iterator[list[Row]],
        pending: Callable[[Sequence[Row]], list[list[int]]],
        *,
        threaded: bool = True,
        with_finished: bool = False,
        repeats: Repeats | None = None,
    ) -> None:
        self.read = 0
        """Rows read."""
        self.skipped = 0
        """Rows read that an earlier start finished."""
        self.requested = 0
        """Answers that the other rows are to get."""
        self.exhausted = False
        """All rows were read."""
        self.ended = False
        """All rows were read and handed on."""
        self._batches = batches
        self._pending = pending
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Work | BaseException | None] = asyncio.Queue()
        self._ahead = threading.Semaphore(BATCHES_AHEAD)
        self._closed = threading.Event()
        self._items = self._read_items()
        self._threaded = threaded
        self._with_finished = with_finished
        self._repeats = repeats
        self._first: Work | BaseException | None = None

    def start(self) -> None:
        """Start to read."""
        if self._threaded:
            threading.Thread(target=self._work, name="bagent-rows", daemon=True).start()

    def close(self) -> None:
        """Stop reading; a read that waits on a pipe ends with the process."""
        self._closed.set()
        self._ahead.release()

    def __aiter__(self) -> Feeder:
        return self

    async def has_work(self, on_finished: Callable[[Work], Awaitable[None]] | None = None) -> bool:
        """Read up to the first rows with work, which the iteration hands on; False without any.

        Args:
            on_finished: takes the rows before them, where finished rows are handed on too.
        """
        item = await self._next()
        while on_finished is not None and isinstance(item, list):
            if any(answers for _, answers in item):
                break
            await on_finished(item)
            item = await self._next()
        self._first = item
        self.ended = item is None
        return not self.ended

    async def __anext__(self) -> Work:
        first, self._first = self._first, None
        item = first if first is not None or self.ended else await self._next()
        if item is None:
            self.ended = True
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    async def _next(self) -> Work | BaseException | None:
        if not self._threaded:
            return next(self._items)
        item = await self._queue.get()
        self._ahead.release()
        return item

    def _read_items(self) -> Iterator[Work | BaseException | None]:
        """Yield the rows that have work in batches, then None, or the error that ended reading."""
        try:
            repeats, later = self._repeats, False
            for batch in self._batches:
                work = list(zip(batch, self._pending(batch), strict=True))
                self.requested += sum([len(answers) for _, answers in work])
                self.skipped += sum([not answers for _, answers in work])
                self.read += len(batch)
                if not self._with_finished:
                    work = [entry for entry in work if entry[1]]
                if repeats is not None:
                    now = [entry for entry in work if not repeats.answers(entry[0])]
                    later |= len(now) < len(work)
                    work = now
                if work:
                    yield work
            self.exhausted = True
            if repeats is not None and later:
                yield from self._read_repeats(repeats)
            yield None
        except (BagentError, OSError, ValueError, RuntimeError) as error:
            yield error

    def _read_repeats(self, repeats: Repeats) -> Iterator[Work]:
        for batch in repeats.batches():
            if self._closed.is_set():
                return
            work = [(row, answers) for row in batch if (answers := repeats.answers(row))]
            if work:
                yield work

    def _work(self) -> None:
        read_all = False
        try:
            for item in self._items:
                if not self._put(item):
                    return
            read_all = True
        finally:
            if not read_all and not self._closed.is_set():
                # Any other exception ended this thread: the consumer must not wait forever.
                self._put(RuntimeError("the reader of the rows ended by a fault"))

    def _put(self, item: Work | BaseException | None) -> bool:
        self._ahead.acquire()
        if self._closed.is_set():
            return False
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nothing waits any more
            return False
        return True


BATCH = 16
"""Rows rendered at once; what they read from the journal is in memory from then on."""

MOST_WAITING = 64
"""Rows that may wait for a stage before reading pauses; the fleet has a queue of its own."""


class Backpressure:
    """Pauses reading of the input while a stage's queue is full.

    It bounds reading alone: a row that ended is always accepted, so stages cannot deadlock.
    """

    def __init__(self) -> None:
        self._queues: list[Sized] = []
        self._changed = asyncio.Event()

    def watch(self, queue: Sized) -> None:
        """Count ``queue`` too."""
        self._queues.append(queue)

    def notify(self) -> None:
        """Check again: some queue has become shorter."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait until no queue is full."""
        while any(len(queue) >= MOST_WAITING for queue in self._queues):
            self._changed.clear()
            await self._changed.wait()


class StageQueue:
    """The waiting rows of one stage, as an async iterator in arrival order.

    Each row is queued as a function that renders it, called just before it is sent: its prompt may
    hold many earlier answers.
    """

    def __init__(self, backpressure: Backpressure) -> None:
        self._backpressure = backpressure
        self._waiting: deque[tuple[Callable[[], Row], int]] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        backpressure.watch(self)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, make: Callable[[], Row], answer: int) -> None:
        """Add one answer of one row."""
        self._waiting.append((make, answer))
        self._changed.set()

    def close(self) -> None:
        """Mark the end: no more rows come."""
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
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        self._backpressure.notify()
        return [(make(), [answer]) for make, answer in batch]
