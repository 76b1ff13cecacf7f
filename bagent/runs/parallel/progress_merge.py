"""Merging of the states of several processes that share a run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from bagent.observe import (
    Distribution,
    EndpointTrouble,
    ErrorGroup,
    Rates,
    Snapshot,
    StartCounts,
    TokenCount,
    TokenTotals,
)
from bagent.observe.counters import SpeedWindow, finished_share, rates_over
from bagent.store.totals import Totals
from bagent.types import FeedStats, FleetStats

MOST_GROUPS = 20


class StateMerger:
    """Merges the states of the workers of one run into the state of the run. Call it often.

    Args:
        before: the outcomes of earlier starts, by code.
        clock: monotonic seconds.
    """

    def __init__(
        self, before: Mapping[int, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._before = before
        self._clock = clock
        self._start = math.inf
        self._window = SpeedWindow(clock())
        self._counted = (0, 0, 0)

    def merge(self, states: Sequence[Snapshot]) -> Snapshot:
        """Merge ``states``, of which there is at least one.

        Counts are sums, and speeds are those of the sums over the time of the run, since the
        workers begin and end at different times. Medians and 99th percentiles are means weighted
        by the number of rows, since the workers' rows are random parts of one input. Means and
        maxima are exact.
        """
        changes = _sum_codes(*(state.changes for state in states))
        totals = Totals.of(_sum_codes(self._before, changes))
        to_do = _sum_all(s.to_do for s in states)
        remaining = _sum_all(s.remaining for s in states)
        total = None if remaining is None else totals.rows + remaining
        start = _start([s.this_start for s in states])
        skipped = sum(s.skipped for s in states)
        finished = skipped + start.done if total is None else total - (to_do or 0)
        groups, others = _errors(states)
        tokens = _tokens([s.tokens for s in states])
        elapsed, recent, overall = self._speeds(states, start.done, tokens)
        return Snapshot(
            elapsed_s=elapsed,
            quiet_s=min(s.quiet_s for s in states),
            total=total,
            total_is_exact=total is not None and all(s.total_is_exact for s in states),
            ok=totals.ok,
            accepted=totals.accepted,
            failed=totals.failed,
            remaining=remaining,
            to_do=to_do,
            fraction=finished_share(finished, to_do),
            eta_s=_latest(s.eta_s for s in states),
            by_status=totals.by_status,
            by_kind=totals.by_kind,
            this_start=start,
            skipped=skipped,
            tokens=tokens,
            cost_usd=_sum_known(s.cost_usd for s in states),
            cost_unknown=sum(s.cost_unknown for s in states),
            first_try_valid=sum(s.first_try_valid for s in states),
            first_try_total=sum(s.first_try_total for s in states),
            latency=_distribution([s.latency for s in states]),
            ttft=_distribution([s.ttft for s in states]),
            requests=sum(s.requests for s in states),
            tries=sum(s.tries for s in states),
            retries=sum(s.retries for s in states),
            throttled=sum(s.throttled for s in states),
            failed_tries=_sums(s.failed_tries for s in states),
            recent=recent,
            overall=overall,
            errors=groups,
            errors_other=others,
            fleet=_fleet([s.fleet for s in states]),
            feed=_feed([s.feed for s in states]),
            changes=dict(changes),
            cut_at=_range(s.cut_at for s in states),
            dropped=_sums(s.dropped for s in states),
            unit=states[0].unit,
            several_stages=states[0].several_stages,
            trouble=_trouble(states),
        )

    def _speeds(
        self, states: Sequence[Snapshot], done: int, tokens: TokenTotals
    ) -> tuple[float, Rates, Rates]:
        """Return how long the run has worked, its recent and its overall speed.

        The run began when its first worker did.
        """
        now = self._clock()
        self._start = min(self._start, now - max(s.elapsed_s for s in states))
        prompt, completion = tokens.prompt.total, tokens.completion.total
        counts = done, prompt or 0, completion or 0
        self._window.turn(now)
        # The counts of a worker begin again where it is started again.
        self._window.add(*(max(0, n - o) for n, o in zip(counts, self._counted, strict=True)))
        self._counted = counts
        elapsed = now - self._start
        (rows, *recent), span = self._window.sums(now, elapsed)
        return (
            elapsed,
            rates_over(
                span,
                rows,
                None if prompt is None else recent[0],
                None if completion is None else recent[1],
            ),
            rates_over(elapsed, done, prompt, completion),
        )


S = TypeVar("S", bound=msgspec.Struct)


def _sum_structs(parts: Sequence[S], **values: object) -> S:
    """Return a struct whose fields are the sums of those of ``parts``, except for ``values``."""
    kind = type(parts[0])
    names = [name for name in kind.__struct_fields__ if name not in values]
    sums = {name: sum(getattr(part, name) for part in parts) for name in names}
    return kind(**sums, **values)


def _start(parts: Sequence[StartCounts]) -> StartCounts:
    return _sum_structs(parts, by_status=_sums(part.by_status for part in parts))


def _trouble(states: Sequence[Snapshot]) -> list[EndpointTrouble]:
    """Return the endpoints that a worker names, each as the first one saw it."""
    by_name = {trouble.name: trouble for s in reversed(states) for trouble in s.trouble}
    return sorted(by_name.values(), key=lambda trouble: trouble.times or float("inf"), reverse=True)


def _fleet(parts: Sequence[FleetStats]) -> FleetStats:
    return _sum_structs(
        parts,
        throttled_s=max(part.throttled_s for part in parts),
        endpoints_up=max(part.endpoints_up for part in parts),
        endpoints=max(part.endpoints for part in parts),
    )


def _feed(parts: Sequence[FeedStats]) -> FeedStats:
    """Return the progress of reading; every worker reads the whole input, so the slowest counts."""
    slowest = min(parts, key=lambda part: part.position)
    return _sum_structs(
        parts,
        position=slowest.position,
        size=slowest.size,
        ended=all(part.ended for part in parts),
        finished=None,
        most=_sum_all(part.most for part in parts),
        empty=_sums(part.empty for part in parts),
    )


def _range(parts: Iterable[tuple[int, int] | None]) -> tuple[int, int] | None:
    ranges = [part for part in parts if part is not None]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def _latest(etas: Iterable[float | None]) -> float | None:
    values = list(etas)
    return None if None in values else max(eta for eta in values if eta is not None)


def _sum_codes(*counts: Mapping[int, int]) -> Counter[int]:
    total: Counter[int] = Counter()
    for count in counts:
        total.update(count)
    return total


def _sum_all(values: Iterable[int | None]) -> int | None:
    """Return the sum; None where one of the values is unknown."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _sum_known(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def _count(counts: Sequence[TokenCount]) -> TokenCount:
    totals = [count.total for count in counts if count.total is not None]
    return TokenCount(sum(totals) if totals else None, sum(count.unknown for count in counts))


