"""Load feedback: whether an own engine can take more, by its queue or its latencies.

Own engines queue without end and never refuse, so a limit that only refusals cut would grow until
requests wait for minutes. The best limit is a little above what the engine runs at once: a free
slot is then filled without a round trip, and nothing else waits. By Little's law a higher limit
adds latency and no throughput.

Pure objects; times are seconds on any monotonic clock, passed to each call.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

import msgspec

from bagent.backends.engines.metrics import EngineLoad
from bagent.fleet.limits.concurrency import QUEUE_CUT, USED_SHARE, InFlightLimit

POLL_SECONDS = 2.0
"""Time between polls: slow start doubles about once, and a scrape costs an engine about 1 ms."""

QUEUE_SHARE = 0.25
"""Waiting requests allowed for each running one. A queue of a quarter covers slots that free at
once and the round trip, and adds at most a fifth to the latency."""

MIN_QUEUE = 2
"""Waiting requests that are always allowed."""

PERSISTENT = 2
"""Consecutive polls with too long a queue before a cut: one may follow a burst."""

CUT_MARGIN = 1.1
"""A cut aims at what runs times this, plus one row, to keep the engine full."""

FAIR_SHARE = 0.5
"""Where others use the engine too, a cut leaves at least this share of what runs. Two clients that
do so share it evenly."""

OTHERS_SHARE = 0.25
"""Others use the engine if more than this share of its requests is not ours; fewer may have ended
between the two counts."""

MIN_ROWS = 4
"""No cut goes below."""

FULL_CACHE = 0.95
"""KV cache usage from which more requests would only evict others."""

KV_SHARE = 0.75
"""Share of the KV cache that rows in flight may fill by their mean use before the limit stops
growing. vLLM admits a request as soon as its prompt fits. When the answers then fill the cache, it
preempts the latest requests and computes their prompts again. On an H200 0.75 gave 64 rows a
second, 0.6 and 0.9 gave 61 and 59, no bound 60 (benchmarks/README.md)."""

PREEMPTION_SHARE = 0.05
"""Preemptions between two polls, relative to what runs, from which the limit is too high."""

PEAKS = 3
"""Polls over which the most running requests count: between slots less runs than could."""

WINDOW = 64
"""Latencies over which the median is taken."""

MIN_LATENCIES = 8
"""Latencies below which they are not judged."""

BASE_SECONDS = 600.0
"""For how long the shortest latency counts as that of an idle engine. Later rows may be longer,
which must not look like a queue for ever."""

STALE_SECONDS = 15.0
"""For how long an engine's report counts while further polls fail: a busy engine may be late."""


class LoadVerdict(msgspec.Struct, frozen=True):
    """What a poll of an engine says about its limit."""

    action: Literal["grow", "hold", "cut"]
    reason: str = ""  # for people; empty with ``grow``
    keep: float = QUEUE_CUT  # share of the limit that a cut leaves
    least: float = MIN_ROWS  # rows below which it does not cut
    reported: bool = False  # the engine itself reported an empty queue
    admitted: bool = True  # and most rows in flight as running
    in_flight: int = 0  # own rows in flight at this poll
    most: float = math.inf  # own rows in flight that fit into the KV cache


_GROW = LoadVerdict("grow")


