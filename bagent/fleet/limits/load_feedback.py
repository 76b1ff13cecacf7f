"""Whether an engine of the user's own can take more: pure judgement of what it tells and how it
answers.

Own engines queue without end and never refuse, so a limit that only refusals cut grows until
requests wait for minutes. The best limit is a little more than the engine runs at once: then a
freed place is filled without a round trip, and nothing else waits. By Little's law more brings
latency and no throughput.

Times are seconds on any monotonic clock, given with each call.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from bagent.backends.engines.metrics import EngineLoad
from bagent.fleet.limits.concurrency import EASE, InFlightLimit

POLL_SECONDS = 2.0
"""A good time between two looks: slow start can double about once between them, and a scrape
costs an engine about a millisecond."""

QUEUE_SHARE = 0.25
"""So many requests may wait for each that runs. A queue of a quarter covers the places that free
at once and the way to the client, and adds a fifth to the latency at most."""

QUEUE_LEAST = 2
"""So many may always wait: of a few requests a quarter is none."""

PERSISTENT = 2
"""Looks in a row at which too much waited before it counts: one may have met a burst just sent."""

CUSHION = 1.1
"""The limit that a cut aims at, by what runs: a tenth more than fits, and one row at least, keep
the engine full."""

FAIR_SHARE = 0.5
"""Where others use the engine too, a cut leaves as many rows as this share of what runs: two
clients that both yield so far share it evenly, and nobody is pushed out by one that never yields.
"""

OTHERS_SHARE = 0.25
"""Others use the engine if more than this share of its requests is not ours; less may be requests
that ended between the two counts."""

LEAST_ROWS = 4
"""No cut goes below: an engine that runs less than four at once loses little by a short queue."""

FULL_CACHE = 0.95
"""KV cache in use from which more requests would only push others out."""

PREEMPTED_SHARE = 0.05
"""Preemptions between two looks, by what runs, from which the limit is too high: each throws
work away. Fewer are normal in an engine that uses its memory."""

PEAKS = 3
"""Looks over which the most that ran counts: an engine that has just freed places runs less for a
moment than it can."""

WINDOW = 64
"""Answers over which times are judged: enough that their median is steady."""

ENOUGH = 8
"""Answers below which times are not judged."""

BASE_SECONDS = 600.0
"""For how long the shortest times seen are what an idle engine needs. Rows further on in the
input may be longer, which must not look like a queue for ever."""


STALE_SECONDS = 15.0
"""For how long what an engine told holds if it then fails to tell: a busy one may answer late."""


class LoadVerdict(msgspec.Struct, frozen=True):
    """What one look at an engine says: ``grow`` (growth allowed), ``hold`` or ``cut``.

    ``keep`` is the share of the limit that a cut leaves, ``least`` the rows below which it does
    not go. ``reason`` is for people, empty with ``grow``. ``told`` says that the engine itself
    told that nothing waits in it, ``in_flight`` our rows that were out at this look.
    """

    action: Literal["grow", "hold", "cut"]
    reason: str = ""
    keep: float = EASE
    least: float = LEAST_ROWS
    told: bool = False
    in_flight: int = 0


_GROW = LoadVerdict("grow")


class LoadFeedback:
    """The judgement of one endpoint; call :meth:`judge` every :data:`POLL_SECONDS` or so.

    An engine that tells what waits in it is judged by that, and by its KV cache. One that does
    not is judged by the times of its answers (:meth:`answered`): by how much of an answer's time
    goes by before its first token, or without streaming by how long it takes altogether.
    """

    def __init__(self) -> None:
        self._last: EngineLoad | None = None
        self._told = _GROW
        self._told_at = float("-inf")
        self._queued = 0
        self._thrashing = 0
        self._slow = 0
        self._aims: deque[float] = deque(maxlen=PEAKS)
        self._times = _Times()
        self.plateau: int | None = None
        """The most requests that were seen to run while others waited: what fits at once."""

    def answered(self, sent: float, latency: float, first_token: float | None = None) -> None:
        """A request sent at ``sent`` was answered well after ``latency`` seconds; its first token
        came after ``first_token`` seconds, None where that is not known."""
        self._times.add(sent, latency, first_token)

    def judge(
        self, now: float, load: EngineLoad | None, in_flight: int, burst: int = 0
    ) -> LoadVerdict:
        """What the state of the endpoint at ``now`` says of its limit.

        Args:
            now: the time of this look.
            load: what the engine told, None if it did not.
            in_flight: our own rows that are sent and not answered.
            burst: rows of our largest request: so many come at once, and wait for a moment though
                the engine has places enough on the whole. Of a list that is half done, half of
                what is in flight runs no more, so without it the engine would be half empty.
        """
        last, self._last = self._last, load or self._last
        if load is not None and load.waiting is not None and load.running is not None:
            waiting = max(0, load.waiting - (load.deferred or 0) - burst)
            queue = self._judge_queue(load.running, waiting, in_flight)
            cache = self._judge_cache(load, last, in_flight)
            self._told = queue if queue.action == "cut" or cache.action == "grow" else cache
            self._told_at = now
            return self._told
        if load is None and now - self._told_at < STALE_SECONDS:
            quiet = self._told.action == "grow"
            return _GROW if quiet else LoadVerdict("hold", self._told.reason)
        cache = _GROW if load is None else self._judge_cache(load, last, in_flight)
        if cache.action != "grow":
            return cache
        return self._judge_times(now, in_flight)

    def _judge_queue(self, running: int, waiting: int, in_flight: int) -> LoadVerdict:
        if not waiting:
            self._queued = 0
            self._aims.clear()
            return LoadVerdict("grow", told=True, in_flight=in_flight)
        total = running + waiting
        ours = in_flight * running / total
        # One address may stand for several engines of which each look meets another, so not
        # ``running`` but its share of what is there is taken of our own rows.
        self._aims.append(CUSHION * ours + 1)
        self.plateau = max(self.plateau or 0, running)
        words = f"{waiting} requests wait in the engine, {running} run"
        if waiting <= max(QUEUE_LEAST, QUEUE_SHARE * running):
            self._queued = 0
            return LoadVerdict("hold", words)
        self._queued += 1
        least = max(LEAST_ROWS, *self._aims)
        if total - in_flight > OTHERS_SHARE * total:
            words += f", {total - in_flight} of all are others'"
            least = max(least, FAIR_SHARE * running)
        if self._queued < PERSISTENT or in_flight <= least:
            return LoadVerdict("hold", words)
        # More waits than runs: the limit is twice what fits, or more.
        return LoadVerdict("cut", words, keep=0.5 if waiting >= running else EASE, least=least)

    def _judge_cache(
        self, load: EngineLoad, last: EngineLoad | None, in_flight: int
    ) -> LoadVerdict:
        used = load.kv_usage or 0.0
        preempted = grown(last.preemptions if last else None, load.preemptions) or 0
        words = f"KV cache {used:.0%} used"
        if preempted:
            words += f" and {preempted} preemption{'s' if preempted > 1 else ''}"
        running = load.running or in_flight
        if preempted <= PREEMPTED_SHARE * running:
            self._thrashing = 0
            return LoadVerdict("hold", words) if preempted or used >= FULL_CACHE else _GROW
        self._thrashing += 1
        # Here what runs is itself too much, so it is no floor.
        least = max(LEAST_ROWS, FAIR_SHARE * running)
        if self._thrashing < PERSISTENT or in_flight <= least:
            return LoadVerdict("hold", words)
        return LoadVerdict("cut", words, least=least)

    def _judge_times(self, now: float, in_flight: int) -> LoadVerdict:
        slow, fresh = self._times.judge(now)
        if slow is None or slow.waits < slow.hold:
            self._slow = 0
            return _GROW
        if slow.waits < slow.cut:
            self._slow = 0
        elif fresh:
            self._slow += 1
            least = max(LEAST_ROWS, CUSHION * in_flight * (1 - slow.waits))
            if self._slow >= PERSISTENT and in_flight > least:
                self._slow = 0
                self._times.restart(now)
                keep = 0.5 if slow.waits >= 0.5 else EASE
                return LoadVerdict("cut", slow.words, keep=keep, least=least)
        return LoadVerdict("hold", slow.words)


def follow(limit: InFlightLimit, verdict: LoadVerdict, now: float) -> None:
    """Do with ``limit`` what ``verdict`` says."""
    if verdict.action == "grow":
        limit.eased(verdict.in_flight, told=verdict.told)
    elif verdict.action == "hold":
        limit.hold(verdict.reason)
    else:
        limit.pressed(now, verdict.reason, keep=verdict.keep, least=verdict.least)


def grown(before: int | None, after: int | None) -> int | None:
    """By how much a counter grew; a restarted one has begun at 0. None where it is not told."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after