def _tokens(parts: Sequence[TokenTotals]) -> TokenTotals:
    return TokenTotals(
        prompt=_count([part.prompt for part in parts]),
        cached=_count([part.cached for part in parts]),
        completion=_count([part.completion for part in parts]),
        reasoning=_count([part.reasoning for part in parts]),
        without_counts=sum(part.without_counts for part in parts),
        cached_of=sum(part.cached_of for part in parts),
    )


def _distribution(parts: Sequence[Distribution]) -> Distribution:
    filled = [part for part in parts if part.count]
    count = sum(part.count for part in filled)
    if not count:
        return Distribution(0)

    def mean(values: Iterable[float | None]) -> float:
        pairs = zip(values, filled, strict=True)
        return sum((value or 0.0) * part.count for value, part in pairs) / count

    return Distribution(
        count,
        mean(part.mean for part in filled),
        mean(part.p50 for part in filled),
        mean(part.p99 for part in filled),
        max(part.max or 0.0 for part in filled),
    )


def _errors(states: Sequence[Snapshot]) -> tuple[tuple[ErrorGroup, ...], int]:
    """Merge error groups of equal patterns; the first worker's first row stays."""
    groups: dict[tuple[str, str], ErrorGroup] = {}
    for group in (group for state in states for group in state.errors):
        key = (group.kind, group.pattern)
        first = groups.get(key)
        if first is not None:
            group = msgspec.structs.replace(
                first,
                count=first.count + group.count,
                endpoints=max(first.endpoints, group.endpoints),
            )
        groups[key] = group
    ranked = sorted(groups.values(), key=lambda group: -group.count)
    other = sum(group.count for group in ranked[MOST_GROUPS:]) + sum(
        state.errors_other for state in states
    )
    return tuple(ranked[:MOST_GROUPS]), other
