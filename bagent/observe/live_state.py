"""State beyond a snapshot that a display may read: single endpoints, and the last answers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from bagent.observe.snapshot import EndpointTrouble

if TYPE_CHECKING:
    from bagent.observe.counters import RunCounters
    from bagent.types import Outcome


class _Limit(Protocol):
    @property
    def value(self) -> int: ...


class EndpointLike(Protocol):
    """The state of an endpoint in the fleet."""

    in_flight: int

    @property
    def name(self) -> str:
        """Its name for people."""

    @property
    def health(self) -> str:
        """Its status: ``ok``, ``down``, ``circuit open`` ..."""

    @property
    def limit(self) -> _Limit:
        """How many rows it may have in flight."""


class EndpointLine(msgspec.Struct, frozen=True):
    """One endpoint now."""

    name: str
    health: str
    in_flight: int
    limit: int
    tries: int
    failed: int
    waiting: int | None = None
    """Requests in its own queue; None where it does not report them."""

    hit_rate: float | None = None
    """The share (0 to 1) of prompt tokens that its prefix cache had in this run."""

    p50_s: float | None = None
    """The median time of its last good attempts; None with fewer than five."""


ENOUGH_TIMES = 5


def median_time(seconds: Collection[float]) -> float | None:
    """Return the median of the times of an endpoint; None with too few."""
    return statistics.median(seconds) if len(seconds) >= ENOUGH_TIMES else None


def times_the_median(lines: Sequence[EndpointLine]) -> dict[str, float]:
    """Return the time of each endpoint relative to the median of all; empty for a single one."""
    times = {e.name: e.p50_s for e in lines if e.p50_s is not None}
    middle = statistics.median(times.values()) if len(times) > 1 else 0.0
    return {name: seconds / middle for name, seconds in times.items()} if middle > 0 else {}


NOT_SERVING = ("down", "unresponsive", "circuit open")

SLOW_AT_END = 2.0
"""An endpoint that takes so many times the median of all is named at the end of a run."""

FEWEST_FAILED = 5
"""An endpoint with fewer failed attempts is not named as failing."""


def endpoints_in_trouble(lines: Sequence[EndpointLine]) -> list[EndpointTrouble]:
    """Return the endpoints that do not serve, the slow ones by time, and those that fail often."""
    by_name = {line.name: line for line in lines}
    slower = times_the_median(list(by_name.values()))
    dead = [
        EndpointTrouble(line.name, line.health)
        for line in by_name.values()
        if line.health in NOT_SERVING
    ]
    named = {trouble.name for trouble in dead}
    slow = [
        EndpointTrouble(name, "slow", times, by_name[name].p50_s)
        for name, times in sorted(slower.items(), key=lambda item: -item[1])
        if times >= SLOW_AT_END and name not in named
    ]
    return dead + slow + _failing(by_name.values(), named)


def _failing(lines: Collection[EndpointLine], named: Collection[str]) -> list[EndpointTrouble]:
    """Return the endpoints that fail clearly more often than the others, by the report's rule."""
    tries, failed = sum(line.tries for line in lines), sum(line.failed for line in lines)
    failing = []
    for line in lines if len(lines) > 1 else ():
        others = (failed - line.failed) / max(1, tries - line.tries)
        share = line.failed / max(1, line.tries)
        if line.failed >= FEWEST_FAILED and share > 2 * others + 0.01 and line.name not in named:
            failing.append(EndpointTrouble(line.name, "failing", failed=share))
    return sorted(failing, key=lambda trouble: -(trouble.failed or 0.0))


class Live:
    """A running run, for displays.

    Args:
        tally: its counts.
        states: the endpoints at this moment.
    """

    def __init__(self, tally: RunCounters, states: Callable[[], Sequence[EndpointLike]]) -> None:
        self.tally = tally
        self._states = states

    def endpoints(self) -> list[EndpointLine]:
        """Return all endpoints in the order of the hostfile."""
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
                    p50_s=median_time(self.tally.times.get(state.name, ())),
                )
            )
        return lines

    def last(self) -> Sequence[Outcome]:
        """Return a few of the rows that ended last, the newest at the end."""
        return self.tally.last
