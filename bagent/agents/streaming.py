"""Whether an agent's turns are worth streaming."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from bagent.backends.request import Watch
from bagent.types import ToolCall

FIRST = 8
"""First, second ... turns that are streamed before anything is known of them."""

WORTH = 0.1
"""Share of a turn's time that early calls must save: a streamed answer costs a server, whose front
end is often the limit, and its client more than a whole one does. One call that ends its turn saves
a step or two of the engine that way, half of this in a short turn: nothing that anybody gains."""

SAMPLE_EVERY = 16
"""One turn in so many is streamed although it is not worth it: models change their ways."""

_KEPT = 32
_MOST = 8


class _Turns(msgspec.Struct):
    """All first turns, or all second ones: how many were asked, and what streams of them saved."""

    count: int = 0
    told: deque[tuple[float, float]] = msgspec.field(default_factory=lambda: deque(maxlen=_KEPT))


class StreamPolicy:
    """Streams turns as long as tools that start before the end of their turn save enough time.

    First turns, second ones and so on are told apart: the last one of an agent is its answer, where
    no tool starts. Turns beyond the eighth are like the eighth. Not for other threads.
    """

    def __init__(self) -> None:
        self._turns = [_Turns() for _ in range(_MOST)]

    def next(self, turn: int) -> bool:
        """Whether to stream the next answer to ``turn``, from 1."""
        of = self._of(turn)
        of.count += 1
        if of.count <= FIRST or of.count % SAMPLE_EVERY == 0:
            return True
        took = sum(each for each, _ in of.told)
        return bool(of.told) and sum(saved for _, saved in of.told) >= WORTH * took

    def note(self, turn: int, took: float, saved: float) -> None:
        """Note a streamed turn: its seconds, and those between its first whole call and its end."""
        self._of(turn).told.append((took, saved))

    def _of(self, turn: int) -> _Turns:
        return self._turns[min(turn, _MOST) - 1]


class FirstToolCallTimer:
    """Notes when the first call of a streamed answer was whole, and passes each on.

    Args:
        clock: gives what ``at`` is noted in.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.at: float | None = None

    def watched(self, watch: Watch) -> Callable[[ToolCall], None]:
        """What takes the calls of one answer as they come, in place of what ``watch`` gives."""
        take = watch()
        self.at = None

        def on_call(call: ToolCall) -> None:
            if self.at is None:
                self.at = self._clock()
            take(call)

        return on_call
