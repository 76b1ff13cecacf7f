"""State beyond a snapshot that a display may read: the last answers, and single endpoints.

The rules by which an endpoint is called slow or failing are those of summary and report too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from bagent.observe.snapshot import EndpointTrouble

if TYPE_CHECKING:
    from bagent.observe.counters import RunCounters
    from bagent.types import Outcome


SLOW = 1.5
"""An endpoint that takes more than so many times the median of the others is slow."""

FEWEST = 5
"""Successful attempts from which an endpoint is called slow, failed ones from which failing."""


def times_the_others(times: Mapping[str, float]) -> dict[str, float]:
    """Return the time of each endpoint relative to the median of the others; empty for one."""
    if len(times) < 2:
        return {}
    order = sorted(times, key=lambda name: times[name])
    middle = (len(order) - 1) // 2
    ratios = {}
    for rank, name in enumerate(order):
        others = times[order[middle if rank > middle else middle + 1]]
        if others > 0:
            ratios[name] = times[name] / others
    return ratios


def failing(counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
    """Return the endpoints that fail far more often than the others, the worst first.

    Each has the share of its attempts that failed, and the share of the others'.

    Args:
        counts: attempts and failed attempts of each endpoint that serves.
    """
    if len(counts) < 2:
        return {}
    all_tries = sum(tries for tries, _ in counts.values())
    all_failed = sum(failed for _, failed in counts.values())
    shares = {}
    for name, (tries, failed) in counts.items():
        share = failed / max(1, tries)
        others = (all_failed - failed) / max(1, all_tries - tries)
        if failed >= FEWEST and share > 2 * others + 0.01:
            shares[name] = share, others
    return dict(sorted(shares.items(), key=lambda item: -item[1][0]))


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


def median_time(seconds: Collection[float]) -> float | None:
    """Return the median of the times of an endpoint; None with too few."""
    return statistics.median(seconds) if len(seconds) >= FEWEST else None


def times_of_lines(lines: Sequence[EndpointLine]) -> dict[str, float]:
    """Return the time of each endpoint relative to the median of the others."""
    return times_the_others({e.name: e.p50_s for e in lines if e.p50_s is not None})


NOT_SERVING = ("down", "unresponsive", "circuit open")


def endpoints_in_trouble(lines: Sequence[EndpointLine]) -> list[EndpointTrouble]:
    """Return the endpoints that do not serve, the slow ones by time, and those that fail often."""
    by_name = {line.name: line for line in lines}
    serving = {name: line for name, line in by_name.items() if line.health not in NOT_SERVING}
    dead = [EndpointTrouble(n, line.health) for n, line in by_name.items() if n not in serving]
    ratios = times_of_lines(list(serving.values()))
    slow = [
        EndpointTrouble(name, "slow", times, serving[name].p50_s)
        for name, times in sorted(ratios.items(), key=lambda item: -item[1])
        if times > SLOW
    ]
    shares = failing({name: (line.tries, line.failed) for name, line in serving.items()})
    return [
        *dead,
        *slow,
        *(EndpointTrouble(name, "failing", failed=own) for name, (own, _) in shares.items()),
    ]


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