class LoadFeedback:
    """Judges the load of one endpoint; call `judge` about every `POLL_SECONDS`.

    An engine that reports its queue is judged by that and by its KV cache. Any other is judged by
    its latencies: by the time to first token, or without streaming by the whole time.
    """

    def __init__(self) -> None:
        self._last: EngineLoad | None = None
        self._verdict = _GROW
        self._reported_at = float("-inf")
        self._queued_polls = 0
        self._preempted_polls = 0
        self._slow_polls = 0
        self._aims: deque[float] = deque(maxlen=PEAKS)
        self._latencies = _Latencies()
        self.plateau: int | None = None
        """The most requests seen running while others waited: the engine's capacity."""

    def add_latency(
        self, sent: float, latency: float, first_token: float | None = None, answers: int = 1
    ) -> None:
        """Record good answers to a request sent at ``sent``; durations in seconds."""
        self._latencies.add(sent, latency, first_token, answers)

    def judge(
        self, now: float, load: EngineLoad | None, in_flight: int, largest_batch: int = 0
    ) -> LoadVerdict:
        """Return what the endpoint's state says about its limit.

        Args:
            now: time of this poll.
            load: what the engine reported, if anything.
            in_flight: own rows in flight.
            largest_batch: rows of the largest own request. So many arrive at once and wait for a
                moment, although the engine has slots enough on average.
        """
        last, self._last = self._last, load or self._last
        if load is not None and load.waiting is not None and load.running is not None:
            waiting = max(0, load.waiting - (load.deferred or 0) - largest_batch)
            most = _rows_that_fit(load, load.running, in_flight, several=not largest_batch)
            queue = self._judge_queue(load.running, waiting, in_flight, most)
            cache = self._judge_cache(load, last, in_flight)
            self._verdict = queue if queue.action == "cut" or cache.action == "grow" else cache
            self._reported_at = now
            return self._verdict
        if load is None and now - self._reported_at < STALE_SECONDS:
            grows = self._verdict.action == "grow"
            return _GROW if grows else LoadVerdict("hold", self._verdict.reason)
        cache = _GROW if load is None else self._judge_cache(load, last, in_flight)
        if cache.action != "grow":
            return cache
        return self._judge_latencies(now, in_flight)

    def _judge_queue(self, running: int, waiting: int, in_flight: int, most: float) -> LoadVerdict:
        if not waiting:
            self._queued_polls = 0
            self._aims.clear()
            admitted = running >= USED_SHARE * in_flight
            return LoadVerdict(
                "grow", reported=True, in_flight=in_flight, admitted=admitted, most=most
            )
        total = running + waiting
        # One address may stand for several engines, of which each poll meets another. So the aim
        # is not ``running`` but its share of our own rows.
        self._aims.append(CUT_MARGIN * in_flight * running / total + 1)
        self.plateau = max(self.plateau or 0, running)
        reason = f"{waiting} requests wait in the engine, {running} run"
        if waiting <= max(MIN_QUEUE, QUEUE_SHARE * running):
            self._queued_polls = 0
            return LoadVerdict("hold", reason)
        self._queued_polls += 1
        least = max(MIN_ROWS, *self._aims)
        if total - in_flight > OTHERS_SHARE * total:
            reason += f", {total - in_flight} of all are others'"
            least = max(least, FAIR_SHARE * running)
        if self._queued_polls < PERSISTENT or in_flight <= least:
            return LoadVerdict("hold", reason)
        # If more waits than runs, the limit is at least twice what fits.
        keep = 0.5 if waiting >= running else QUEUE_CUT
        return LoadVerdict("cut", reason, keep=keep, least=least)

    def _judge_cache(
        self, load: EngineLoad, last: EngineLoad | None, in_flight: int
    ) -> LoadVerdict:
        used = load.kv_usage or 0.0
        preempted = counter_growth(last.preemptions if last else None, load.preemptions) or 0
        reason = f"KV cache {used:.0%} used"
        if preempted:
            reason += f" and {preempted} preemption{'s' if preempted > 1 else ''}"
        running = load.running or in_flight
        if preempted <= PREEMPTION_SHARE * running:
            self._preempted_polls = 0
            return LoadVerdict("hold", reason) if preempted or used >= FULL_CACHE else _GROW
        self._preempted_polls += 1
        # What runs is itself too much here, so it is no lower bound.
        least = max(MIN_ROWS, FAIR_SHARE * running)
        if self._preempted_polls < PERSISTENT or in_flight <= least:
            return LoadVerdict("hold", reason)
        return LoadVerdict("cut", reason, least=least)

    def _judge_latencies(self, now: float, in_flight: int) -> LoadVerdict:
        slow, fresh = self._latencies.judge(now)
        if slow is None or slow.share < slow.hold:
            self._slow_polls = 0
            return _GROW
        if slow.share < slow.cut:
            self._slow_polls = 0
        elif fresh:
            self._slow_polls += 1
            least = max(MIN_ROWS, CUT_MARGIN * in_flight * (1 - slow.share))
            if self._slow_polls >= PERSISTENT and in_flight > least:
                self._slow_polls = 0
                self._latencies.restart(now)
                keep = 0.5 if slow.share >= 0.5 else QUEUE_CUT
                return LoadVerdict("cut", slow.reason, keep=keep, least=least)
        return LoadVerdict("hold", slow.reason)


