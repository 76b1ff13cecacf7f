"""Calls that come close together are run as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from bagent.tools.tool import Arguments, ToolFault

SECONDS = 0.005
MOST = 100

Answers = Sequence[str | ToolFault]


class Window:
    """Gathers calls for ``seconds`` after the first one, or until there are ``most``.

    A call that is cancelled before its window closes is left out of it; later its answer is
    thrown away, and when all calls of a window are cancelled, so is its run.

    Args:
        run: answers the gathered calls, in their order.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Arguments]], Awaitable[Answers]],
        seconds: float = SECONDS,
        most: int = MOST,
    ) -> None:
        self._run = run
        self._seconds = seconds
        self._most = most
        self._open: list[tuple[Arguments, asyncio.Future[str]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[Answers]] = set()

    async def add(self, arguments: Arguments) -> str:
        """The answer to one call, from a run that it shares.

        Raises:
            ToolFault, or whatever the run raises.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        self._open.append((arguments, answer))
        if len(self._open) >= self._most:
            self._close()
        elif self._timer is None:
            self._timer = loop.call_later(self._seconds, self._close)
        return await answer

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        calls = [call for call in self._open if not call[1].done()]
        self._open = []
        if not calls:
            return
        waiting = [answer for _, answer in calls]
        task = asyncio.ensure_future(self._run([call[0] for call in calls]))
        self._running.add(task)
        task.add_done_callback(lambda ended: self._deliver(ended, waiting))
        for answer in waiting:
            answer.add_done_callback(lambda _: self._leave(task, waiting))

    def _leave(self, task: asyncio.Task[Answers], waiting: Sequence[asyncio.Future[str]]) -> None:
        if all(answer.cancelled() for answer in waiting):
            task.cancel()

    def _deliver(self, task: asyncio.Task[Answers], waiting: list[asyncio.Future[str]]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        answers: Answers = () if task.cancelled() or error else task.result()
        if not error and not task.cancelled() and len(answers) != len(waiting):
            error = ToolFault(f"{len(answers)} answers for {len(waiting)} calls")
        for place, answer in enumerate(waiting):
            if answer.done():
                continue
            if task.cancelled():
                answer.cancel()
            elif error is not None:
                answer.set_exception(error)
            elif isinstance(one := answers[place], ToolFault):
                answer.set_exception(one)
            else:
                answer.set_result(one)