class _Slow(msgspec.Struct, frozen=True):
    """Which share of an answer's time is lost in waiting, and from which shares on it matters."""

    waits: float
    hold: float
    cut: float
    words: str


class _Times:
    """What the times of answers say, where the engine does not tell its queue.

    Of an answer's time the part beyond what the first token took at best is waiting; with ``n``
    in flight of which ``c`` run, that part is ``(n - c) / n`` of it.
    """

    FIRST_TOKEN = (0.2, 1 / 3)
    """Waiting shares that hold and cut: a quarter, and a half, more in flight than fits."""
    WHOLE = (2 / 3, 0.8)
    """The same for answers that are not streamed: a full batch alone makes each token two or
    three times as slow as a nearly empty one, and with more throughput."""
    LEAST = 1.0
    """Seconds of waiting below which nobody is harmed, and the network is most of it."""

    def __init__(self) -> None:
        self._latency: deque[float] = deque(maxlen=WINDOW)
        self._first: deque[float] = deque(maxlen=WINDOW)
        self._since = float("-inf")
        self._bases: dict[str, deque[tuple[float, float]]] = {"first": deque(), "whole": deque()}
        self._verdict: _Slow | None = None

    def restart(self, now: float) -> None:
        """The limit was cut: what was sent before says nothing of it."""
        self._since = now
        self._latency.clear()
        self._first.clear()

    def add(self, sent: float, latency: float, first_token: float | None) -> None:
        """The times of one answer, in seconds."""
        if sent < self._since:
            return
        self._latency.append(latency)
        if first_token is not None:
            self._first.append(first_token)

    def judge(self, now: float) -> tuple[_Slow | None, bool]:
        """What the last answers say, and whether that is new: a few answers say nothing."""
        if len(self._latency) < ENOUGH:
            return self._verdict, False
        latency = _middle(self._latency)
        streamed = len(self._first) >= ENOUGH
        kind, time = ("first", _middle(self._first)) if streamed else ("whole", latency)
        base = self._base(kind, now, time)
        hold, cut = self.FIRST_TOKEN if streamed else self.WHOLE
        beyond = time - base
        share = beyond / latency if beyond >= self.LEAST and latency > 0 else 0.0
        what = "the first token" if streamed else "an answer"
        words = f"{what} takes {time:.1f} s instead of {base:.1f} s"
        self._verdict = _Slow(min(share, 1.0), hold, cut, words)
        # The next look judges what came since: these stand for the limit as it was.
        self._latency.clear()
        self._first.clear()
        return self._verdict, True

    def _base(self, kind: str, now: float, time: float) -> float:
        """The shortest of the last :data:`BASE_SECONDS`, this one included."""
        seen = self._bases[kind]
        while seen and seen[-1][1] >= time:
            seen.pop()
        seen.append((now, time))
        while seen[0][0] < now - BASE_SECONDS:
            seen.popleft()
        return seen[0][1]


def _middle(values: deque[float]) -> float:
    """The upper median; the module ``statistics`` takes longer to import than a look takes."""
    return sorted(values)[len(values) // 2]