def _rows_that_fit(load: EngineLoad, running: int, in_flight: int, *, several: bool) -> float:
    """Return how many own rows may be in flight before all rows fill ``KV_SHARE`` of the cache.

    With ``several`` each row has a request of its own. Rows that the engine does not report are
    then at other engines behind the same address. In a batch they may also have ended, and use no
    cache.
    """
    if not running or not load.kv_usage:
        return math.inf
    engines = max(1, in_flight // (running + (load.waiting or 0))) if several else 1
    others = max(0, running - in_flight)
    return engines * KV_SHARE * running / load.kv_usage - others


def apply_verdict(limit: InFlightLimit, verdict: LoadVerdict, now: float) -> None:
    """Apply ``verdict`` to ``limit``."""
    if verdict.action == "grow":
        limit.allow_growth(verdict.in_flight, reported=verdict.reported, most=verdict.most)
    elif verdict.action == "hold":
        limit.hold(verdict.reason)
    else:
        limit.cut(now, verdict.reason, keep=verdict.keep, least=verdict.least)


def counter_growth(before: int | None, after: int | None) -> int | None:
    """Return by how much a counter grew, None if unknown; after a restart it counts from 0."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after


class _Waiting(msgspec.Struct, frozen=True):
    """The share of an answer's time spent waiting, and the shares from which it matters."""

    share: float
    hold: float
    cut: float
    reason: str


class _Latencies:
    """Latencies of an engine that does not report its queue.

    What exceeds the shortest latency is waiting: with ``n`` in flight of which ``c`` run, it is
    ``(n - c) / n`` of the time.
    """

    FIRST_TOKEN = (0.2, 1 / 3)
    """Waiting shares that hold and cut: a quarter, and a half, more in flight than fits."""
    UNSTREAMED = (2 / 3, 0.8)
    """The same without streaming: a full batch alone makes each token two or three times as slow
    as a nearly empty one, at more throughput."""
    MIN_SECONDS = 1.0
    """Shorter waiting is ignored: most of it is the network."""

    def __init__(self) -> None:
        self._latency: deque[float] = deque(maxlen=WINDOW)
        self._first: deque[float] = deque(maxlen=WINDOW)
        self._since = float("-inf")
        self._bases: dict[str, deque[tuple[float, float]]] = {"first": deque(), "whole": deque()}
        self._result: _Waiting | None = None

    def restart(self, now: float) -> None:
        """Ignore requests that were sent before the limit was cut."""
        self._since = now
        self._latency.clear()
        self._first.clear()

    def add(self, sent: float, latency: float, first_token: float | None, answers: int) -> None:
        """Add the latency of the answers to one request."""
        if sent < self._since:
            return
        self._latency.extend([latency] * answers)
        if first_token is not None:
            self._first.extend([first_token] * answers)

    def judge(self, now: float) -> tuple[_Waiting | None, bool]:
        """Return the latest result, and whether it is new: too few latencies give none."""
        if len(self._latency) < MIN_LATENCIES:
            return self._result, False
        latency = _median(self._latency)
        streamed = len(self._first) >= MIN_LATENCIES
        kind, time = ("first", _median(self._first)) if streamed else ("whole", latency)
        base = self._base(kind, now, time)
        hold, cut = self.FIRST_TOKEN if streamed else self.UNSTREAMED
        excess = time - base
        share = excess / latency if excess >= self.MIN_SECONDS and latency > 0 else 0.0
        subject = "the first token" if streamed else "an answer"
        reason = f"{subject} takes {time:.1f} s instead of {base:.1f} s"
        self._result = _Waiting(min(share, 1.0), hold, cut, reason)
        # These latencies belong to the limit as it was.
        self._latency.clear()
        self._first.clear()
        return self._result, True

    def _base(self, kind: str, now: float, time: float) -> float:
        """Return the shortest latency of the last :data:`BASE_SECONDS`, including ``time``."""
        minima = self._bases[kind]
        while minima and minima[-1][1] >= time:
            minima.pop()
        minima.append((now, time))
        while minima[0][0] < now - BASE_SECONDS:
            minima.popleft()
        return minima[0][1]


def _median(values: deque[float]) -> float:
    """Return the upper median; importing ``statistics`` would take longer than a poll."""
    return sorted(values)[len(values) // 2]
