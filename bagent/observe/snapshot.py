"""The state of a run at one moment, as plain values that encode to JSON.

Unknown numbers are None, never 0. All texts are valid UTF-8 without control characters.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from bagent.store.totals import ToolCount, Totals
from bagent.types import EndpointSample, FeedStats, FleetStats


class CacheRate(msgspec.Struct, frozen=True):
    """Prompt tokens that prefix caches looked up and found, by the counters of ``endpoints``.

    The counters are the engines' own, so they include requests of other users. ``silent``
    endpoints were sent requests and report no counters.
    """

    hits: int
    queries: int
    endpoints: int
    silent: int = 0

    @property
    def share(self) -> float:
        """The share (0 to 1) that was found."""
        return self.hits / self.queries if self.queries else 0.0


class _Counter(msgspec.Struct):
    hits: int
    queries: int
    grown_hits: int = 0
    grown_queries: int = 0


class Caches:
    """Adds up the counters of all endpoints, from the first reading of each on."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}

    def add(self, sample: EndpointSample) -> None:
        """Add a sample; one without counters is ignored."""
        hits, queries = sample.cache_hits, sample.cache_queries
        if hits is None or queries is None:
            return
        counter = self._counters.get(sample.endpoint)
        if counter is None:
            self._counters[sample.endpoint] = _Counter(hits, queries)
            return
        restarted = queries < counter.queries or hits < counter.hits
        counter.grown_hits += hits if restarted else hits - counter.hits
        counter.grown_queries += queries if restarted else queries - counter.queries
        counter.hits, counter.queries = hits, queries

    def share(self, endpoint: str) -> float | None:
        """Return the share (0 to 1) that an endpoint's cache had; None where not reported."""
        counter = self._counters.get(endpoint)
        if counter is None or not counter.grown_queries:
            return None
        return counter.grown_hits / counter.grown_queries

    def rate(self, requested: Iterable[str] = ()) -> CacheRate | None:
        """Return the rate of all endpoints together; None where none reports it.

        Args:
            requested: the endpoints that were sent requests.
        """
        grown = {name: counter for name, counter in self._counters.items() if counter.grown_queries}
        if not grown:
            return None
        hits = sum(counter.grown_hits for counter in grown.values())
        queries = sum(counter.grown_queries for counter in grown.values())
        silent = sum(1 for name in requested if name not in grown)
        return CacheRate(hits, queries, len(grown), silent)


class Distribution(msgspec.Struct, frozen=True):
    """A summary of many durations in milliseconds.

    ``p50`` and ``p99`` are within 1 % of the true value; ``mean`` and ``max`` are exact. All
    four are None while ``count`` is 0.
    """

    count: int
    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    max: float | None = None


class TokenCount(msgspec.Struct, frozen=True):
    """Tokens of one kind: the sum over answers that report them, and how many do not.

    ``total`` is None where none does.
    """

    total: int | None
    unknown: int


class TokenTotals(msgspec.Struct, frozen=True):
    """Tokens of all answers that were sent for; copied answers add nothing.

    ``without_counts`` is how many answers lack the prompt or the completion count. A row that
    ended without any answer is not among them.
    """

    prompt: TokenCount
    cached: TokenCount
    completion: TokenCount
    reasoning: TokenCount
    without_counts: int
    cached_of: int = 0
    """Prompt tokens of the answers that say how many were cached."""


class Rates(msgspec.Struct, frozen=True):
    """Speeds per second over ``span_s`` seconds; token speeds are None if unknown."""

    span_s: float
    rows_per_s: float
    prompt_tokens_per_s: float | None
    completion_tokens_per_s: float | None


_APART = 1.2
"""Times to the end that differ by a larger factor are shown as a range."""

_ENOUGH_ROWS = 10
"""With fewer rows in the recent window the overall speed is shown and used for the ETA."""


def current_rates(recent: Rates, overall: Rates) -> Rates:
    """Return the recent speed, or the overall one where few rows ended recently."""
    return recent if round(recent.rows_per_s * recent.span_s) >= _ENOUGH_ROWS else overall


class ErrorGroup(msgspec.Struct, frozen=True):
    """Failed rows whose errors are equal but for numbers, ids, addresses and quoted words.

    ``kind`` is the error kind (the status where a row has none), ``pattern`` the text they
    share. ``http_status`` is the status named in the text, else None. ``endpoint``,
    ``row``, ``id``, ``source``, ``line`` and ``text`` (at most 300 characters) are the first
    row's; ``endpoints`` counts distinct endpoints, at most 100. ``count`` is exact unless the
    group was once replaced by another; then it is too low and the remainder is in
    :attr:`Snapshot.errors_other`.
    """

    count: int
    kind: str
    pattern: str
    http_status: int | None
    endpoint: str | None
    endpoints: int
    row: int
    id: str | None
    source: str
    line: int
    text: str


