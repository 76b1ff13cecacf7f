"""What a display may look at beyond a snapshot: endpoints one by one, and the last answers.

Nothing is copied or counted for a display that does not look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from bagent.observe.counters import RunCounters
    from bagent.types import Outcome


class _Limit(Protocol):
    @property
    def value(self) -> int: ...


class EndpointLike(Protocol):
    """An endpoint as the fleet keeps it."""

    in_flight: int

    @property
    def name(self) -> str:
        """What people see."""

    @property
    def health(self) -> str:
        """Its status: ``ok``, ``down``, ``circuit open`` ..."""

    @property
    def limit(self) -> _Limit:
        """How many rows it may have in flight."""


class EndpointLine(msgspec.Struct, frozen=True):
    """One endpoint now. ``waiting`` requests stand in its own queue; ``hit_rate`` (0 to 1) is the
    share of prompt tokens that its prefix cache knew in this run; None where it does not tell."""

    name: str
    health: str
    in_flight: int
    limit: int
    tries: int
    failed: int
    waiting: int | None = None
    hit_rate: float | None = None


class Live:
    """A run that goes on, for displays.

    Args:
        tally: its counts.
        states: the endpoints at this moment.
    """

    def __init__(self, tally: RunCounters, states: Callable[[], Sequence[EndpointLike]]) -> None:
        self.tally = tally
        self._states = states

    def endpoints(self) -> list[EndpointLine]:
        """All endpoints, in the order in which they were named."""
        lines = []
        for state in list(self._states()):
            tries, failed = self.tally.by_endpoint.get(state.name, (0, 0))
            sample = self.tally.samples.get(state.name)
            lines.append(
                EndpointLine(
                    name=state.name,
                    health=state.health,
                    in_flight=state.in_flight,
                    limit=state.limit.value,
                    tries=tries,
                    failed=failed,
                    waiting=None if sample is None else sample.waiting,
                    hit_rate=self.tally.caches.share(state.name),
                )
            )
        return lines

    def last(self) -> Sequence[Outcome]:
        """A few of the rows that ended last, the newest at the end."""
        return self.tally.last
