"""The counts of a run: fed by every finished row and request, read as snapshots.

One finished row costs about a microsecond, and the memory does not grow with the run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from bagent.observe.error_groups import ErrorGroups
from bagent.observe.snapshot import (
    Caches,
    LogHistogram,
    Rates,
    RunTotals,
    Snapshot,
    StageCount,
    StartCounts,
    TokenCount,
    TokenTotals,
    current_rates,
)
from bagent.store.journal.codec import ACCEPTED_CODE, OK_CODE, code_of, unit_of
from bagent.store.totals import Totals
from bagent.types import Attempt, EndpointSample, FeedStats, FleetStats, Outcome, Usage


def estimate_to_do(done: int, open_rows: int, feed: FeedStats) -> int | None:
    """Return how many results are still to be made, None where the input's size is not known.

    The rows that wait or are in flight, ``open_rows``, are counted, and so are those that were read
    and not started: all of a small file. The number of rows not yet read is estimated from the
    input's size and the rows per unit so far, less those that an earlier start finished; each of
    them counts as much work as a row that was read and not skipped.
    """
    waiting = max(open_rows, feed.expected - done)
    if feed.ended:
        return waiting
    unread = _unread_rows(feed)
    if unread is None:
        return None
    taken = feed.read - feed.skipped
    work_per_row = (done + waiting) / taken if taken > 0 else 1.0
    if feed.finished is not None:
        unread = max(0.0, unread - max(0, feed.finished - feed.skipped))
    return waiting + round(unread * work_per_row)


def _unread_rows(feed: FeedStats) -> float | None:
    """Estimate the rows of the input that were not read yet; None where its size is not known."""
    if feed.ended:
        return 0.0
    if feed.size is None or feed.position <= 0 or feed.read <= 0:
        return None
    unread = max(0, feed.size - feed.position) * feed.read / feed.position
    return unread if feed.most is None else min(unread, max(0, feed.most - feed.read))


def estimate_part_total(feed: FeedStats, answers: int) -> int | None:
    """Return how many answers the rows of a part need, finished or not; exact once all are read.

    Args:
        feed: the input of the part.
        answers: how many answers each row gets.
    """
    unread = _unread_rows(feed)
    return (
        None
        if unread is None
        else max(feed.expected, feed.read * answers) + round(unread * answers)
    )


def rates_over(span_s: float, rows: int, prompt: int | None, completion: int | None) -> Rates:
    """Return what came in ``span_s`` seconds as speeds."""

    def per_second(number: int) -> float:
        return number / span_s if span_s > 0 else 0.0

    return Rates(
        span_s=span_s,
        rows_per_s=per_second(rows),
        prompt_tokens_per_s=None if prompt is None else per_second(prompt),
        completion_tokens_per_s=None if completion is None else per_second(completion),
    )


def finished_share(finished: int, to_do: int | None) -> float | None:
    """Return the share of the work that is finished, None where its size is not known."""
    if to_do is None:
        return None
    total = finished + to_do
    return finished / total if total else 1.0


def seconds_left(to_do: int | None, rows_per_s: float, fleet: FleetStats) -> float | None:
    """Return the seconds until the end, None if unknown or while no endpoint is up."""
    if to_do is None:
        return None
    if to_do == 0:
        return 0.0
    if rows_per_s <= 0 or (fleet.endpoints and not fleet.endpoints_up):
        return None
    return max(to_do / rows_per_s, fleet.throttled_s)


ENOUGH_COSTS = 20
"""With fewer answers nothing is said of the cost at the end."""


def cost_range(
    spent: float, squares: float, answers: int, to_do: int
) -> tuple[float, float] | None:
    """Return the range in which the cost lies at the end, at 95 %; None with too few answers.

    Args:
        spent: the sum of the costs of the answers so far.
        squares: the sum of their squares.
        answers: how many they are.
        to_do: how many are to come; they are taken to be like those so far.
    """
    if answers < ENOUGH_COSTS:
        return None
    mean = spent / answers
    variance = max(0.0, squares / answers - mean * mean)
    # The spread of those to come, and the doubt in the mean.
    spread = 2 * math.sqrt(variance * to_do * (1 + to_do / answers))
    expected = spent + to_do * mean
    return max(spent, expected - spread), expected + spread


WINDOW_S = 30
"""Length of the sliding window of the recent speed, in seconds."""

_FOLD_AT = 256
"""The most finished rows that wait to be added up."""

_LAST = 10

_RECENT_TIMES = 64
"""Good attempts of each endpoint whose time is kept."""


class SpeedWindow:
    """Rows, prompt tokens and completion tokens of the last 30 s, in one-second buckets.

    ``current`` is valid until ``until``; call :meth:`turn` before using it later.
    """

    __slots__ = ("buckets", "current", "until")

    def __init__(self, now: float) -> None:
        self.buckets = [[0, 0, 0] for _ in range(WINDOW_S)]
        self.until = int(now) + 1
        self.current = self.buckets[int(now) % WINDOW_S]

    def turn(self, now: float) -> None:
        """Make the second of ``now`` the current bucket, emptying those that it passes."""
        second = int(now)
        for passed in range(max(self.until, second - WINDOW_S + 1), second + 1):
            self.buckets[passed % WINDOW_S] = [0, 0, 0]
        self.until = second + 1
        self.current = self.buckets[second % WINDOW_S]

    def add(self, rows: int, prompt: int, completion: int) -> None:
        """Count in the current second, which is that of the last :meth:`turn`."""
        self.current[0] += rows
        self.current[1] += prompt
        self.current[2] += completion

    def sums(self, now: float, elapsed: float) -> tuple[list[int], float]:
        """Return [rows, prompt tokens, completion tokens] and the seconds that they cover."""
        if now >= self.until:
            self.turn(now)
        span = min(elapsed, now - self.until + WINDOW_S)
        return [sum(column) for column in zip(*self.buckets, strict=True)], span


N = TypeVar("N", int, float)


class _Sum(Generic[N]):
    """A sum of known values, and how many were unknown."""

    __slots__ = ("total", "unknown")

    def __init__(self, zero: N) -> None:
        self.total: N = zero
        self.unknown = 0

    def add(self, values: list[N | None]) -> N:
        """Add the known values; return their sum."""
        values_known = [value for value in values if value is not None]
        self.unknown += len(values) - len(values_known)
        part = sum(values_known)
        self.total += part
        return part

    def total_of(self, answers: int) -> N | None:
        """Return the sum, None where none of ``answers`` values was known."""
        return self.total if self.total or self.unknown < answers else None


class _Spent(NamedTuple):
    """What an unfinished conversation has cost, as far as it is known or counted."""

    prompt: int
    cached: int
    completion: int
    reasoning: int
    cost_usd: float

    def minus(self, other: _Spent) -> _Spent:
        """Return what was spent beyond ``other``."""
        return _Spent(
            self.prompt - other.prompt,
            self.cached - other.cached,
            self.completion - other.completion,
            self.reasoning - other.reasoning,
            self.cost_usd - other.cost_usd,
        )


_NOTHING_SPENT = _Spent(0, 0, 0, 0, 0.0)


def _spent(usage: Usage, cost_usd: float | None) -> _Spent:
    return _Spent(
        usage.prompt or 0,
        usage.cached or 0,
        usage.completion or 0,
        usage.reasoning or 0,
        cost_usd or 0.0,
    )


class RunCounters:
    """Counts finished rows and requests.

    ``latency`` and ``ttft`` are live histograms in milliseconds of answers, without failed and
    copied rows. ``by_endpoint`` has (attempts, failed attempts), ``times`` the seconds of the last
    good attempts at each endpoint, ``samples`` its last sample, ``caches`` the cache hits, ``last``
    a few of the rows that ended last.

    Args:
        clock: monotonic seconds; the run begins now.
    """

    __slots__ = (
        "_answers",
        "_by_stage",
        "_cached",
        "_clock",
        "_codes",
        "_completion",
        "_copied",
        "_cost",
        "_cost_squares",
        "_cut_at",
        "_done",
        "_errors",
        "_failed_by_stage",
        "_failed_tries",
        "_group",
        "_last",
        "_no_counts",
        "_not_valid",
        "_open",
        "_outcomes_cost",
        "_pending",
        "_prompt",
        "_prompt_of_silent",
        "_reasoning",
        "_requests",
        "_retries",
        "_sent",
        "_start",
        "_throttled",
        "_tries",
        "_valid",
        "_window",
        "by_endpoint",
        "caches",
        "last",
        "latency",
        "samples",
        "times",
        "ttft",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = self._last = clock()
        self._window = SpeedWindow(self._start)
        self.latency = LogHistogram()
        self.ttft = LogHistogram()
        self._codes: Counter[int] = Counter()
        self._by_stage: dict[str, int] = {}
        self._failed_by_stage: dict[str, int] = {}
        self._failed_tries: dict[str, int] = {}
        self._errors = ErrorGroups()
        self._pending: list[Outcome] = []
        self._done = self._sent = self._copied = self._answers = self._no_counts = 0
        self._prompt, self._cached, self._completion, self._reasoning = (_Sum(0) for _ in range(4))
        self._prompt_of_silent = 0
        """Prompt tokens of the answers that do not say how many were cached."""
        self._cost = _Sum(0.0)
        self._cost_squares = 0.0
        self._outcomes_cost = 0.0
        self._open: dict[int, _Spent] = {}
        """Unfinished conversations: what is counted of them, or was by earlier starts."""
        self._valid = self._not_valid = 0
        self._requests = self._tries = self._retries = self._throttled = 0
        self._group: str | None = None
        self._cut_at: tuple[int, int] | None = None
        self.by_endpoint: dict[str, tuple[int, int]] = {}
        self.times: dict[str, deque[float]] = {}
        self.samples: dict[str, EndpointSample] = {}
        self.caches = Caches()
        self.last: list[Outcome] = []

    def sample(self, sample: EndpointSample) -> None:
        """Store the last sample of an endpoint's load."""
        self.caches.add(sample)
        if sample.waiting is not None or sample.endpoint not in self.samples:
            self.samples[sample.endpoint] = sample

    def outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Count outcomes, if any; they must not be changed afterwards."""
        if not outcomes:
            return
        self._last = now = self._clock()
        if now >= self._window.until:
            self._fold()
            self._window.turn(now)
        self._pending += outcomes
        if len(self._pending) >= _FOLD_AT:
            self._fold()

    def resume_conversation(self, unit: int, usage: Usage, cost_usd: float | None) -> None:
        """Note what earlier starts spent on a conversation."""
        self._open[unit] = _spent(usage, cost_usd)

    def spend(self, unit: int, usage: Usage, cost_usd: float | None) -> None:
        """Count what a conversation has cost so far, less what was counted."""
        spent = _spent(usage, cost_usd)
        before = self._open.get(unit, _NOTHING_SPENT)
        self._open[unit] = spent
        now = self._clock()
        if now >= self._window.until:
            self._fold()
            self._window.turn(now)
        self._count_spent(spent.minus(before))

    def _count_spent(self, spent: _Spent) -> None:
        self._prompt.total += spent.prompt
        self._cached.total += spent.cached
        self._completion.total += spent.completion
        self._reasoning.total += spent.reasoning
        self._cost.total += spent.cost_usd
        self._window.add(0, spent.prompt, spent.completion)

    def _close_conversations(self, answers: list[Outcome]) -> None:
        """Take back what was counted of conversations that have ended, before they are counted."""
        for o in answers:
            before = self._open.pop(unit_of(int(o.key, 16), o.stage, o.answer), None)
            if before is not None:
                self._count_spent(_NOTHING_SPENT.minus(before))

    def _fold(self) -> None:
        """Add up the pending rows by column, which takes half the time of row by row."""
        rows = self._pending
        if not rows:
            return
        self._pending = []
        self.last = (self.last + rows[-_LAST:])[-_LAST:]
        answers = [o for o in rows if o.status == "ok" and o.copied_from is None]
        if len(answers) < len(rows):
            answers = self._sift(rows)
        if self._open:
            self._close_conversations(answers)
        prompts = [o.prompt_tokens for o in answers]
        completions = [o.completion_tokens for o in answers]
        if None in prompts or None in completions:
            pairs = zip(prompts, completions, strict=True)
            self._no_counts += [None in pair for pair in pairs].count(True)
        self._window.add(len(rows), self._prompt.add(prompts), self._completion.add(completions))
        self._done += len(rows)
        for stage, count in Counter([o.stage for o in rows]).items():
            self._by_stage[stage] = self._by_stage.get(stage, 0) + count
        self._codes[OK_CODE] += [o.status for o in rows].count("ok")
        self._sent += len([o for o in rows if o.attempts and o.copied_from is None])
        self._answers += len(answers)
        silent = self._cached.unknown
        self._cached.add([o.cached_tokens for o in answers])
        if self._cached.unknown > silent:
            self._prompt_of_silent += sum(
                [o.prompt_tokens or 0 for o in answers if o.cached_tokens is None]
            )
        self._reasoning.add([o.reasoning_tokens for o in answers])
        costs = [o.cost_usd for o in answers]
        self._outcomes_cost += self._cost.add(costs)
        self._cost_squares += sum([cost * cost for cost in costs if cost is not None])
        first_tries = [o.first_try_valid for o in answers]
        self._valid += first_tries.count(True)
        self._not_valid += first_tries.count(False)
        self.latency.add([ms for o in answers if (ms := o.latency_ms) is not None])
        self.ttft.add([ms for o in answers if (ms := o.ttft_ms) is not None])

    def _sift(self, rows: list[Outcome]) -> list[Outcome]:
        """Count failures and copies; return the rows for which an endpoint gave an answer."""
        answers = []
        for o in rows:
            status = o.status
            code = code_of(status, o.error_kind)
            if code not in (OK_CODE, ACCEPTED_CODE):
                self._failed_by_stage[o.stage] = self._failed_by_stage.get(o.stage, 0) + 1
                self._errors.add(o)
            if code != OK_CODE:
                self._codes[code] += 1
            if status == "truncated" and o.completion_tokens is not None:
                low, high = self._cut_at or (o.completion_tokens, o.completion_tokens)
                self._cut_at = min(low, o.completion_tokens), max(high, o.completion_tokens)
            if o.copied_from is not None:
                self._copied += 1
            elif (
                status not in ("failed", "bad_input")
                or o.prompt_tokens is not None
                or o.completion_tokens is not None
            ):
                answers.append(o)
        return answers

    def attempts(self, attempts: Sequence[Attempt]) -> None:
        """Count rows' parts in HTTP requests; those of one request may come in several lists."""
        self._tries += len(attempts)
        for a in attempts:
            if a.group != self._group:
                self._group = a.group
                self._requests += 1
                self._throttled += a.status_code == 429 or a.error_kind == "rate_limited"
            if a.try_ > 1:
                self._retries += 1
            count, failed = self.by_endpoint.get(a.endpoint, (0, 0))
            if a.error_kind is not None:
                failed += 1
                self._failed_tries[a.error_kind] = self._failed_tries.get(a.error_kind, 0) + 1
            elif a.done is not None:
                times = self.times.get(a.endpoint)
                if times is None:
                    times = self.times[a.endpoint] = deque(maxlen=_RECENT_TIMES)
                times.append(a.done - a.sent)
            self.by_endpoint[a.endpoint] = count + 1, failed

    def to_do(self, open_rows: int, feed: FeedStats) -> int | None:
        """Return how many results are still to be made, see :func:`estimate_to_do`."""
        self._fold()
        return estimate_to_do(self._done, open_rows, feed)

    def snapshot(
        self, fleet: FleetStats, feed: FeedStats, run: RunTotals | None = None
    ) -> Snapshot:
        """Return everything counted so far, with the present state of the fleet and the input.

        ``run`` are the totals of the whole run; None: this start is all of it.
        """
        self._fold()
        now = self._clock()
        elapsed = max(0.0, now - self._start)
        recent, overall = self._speeds(now, elapsed)
        to_do = self.to_do(fleet.in_flight + fleet.ready + fleet.retrying, feed)
        run = run or RunTotals(Totals.of(self._codes))
        remaining = None if to_do is None or run.staged else max(0, to_do - run.repeats_in(feed))
        total = None if remaining is None else run.totals.rows + remaining
        finished = feed.skipped + self._done if total is None else total - (to_do or 0)
        return Snapshot(
            elapsed_s=elapsed,
            quiet_s=max(0.0, now - self._last),
            total=total,
            total_is_exact=total is not None and feed.ended and not (remaining and run.unmatched),
            ok=run.totals.ok,
            accepted=run.totals.accepted,
            failed=run.totals.failed,
            remaining=remaining,
            to_do=to_do,
            fraction=finished_share(finished, to_do),
            eta_s=seconds_left(to_do, current_rates(recent, overall).rows_per_s, fleet),
            by_status=run.totals.by_status,
            by_kind=run.totals.by_kind,
            this_start=self._this_start(),
            skipped=feed.skipped,
            tokens=self._tokens(),
            cost_usd=(cost := self._cost.total_of(self._answers)),
            cost_unknown=0 if cost is None else self._cost.unknown,
            cost_at_end=self._cost_at_end(to_do),
            first_try_valid=self._valid,
            first_try_total=self._valid + self._not_valid,
            latency=self.latency.distribution(),
            ttft=self.ttft.distribution(),
            # The fleet also counts requests that belong to no row.
            requests=max(self._requests, fleet.requests),
            tries=self._tries,
            retries=self._retries,
            throttled=max(self._throttled, fleet.throttle_answers),
            failed_tries=dict(self._failed_tries),
            recent=recent,
            overall=overall,
            errors=self._errors.groups(),
            errors_other=self._errors.other,
            fleet=fleet,
            feed=feed,
            cache=self.caches.rate(self.by_endpoint),
            by_stage=self._stages(),
            cut_at=self._cut_at,
            changes=run.changes,
            dropped=run.dropped,
            unit=run.unit,
            several_stages=run.several_stages,
        )

    def _cost_at_end(self, to_do: int | None) -> tuple[float, float] | None:
        """Return the range of the cost of this start at its end."""
        if self._cost.unknown or not to_do:
            return None
        mean = self._outcomes_cost, self._cost_squares, self._answers
        at_end = cost_range(*mean, to_do)
        if at_end is None:
            return None
        # Conversations of several starts, and those that have not ended.
        other = self._cost.total - self._outcomes_cost
        return at_end[0] + other, at_end[1] + other

    def _this_start(self) -> StartCounts:
        own = Totals.of(self._codes)
        return StartCounts(self._done, own.ok, own.failed, self._sent, self._copied, own.by_status)

    def _stages(self) -> dict[str, StageCount]:
        failed = self._failed_by_stage
        return {
            stage: StageCount(done - failed.get(stage, 0), failed.get(stage, 0))
            for stage, done in self._by_stage.items()
        }

    def _tokens(self) -> TokenTotals:
        prompt, cached, completion, reasoning = (
            TokenCount(total=column.total_of(self._answers), unknown=column.unknown)
            for column in (self._prompt, self._cached, self._completion, self._reasoning)
        )
        return TokenTotals(
            *(prompt, cached, completion, reasoning),
            without_counts=self._no_counts,
            cached_of=self._prompt.total - self._prompt_of_silent,
        )

    def _speeds(self, now: float, elapsed: float) -> tuple[Rates, Rates]:
        """Return recent and overall speed."""
        sums, span = self._window.sums(now, elapsed)
        rows = sums[0]
        prompt: int | None = sums[1]
        completion: int | None = sums[2]
        if self._prompt.total_of(self._answers) is None:
            prompt = None
        if self._completion.total_of(self._answers) is None:
            completion = None
        recent = rates_over(span, rows, prompt, completion)
        overall = rates_over(
            elapsed,
            self._done,
            self._prompt.total_of(self._answers),
            self._completion.total_of(self._answers),
        )
        return recent, overall