class EndpointTrouble(msgspec.Struct, frozen=True):
    """An endpoint that did not serve at the end of a start, was slow, or failed often."""

    name: str
    health: str
    """``down``, ``circuit open`` ..., ``slow`` or ``failing``."""

    times: float | None = None
    """Its median time relative to the median of the others, where it is slow."""

    p50_s: float | None = None
    """Its median time in seconds, where it is slow."""

    failed: float | None = None
    """The share (0 to 1) of its attempts that failed, where it is ``failing``."""


class StageCount(msgspec.Struct, frozen=True):
    """Rows of one stage that ended: with a good answer, and without."""

    ok: int
    failed: int


class StartCounts(msgspec.Struct, frozen=True):
    """What this start did.

    ``done`` rows ended: ``ok``, ``failed`` or with an accepted truncated answer. ``sent`` of them
    were sent to an endpoint, ``copied`` took the answer to an equal request.
    """

    done: int
    ok: int
    failed: int
    sent: int
    copied: int
    by_status: dict[str, int] = {}


class RunTotals(msgspec.Struct, frozen=True):
    """The totals of the whole run as a display needs them.

    ``repeats`` rows have a failure of an earlier start and will be sent again; ``repeats_unread``
    more of them are expected in the input that is not yet read. ``changes`` is the
    part of this start, by outcome code. ``unmatched`` finished rows are not in the input as far as
    it was read: they left it, or were edited and will be sent again. ``staged``: the job has
    several stages, so the rows of the last one are unknown. ``dropped``, ``unit`` and
    ``several_stages``: as in :class:`Snapshot`.
    """

    totals: Totals
    repeats: int = 0
    repeats_unread: int = 0
    changes: dict[int, int] = {}
    unmatched: int = 0
    staged: bool = False
    dropped: dict[str, int] = {}
    unit: str = "row"
    several_stages: bool = False

    def repeats_in(self, feed: FeedStats) -> int:
        """Return the rows with an earlier failure among those that are still to do."""
        return self.repeats + (0 if feed.ended else self.repeats_unread)


class Snapshot(msgspec.Struct, frozen=True):
    """Everything that is known about a run at one moment.

    ``total``, ``ok``, ``accepted``, ``failed``, ``by_status`` and ``by_kind`` speak of the whole
    run, whichever start wrote the results; of a job with several stages the last one counts.
    ``accepted`` rows have a truncated answer that the job accepts. ``remaining`` rows have no
    result yet. ``to_do`` results this start has still to make, in all stages, also those of rows
    that failed earlier and are sent again; ``fraction`` (0 to 1) and ``eta_s`` follow from it.
    Each is None if unknown; ``total_is_exact`` says whether ``total`` and
    ``remaining`` are more than estimates.

    ``this_start`` and everything below it is of this start alone: ``skipped`` rows were finished
    by an earlier one. ``requests`` counts HTTP requests, ``throttled`` those that were told to slow
    down, ``tries`` one row's part in one request, ``retries`` those after a row's first,
    ``failed_tries`` the unsuccessful ones by kind. ``quiet_s`` is how long ago the last row ended
    (the begin, if none has). ``errors`` are the groups, largest first; ``errors_other`` failed
    rows are in none of them. ``by_stage`` has the stages in the order in which their first rows
    ended. ``cut_at`` are the fewest and the most tokens of truncated answers. ``cache`` is what
    prefix caches knew by the endpoints' counters, None where none told. ``changes`` is what this
    start adds to the totals, by outcome code. ``causes`` are the kinds of failure of all stages,
    known at the end of a job that has several. ``dropped`` are failed rows that a stage left out
    (``on_failure: drop``), by that stage. ``tools`` are the calls of each tool of the job, also of
    tools that were never called, over the whole run; known at its end. ``unit`` is what the totals
    count: ``row``, or ``answer`` where a row has several. With ``several_stages`` speeds and
    ``to_do`` count the results of all of them. ``cost_at_end`` is the range in which the cost of
    this start ends by the answers so far, None where that is not known.
    """

    elapsed_s: float
    quiet_s: float
    total: int | None
    total_is_exact: bool
    ok: int
    accepted: int
    failed: int
    remaining: int | None
    to_do: int | None
    fraction: float | None
    eta_s: float | None
    by_status: dict[str, int]
    by_kind: dict[str, int]
    this_start: StartCounts
    skipped: int
    tokens: TokenTotals
    cost_usd: float | None
    cost_unknown: int
    first_try_valid: int
    first_try_total: int
    latency: Distribution
    ttft: Distribution
    requests: int
    tries: int
    retries: int
    throttled: int
    failed_tries: dict[str, int]
    recent: Rates
    overall: Rates
    errors: tuple[ErrorGroup, ...]
    errors_other: int
    fleet: FleetStats
    feed: FeedStats
    cache: CacheRate | None = None
    by_stage: dict[str, StageCount] = {}
    cut_at: tuple[int, int] | None = None
    dropped: dict[str, int] = {}
    tools: dict[str, ToolCount] = {}
    changes: dict[int, int] = {}
    causes: dict[str, int] = {}
    unit: str = "row"
    several_stages: bool = False
    cost_at_end: tuple[float, float] | None = None
    trouble: list[EndpointTrouble] = []
    """Endpoints that were down, slow or failing; known at the end."""

    def with_totals(self, totals: Totals) -> Snapshot:
        """Return this state with the totals of the whole run as the journal has them."""
        return msgspec.structs.replace(
            self,
            total=None if self.remaining is None else totals.rows + self.remaining,
            ok=totals.ok,
            accepted=totals.accepted,
            failed=totals.failed,
            by_status=totals.by_status,
            by_kind=totals.by_kind,
        )

    @property
    def totals(self) -> Totals:
        """The counts of rows of the whole run that have a result."""
        return Totals(self.ok, self.accepted, self.failed, self.by_status, self.by_kind)

    @property
    def resumed(self) -> bool:
        """Whether an earlier start left results that count."""
        return self.skipped > 0 or self.totals.rows > self.this_start.done

    @property
    def rates(self) -> Rates:
        """The speed by which ``eta_s`` is estimated."""
        return current_rates(self.recent, self.overall)

    @property
    def speed_unit(self) -> str:
        """What speeds and ``to_do`` count."""
        return "result" if self.several_stages else self.unit

    @property
    def eta_range(self) -> tuple[float, float] | None:
        """The seconds to the end by the recent and by the overall speed; None where they agree."""
        slow, fast = sorted(speed.rows_per_s for speed in (self.recent, self.overall))
        if self.eta_s is None or not self.to_do or slow <= 0:
            return None
        low, high = (max(self.to_do / speed, self.fleet.throttled_s) for speed in (fast, slow))
        return (low, high) if high > _APART * low else None

    @property
    def first_try_share(self) -> float | None:
        """Share (0 to 1) of first answers that fit the schema; None without a schema."""
        return self.first_try_valid / self.first_try_total if self.first_try_total else None


