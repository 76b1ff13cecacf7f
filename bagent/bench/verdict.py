"""Which endpoints are bad: each is compared with the others, which are few at times.

Speeds differ by chance, the more so the fewer requests there are. So an endpoint is called slow
only where its speed is beyond what chance explains: by the spread of requests' times, over as many
of them as an endpoint had one after the other (those that are in flight together are held up
together), and over all endpoints, of which one may always be the last. Of 100 fleets of 4 to 4,000
like endpoints at most one has one named, from three requests each on, where the standard deviation
of the times is up to half of them; with two requests and more spread up to five have.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from bagent.observe.formatting import counted

Verdict = Literal["ok", "slow", "failing", "dead"]
"""``dead``: it does not answer, or no request of it ended well. ``failing``: requests fail there,
or it answers and takes no load. ``slow``: less than :data:`SLOW` times as fast as the others (their
median; of an even number the faster of the two in the middle, since with few endpoints a mean of
two means little), and not by chance. ``ok``: none of it."""

SLOW = 0.7
"""An endpoint is slow below this share of the median of the others."""

FAILING = 0.01
"""An endpoint is failing above this share of failed requests."""

FEWEST_FAILURES = 2
"""One failure alone may be chance, unless it is one in ten."""

CHANCE = 0.01
"""How probable it may be that any endpoint of a fleet whose endpoints are alike is called slow."""

ALIKE = 0.9
"""Endpoints are alike from this share of the others' median on."""

USUAL_SPREAD = 0.3
"""How much requests' times spread (standard deviation of the logarithm) as long as too few are
known; it weighs as much as :data:`USUAL_WEIGHT` of them."""

USUAL_WEIGHT = 4

_OF_MEDIAN = math.sqrt(math.pi / 2)
"""How much more a median varies than a mean does."""


class EndpointStats(msgspec.Struct, frozen=True):
    """One endpoint in one load."""

    endpoint: str
    load: str
    requests: int
    """Those that were sent to it, ``ok`` of which ended well and ``failed`` did not; the rest
    were still going on when the load ended."""
    ok: int
    failed: int
    tokens: float | None = None
    """Output tokens that came from it; None where none are told."""
    output_tok_s: float | None = None
    """Output tokens a second, for each of its GPUs where their number is known."""
    pace_ms: float | None = None
    """Median time for each output token from sending on; where no tokens are told, for each
    request."""
    closed: bool = True
    """Whether the load was a closed loop, in which a fast endpoint does more."""
    model: str | None = None
    """What it was asked for: only endpoints of one model are compared."""
    spread: float | None = None
    """Standard deviation of the logarithm of the time whose median ``pace_ms`` is; None where
    fewer than two are known."""
    in_flight: float = 1.0
    """Requests that were going on there at a time, in the mean."""

    @property
    def rounds(self) -> float:
        """How many of its requests went on one after the other."""
        return max(1.0, self.requests / max(1.0, self.in_flight))


class EndpointVerdict(msgspec.Struct, frozen=True):
    """The verdict on one endpoint and the reason in words; ``speed`` is its speed as a share of
    the median of the others (the median over all loads), None where there is nothing to compare."""

    endpoint: str
    verdict: Verdict
    reason: str = ""
    speed: float | None = None


def judge(
    endpoints: Sequence[str],
    not_ready: Mapping[str, EndpointVerdict],
    seen: Iterable[EndpointStats],
    causes: Mapping[str, str] | None = None,
) -> list[EndpointVerdict]:
    """A verdict for each endpoint, in the order given.

    Args:
        not_ready: verdicts that are known already: of endpoints that got no load, or are gone.
        seen: what is known of the others, load by load.
        causes: the most frequent failure of an endpoint in words.
    """
    by_name: dict[str, list[EndpointStats]] = defaultdict(list)
    for row in seen:
        by_name[row.endpoint].append(row)
    found: dict[str, EndpointVerdict] = {}
    for name in endpoints:
        verdict = _alone(name, not_ready, by_name[name], (causes or {}).get(name))
        if verdict is not None:
            found[name] = verdict
    telling = {
        name: [row for row in rows if row.pace_ms is not None]
        for name, rows in by_name.items()
        if name not in found
    }
    peers = {
        key: _Peers(rows)
        for key, rows in _grouped(row for rows in telling.values() for row in rows).items()
    }
    for name in endpoints:
        if name not in found:
            found[name] = _compared(name, telling.get(name, ()), peers)
    return [found[name] for name in endpoints]


_Key = tuple[str, str | None, bool]


def _key(row: EndpointStats) -> _Key:
    """What endpoints must share to be compared: also what their times are of."""
    return row.load, row.model, row.tokens is None


