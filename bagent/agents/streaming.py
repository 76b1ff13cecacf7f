"""The policy for streaming an agent's turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from bagent.backends.request import Watch
from bagent.types import ToolCall

FIRST = 8
"""Turns of each number that are streamed before their samples count."""

WORTH = 0.1
"""Share of a turn's time that early tool calls must save: streaming costs server and client more
than a complete response. A single call at the end of its turn saves less than half of this."""

SAMPLE_EVERY = 16
"""One turn in this many is streamed as a sample, although streaming saves too little."""

_KEPT = 32
_MOST = 8


class _Turns(msgspec.Struct):
    """All turns of one number: their count, and (seconds, seconds saved) of streamed ones."""

    count: int = 0
    samples: deque[tuple[float, float]] = msgspec.field(default_factory=lambda: deque(maxlen=_KEPT))


class StreamPolicy:
    """Streams turns while tools that start before the end of their turn save enough time.

    It samples each number of turn apart, up to the eighth: the last turn of an agent is its answer,
    where no tool starts. Not thread-safe.
    """

    def __init__(self) -> None:
        self._turns = [_Turns() for _ in range(_MOST)]

    def next(self, turn: int) -> bool:
        """Return whether to stream the next reply of turn number ``turn``, from 1."""
        samples = self._of(turn)
        samples.count += 1
        if samples.count <= FIRST or samples.count % SAMPLE_EVERY == 0:
            return True
        took = sum(each for each, _ in samples.samples)
        return bool(samples.samples) and sum(saved for _, saved in samples.samples) >= WORTH * took

    def note(self, turn: int, took: float, saved: float) -> None:
        """Note a streamed turn: its seconds, and those from its first complete call to its end."""
        self._of(turn).samples.append((took, saved))

    def _of(self, turn: int) -> _Turns:
        return self._turns[min(turn, _MOST) - 1]


class FirstToolCallTimer:
    """Notes when the first tool call of a streamed reply was complete, and passes calls on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.at: float | None = None

    def watched(self, watch: Watch) -> Callable[[ToolCall], None]:
        """Return the handler for the tool calls of one reply, around the one of ``watch``."""
        pass_on = watch()
        self.at = None

        def on_call(call: ToolCall) -> None:
            if self.at is None:
                self.at = self._clock()
            pass_on(call)

        return on_call