_LOWEST_MS = 0.01
_HIGHEST_MS = 1e9


def _clamp(value: float) -> float:
    # A comparison with NaN is false, so NaN takes the last branch.
    if value > _HIGHEST_MS:
        return _HIGHEST_MS
    return value if value >= _LOWEST_MS else _LOWEST_MS


class LogHistogram:
    """Counts of positive values in logarithmic buckets; 1,267 integers by default.

    Values under 0.01 ms (also NaN) fall in the lowest bucket, values over 1e9 ms (11 days) in
    the highest.

    Args:
        relative_error: the share by which a quantile may be wrong, e.g. 0.01.
    """

    __slots__ = ("_counts", "_distribution", "_gamma", "_scale", "_shift", "largest", "total")

    def __init__(self, relative_error: float = 0.01) -> None:
        self._gamma = (1 + relative_error) / (1 - relative_error)
        self._scale = 1 / math.log(self._gamma)
        # Places start at 1, so that cutting off the fraction is rounding down.
        self._shift = 1 - math.floor(math.log(_LOWEST_MS) * self._scale)
        highest = math.floor(math.log(_HIGHEST_MS) * self._scale)
        self._counts = [0] * (highest + self._shift + 1)
        self._distribution: Distribution | None = None  # until the next value
        self.total = 0.0
        self.largest = 0.0

    def add(self, values: Sequence[float]) -> None:
        """Count values in milliseconds."""
        if not values:
            return
        self._distribution = None
        total = sum(values)
        # A NaN hides from min and max, but never from the sum.
        if min(values) < _LOWEST_MS or max(values) > _HIGHEST_MS or math.isnan(total):
            values = [_clamp(value) for value in values]
            total = sum(values)
        counts, scale, shift = self._counts, self._scale, self._shift
        for power in map(math.log, values):
            counts[int(power * scale + shift)] += 1
        self.total += total
        self.largest = max(self.largest, *values)

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self._counts)

    def _upper(self, bucket: int) -> float:
        return float(self._gamma ** (bucket - self._shift + 1))

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` (0 to 1) of all values do not exceed; None when empty."""
        totals = list(accumulate(self._counts))
        rank = max(1, math.ceil(share * totals[-1]))
        bucket = bisect_left(totals, rank)
        if bucket == len(totals):
            return None
        return min(2 * self._upper(bucket) / (self._gamma + 1), self.largest)

    def buckets(self) -> list[tuple[float, int]]:
        """Non-empty buckets as (upper bound in milliseconds, count), rising."""
        return [(self._upper(bucket), n) for bucket, n in enumerate(self._counts) if n]

    def distribution(self) -> Distribution:
        """Mean, median, 99th percentile and maximum, for a snapshot."""
        if self._distribution is None:
            self._distribution = self._distribute()
        return self._distribution

    def _distribute(self) -> Distribution:
        count = self.count
        if not count:
            return Distribution(count=0)
        return Distribution(
            count=count,
            mean=self.total / count,
            p50=self.quantile(0.5),
            p99=self.quantile(0.99),
            max=self.largest,
        )