def _grouped(rows: Iterable[EndpointStats]) -> dict[_Key, list[EndpointStats]]:
    found: dict[_Key, list[EndpointStats]] = defaultdict(list)
    for row in rows:
        found[_key(row)].append(row)
    return found


class _Peers:
    """Endpoints of one model in one load, sorted once: a fleet has thousands."""

    def __init__(self, rows: Sequence[EndpointStats]) -> None:
        self.count = len(rows)
        self._works = sorted(row.output_tok_s for row in rows if row.output_tok_s is not None)
        self._waits = sorted(row.pace_ms for row in rows if row.pace_ms is not None)
        self._spread = _usual_spread(rows)
        rounds = statistics.median(row.rounds for row in rows)
        # Of the others' median, which is one of as many endpoints.
        self._error = _OF_MEDIAN * self._spread / math.sqrt(rounds * max(1, self.count - 1))

    def work(self, own: EndpointStats) -> float | None:
        """Its tokens a second by the others' median; None where that cannot be told."""
        if not own.closed or own.output_tok_s is None:
            return None
        # Of an even number the faster of the two in the middle.
        middle = _without(self._works, own.output_tok_s, (len(self._works) - 1) // 2)
        if middle:
            return own.output_tok_s / middle
        # The others stood still.
        return math.inf if own.output_tok_s and middle is not None else None

    def wait(self, own: EndpointStats) -> float | None:
        """The others' median time by its own; None where that cannot be told."""
        if not own.pace_ms:
            return None
        middle = _without(self._waits, own.pace_ms, (len(self._waits) - 2) // 2)
        return None if middle is None else middle / own.pace_ms

    def error(self, own: EndpointStats) -> float:
        """By how much the logarithm of its speed varies by chance (standard deviation)."""
        of_others = self._spread**2
        known = own.requests - 1 if own.spread is not None else 0
        squares = known * (own.spread or 0.0) ** 2 + USUAL_WEIGHT * of_others
        spread = max(of_others, squares / (known + USUAL_WEIGHT))
        return math.hypot(_OF_MEDIAN * math.sqrt(spread / own.rounds), self._error)


def _usual_spread(rows: Sequence[EndpointStats]) -> float:
    """How much requests' times spread at an endpoint: the median of what is known of each, so
    that one which comes and goes says nothing of the others."""
    found, weight = [], 0.0
    for row in rows:
        known = row.requests - 1
        if row.spread is not None and known > 0:
            weight += known
            # The median of a variance of few is below it (Wilson and Hilferty).
            found.append(row.spread**2 / (1 - 2 / (9 * known)) ** 3)
    middle = statistics.median(found) if found else 0.0
    squares = weight * middle + USUAL_WEIGHT * USUAL_SPREAD**2
    return math.sqrt(squares / (weight + USUAL_WEIGHT))


def _without(values: Sequence[float], own: float, place: int) -> float | None:
    """What is at ``place`` of the sorted ``values`` less ``own``, one of them."""
    if len(values) < 2:
        return None
    return values[place if place < bisect_left(values, own) else place + 1]


def _alone(
    name: str,
    not_ready: Mapping[str, EndpointVerdict],
    own: Sequence[EndpointStats],
    cause: str | None,
) -> EndpointVerdict | None:
    """The verdict that needs no other endpoint, None where there is none."""
    if name in not_ready:
        return not_ready[name]
    sent, ok = sum(row.requests for row in own), sum(row.ok for row in own)
    failed = sum(row.failed for row in own)
    why = f", mostly {cause}" if cause else ""
    if sent and not ok and not any(row.tokens for row in own):
        if failed == sent:
            return EndpointVerdict(name, "dead", f"all of {sent} requests failed{why}")
        return EndpointVerdict(name, "dead", f"none of {sent} requests ended well{why}")
    share = failed / sent if sent else 0.0
    if share > FAILING and (failed >= FEWEST_FAILURES or share >= 0.1):
        return EndpointVerdict(name, "failing", f"{failed} of {sent} requests failed{why}")
    return None


def _compared(
    name: str, rows: Sequence[EndpointStats], peers: Mapping[_Key, _Peers]
) -> EndpointVerdict:
    """The verdict by the other endpoints' speed; the worst of its two measures counts."""
    works: list[tuple[float, float]] = []
    waits: list[tuple[float, float]] = []
    for row in rows:
        others = peers[_key(row)]
        for found, share in ((works, others.work(row)), (waits, others.wait(row))):
            if share is not None:
                found.append((share, others.error(row)))
    measures = [_over_loads(found) for found in (works, waits) if found]
    if not measures:
        return EndpointVerdict(name, "ok", "nothing to compare it with")
    speed, error = min(measures)
    if speed >= SLOW:
        return EndpointVerdict(name, "ok", "", speed if math.isfinite(speed) else None)
    words = f"{speed:.2f} times as fast as the median of the others (below {SLOW:g})"
    count = max(peers[_key(row)].count for row in rows)
    sure = statistics.NormalDist().inv_cdf(1 - CHANCE / (len(measures) * count))
    if speed and math.log(speed / ALIKE) > -sure * error:
        requests = sum(row.requests for row in rows)
        return EndpointVerdict(
            name, "ok", f"{words}, which may be chance: {counted(requests, 'request')}", speed
        )
    return EndpointVerdict(name, "slow", words, speed)


def _over_loads(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median of the shares of several loads, and how much its logarithm varies by chance."""
    count = len(found)
    error = math.hypot(*(one for _, one in found)) / count
    more = _OF_MEDIAN if count > 2 else 1.0
    return statistics.median(share for share, _ in found), more * error


Numbers = Mapping[str, Any]

_VERDICTS = ("ok", "slow", "failing", "dead")
_RANKS = {"dead": 0, "failing": 1, "slow": 2, "ok": 3}


def worst(endpoints: Sequence[Numbers], most: int) -> tuple[list[Numbers], str]:
    """At most ``most`` rows of the summary's endpoints, and what is to be said of the rest.

    Where all fit they stand in the order of the hostfile. Else: dead, failing and slow ones first,
    the slowest before the others.
    """
    if len(endpoints) <= most:
        return list(endpoints), ""
    ordered = sorted(endpoints, key=_badness)
    left = ordered[most:]
    bad = sum(one["verdict"] != "ok" for one in left)
    words = f"{len(left):,} more endpoints, {f'{bad:,} of them not ok' if bad else 'all ok'}"
    return ordered[:most], f"{words}: endpoints.csv has every one"


def _badness(one: Numbers) -> tuple[int, float]:
    speed = one.get("speed")
    return _RANKS[one["verdict"]], speed if speed is not None else 1.0


def fleet_words(summary: Numbers) -> str:
    """The whole fleet in a line: verdicts, how unlike endpoints are, and what a sweep found."""
    fleet = summary["fleet"]
    words = ", ".join(f"{fleet[word]} {word}" for word in _VERDICTS if fleet[word])
    if fleet.get("max_by_min"):
        words += f"; fastest / slowest {fleet['max_by_min']:.2f}, CV {fleet['cv']:.2f}"
    found = summary.get("saturation")
    if found:
        words += f"; saturated at {found['best_rate']:.3g} calls/s, c={found['concurrency']}"
        if found["sustained_rate"]:
            words += f"; {found['sustained_rate']:.3g} requests/s sustained"
    return words


def main_kinds(failures: Sequence[Numbers]) -> dict[str, str]:
    """By endpoint: the kind of failure that was most frequent there, with its status code."""
    counts: dict[str, dict[str, int]] = {}
    for one in failures:
        if one["kind"] != "unfinished":
            own = counts.setdefault(one["endpoint"], {})
            words = _kind(one["kind"], one["code"])
            own[words] = own.get(words, 0) + one["n"]
    return {name: max(own, key=own.__getitem__) for name, own in counts.items()}


def _kind(kind: str, code: int | None) -> str:
    return kind if code in (None, 200) else f"{kind} (HTTP {code})"


def failure_words(failures: Sequence[Numbers], most: int) -> list[str]:
    """Failures of all endpoints and loads by kind, a line each, the most frequent first."""
    kinds: dict[str, list[Numbers]] = {}
    for one in failures:
        kinds.setdefault(_kind(one["kind"], one["code"]), []).append(one)
    ordered = sorted(kinds.items(), key=lambda item: -sum(one["n"] for one in item[1]))
    found = [_kind_words(kind, rows) for kind, rows in ordered[:most]]
    if len(ordered) > most:
        found.append(f"{len(ordered) - most} more kinds of failure: summary.json has every one")
    return found


def _kind_words(kind: str, rows: Sequence[Numbers]) -> str:
    by_endpoint: dict[str, int] = {}
    for one in rows:
        by_endpoint[one["endpoint"]] = by_endpoint.get(one["endpoint"], 0) + one["n"]
    (name, count) = max(by_endpoint.items(), key=lambda item: item[1])
    where = f"at {name or 'no endpoint'}"
    if len(by_endpoint) > 1:
        where = f"at {len(by_endpoint):,} endpoints, most ({count:,}) {where}"
    loads = list(dict.fromkeys(one["load"] for one in rows))
    within = f"in {loads[0]}" if len(loads) == 1 else f"in {len(loads)} loads"
    worst_one = max(rows, key=lambda one: one["n"])
    example = f": {worst_one['example']}" if worst_one["example"] else ""
    total = sum(by_endpoint.values())
    return f"{total:,} x {kind} {where} {within}{example}"
