"""Verdicts on endpoints, each by comparison with the others.

An endpoint is called slow only where chance does not explain its speed. Chance is estimated from
the spread of requests' times, over as many requests as the endpoint had one after the other (those
in flight together are delayed together), and corrected for the number of endpoints. In 100 fleets
of 4 to 4,000 equal endpoints at most one has an endpoint called slow, from three requests per
endpoint on, where the standard deviation of the times is up to half their mean; with two requests
and more spread up to five have.
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
"""``dead``: it does not answer, or no request ended well. ``failing``: requests fail, or it
answers and takes no load. ``slow``: below :data:`SLOW` times the others' median speed (of an
even number the faster of the two in the middle), and not by chance. ``ok``: none of these."""

SLOW = 0.7
"""An endpoint is slow below this share of the median of the others."""

FAILING = 0.01
"""An endpoint is failing above this share of failed requests."""

MIN_FAILURES = 2
"""A single failure may be chance, unless it is one in ten requests."""

CHANCE = 0.01
"""Probability that any endpoint of a fleet of equal endpoints is called slow."""

ALIKE = 0.9
"""Endpoints are equal from this share of the others' median on."""

PRIOR_SPREAD = 0.3
"""Prior spread of requests' times (standard deviation of the logarithm); it weighs as much as
:data:`PRIOR_WEIGHT` requests."""

PRIOR_WEIGHT = 4

_OF_MEDIAN = math.sqrt(math.pi / 2)
"""Ratio of the error of a median to that of a mean."""


class EndpointStats(msgspec.Struct, frozen=True):
    """One endpoint in one load."""

    endpoint: str
    load: str
    requests: int
    ok: int
    failed: int
    """``requests``, ``ok``, ``failed``: those sent, and how many ended well or not; the others
    were still running at the end."""
    tokens: float | None = None
    """Output tokens; None where none are reported."""
    output_tok_s: float | None = None
    """Output tokens per second, per GPU where their number is known."""
    pace_ms: float | None = None
    """Median time per output token from sending on; per request where no tokens are reported."""
    closed: bool = True
    """Whether the load was a closed loop, in which a fast endpoint does more."""
    model: str | None = None
    """The requested model: only endpoints of one model are compared."""
    spread: float | None = None
    """Standard deviation of the logarithm of the time whose median is ``pace_ms``; None below
    two."""
    in_flight: float = 1.0
    """Mean number of requests in flight."""

    @property
    def rounds(self) -> float:
        """Return how many of its requests ran one after the other."""
        return max(1.0, self.requests / max(1.0, self.in_flight))


class EndpointVerdict(msgspec.Struct, frozen=True):
    """The verdict on one endpoint and its reason."""

    endpoint: str
    verdict: Verdict
    reason: str = ""
    speed: float | None = None
    """Speed as a share of the others' median, the median over all loads; None without others."""


def judge(
    endpoints: Sequence[str],
    not_ready: Mapping[str, EndpointVerdict],
    stats: Iterable[EndpointStats],
    causes: Mapping[str, str] | None = None,
) -> list[EndpointVerdict]:
    """Return a verdict for each endpoint, in the order of ``endpoints``.

    Args:
        not_ready: verdicts on endpoints that got no load or are gone.
        stats: numbers of the others, load by load.
        causes: the most frequent failure of each endpoint.
    """
    by_name: dict[str, list[EndpointStats]] = defaultdict(list)
    for row in stats:
        by_name[row.endpoint].append(row)
    verdicts: dict[str, EndpointVerdict] = {}
    for name in endpoints:
        verdict = _verdict_alone(name, not_ready, by_name[name], (causes or {}).get(name))
        if verdict is not None:
            verdicts[name] = verdict
    timed = {
        name: [row for row in rows if row.pace_ms is not None]
        for name, rows in by_name.items()
        if name not in verdicts
    }
    peers = {
        key: _Peers(rows)
        for key, rows in _grouped(row for rows in timed.values() for row in rows).items()
    }
    for name in endpoints:
        if name not in verdicts:
            verdicts[name] = _verdict_by_comparison(name, timed.get(name, ()), peers)
    return [verdicts[name] for name in endpoints]


_Key = tuple[str, str | None, bool]


def _key(row: EndpointStats) -> _Key:
    """Return what endpoints must share to be compared."""
    return row.load, row.model, row.tokens is None


def _grouped(rows: Iterable[EndpointStats]) -> dict[_Key, list[EndpointStats]]:
    groups: dict[_Key, list[EndpointStats]] = defaultdict(list)
    for row in rows:
        groups[_key(row)].append(row)
    return groups


class _Peers:
    """Endpoints of one model in one load, sorted once since a fleet may have thousands."""

    def __init__(self, rows: Sequence[EndpointStats]) -> None:
        self.count = len(rows)
        self._rates = sorted(row.output_tok_s for row in rows if row.output_tok_s is not None)
        self._paces = sorted(row.pace_ms for row in rows if row.pace_ms is not None)
        self._spread = _pooled_spread(rows)
        rounds = statistics.median(row.rounds for row in rows)
        # Of the others' median, which is one of as many endpoints.
        self._error = _OF_MEDIAN * self._spread / math.sqrt(rounds * max(1, self.count - 1))

    def rate_share(self, stats: EndpointStats) -> float | None:
        """Return its tokens per second by the others' median; None where it is unknown."""
        if not stats.closed or stats.output_tok_s is None:
            return None
        # The faster of the two in the middle of an even number.
        median = _without(self._rates, stats.output_tok_s, (len(self._rates) - 1) // 2)
        if median:
            return stats.output_tok_s / median
        # The others did nothing.
        return math.inf if stats.output_tok_s and median is not None else None

    def pace_share(self, stats: EndpointStats) -> float | None:
        """Return the others' median time by its own; None where it is unknown."""
        if not stats.pace_ms:
            return None
        median = _without(self._paces, stats.pace_ms, (len(self._paces) - 2) // 2)
        return None if median is None else median / stats.pace_ms

    def error(self, stats: EndpointStats) -> float:
        """Return the standard error of the logarithm of its speed."""
        pooled = self._spread**2
        degrees = stats.requests - 1 if stats.spread is not None else 0
        squares = degrees * (stats.spread or 0.0) ** 2 + PRIOR_WEIGHT * pooled
        spread = max(pooled, squares / (degrees + PRIOR_WEIGHT))
        return math.hypot(_OF_MEDIAN * math.sqrt(spread / stats.rounds), self._error)


def _pooled_spread(rows: Sequence[EndpointStats]) -> float:
    """Return the spread of requests' times: the median over endpoints, so that an erratic one
    counts little."""
    variances, weight = [], 0.0
    for row in rows:
        degrees = row.requests - 1
        if row.spread is not None and degrees > 0:
            weight += degrees
            # The median of a variance of few samples is below it (Wilson and Hilferty).
            variances.append(row.spread**2 / (1 - 2 / (9 * degrees)) ** 3)
    median = statistics.median(variances) if variances else 0.0
    squares = weight * median + PRIOR_WEIGHT * PRIOR_SPREAD**2
    return math.sqrt(squares / (weight + PRIOR_WEIGHT))


def _without(values: Sequence[float], value: float, index: int) -> float | None:
    """Return the item at ``index`` of the sorted ``values`` without ``value``, one of them."""
    if len(values) < 2:
        return None
    return values[index if index < bisect_left(values, value) else index + 1]


def _verdict_alone(
    name: str,
    not_ready: Mapping[str, EndpointVerdict],
    stats: Sequence[EndpointStats],
    cause: str | None,
) -> EndpointVerdict | None:
    """Return the verdict that needs no other endpoint; None if there is none."""
    if name in not_ready:
        return not_ready[name]
    sent, ok = sum(row.requests for row in stats), sum(row.ok for row in stats)
    failed = sum(row.failed for row in stats)
    cause_text = f", mostly {cause}" if cause else ""
    if sent and not ok and not any(row.tokens for row in stats):
        if failed == sent:
            return EndpointVerdict(name, "dead", f"all of {sent} requests failed{cause_text}")
        return EndpointVerdict(name, "dead", f"none of {sent} requests ended well{cause_text}")
    share = failed / sent if sent else 0.0
    if share > FAILING and (failed >= MIN_FAILURES or share >= 0.1):
        return EndpointVerdict(name, "failing", f"{failed} of {sent} requests failed{cause_text}")
    return None


def _verdict_by_comparison(
    name: str, rows: Sequence[EndpointStats], peers: Mapping[_Key, _Peers]
) -> EndpointVerdict:
    """Return the verdict by the other endpoints' speed; the worse of its two measures counts."""
    rates: list[tuple[float, float]] = []
    paces: list[tuple[float, float]] = []
    for row in rows:
        other_endpoints = peers[_key(row)]
        for shares, share in (
            (rates, other_endpoints.rate_share(row)),
            (paces, other_endpoints.pace_share(row)),
        ):
            if share is not None:
                shares.append((share, other_endpoints.error(row)))
    measures = [_over_loads(shares) for shares in (rates, paces) if shares]
    if not measures:
        return EndpointVerdict(name, "ok", "nothing to compare it with")
    speed, error = min(measures)
    if speed >= SLOW:
        return EndpointVerdict(name, "ok", "", speed if math.isfinite(speed) else None)
    reason = f"{speed:.2f} times as fast as the median of the others (below {SLOW:g})"
    count = max(peers[_key(row)].count for row in rows)
    significance = statistics.NormalDist().inv_cdf(1 - CHANCE / (len(measures) * count))
    if speed and math.log(speed / ALIKE) > -significance * error:
        requests = sum(row.requests for row in rows)
        return EndpointVerdict(
            name, "ok", f"{reason}, which may be chance: {counted(requests, 'request')}", speed
        )
    return EndpointVerdict(name, "slow", reason, speed)


def _over_loads(shares: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of the shares of several loads, and the error of its logarithm."""
    count = len(shares)
    error = math.hypot(*(share_error for _, share_error in shares)) / count
    factor = _OF_MEDIAN if count > 2 else 1.0
    return statistics.median(share for share, _ in shares), factor * error


Numbers = Mapping[str, Any]

_VERDICTS = ("ok", "slow", "failing", "dead")
_RANKS = {"dead": 0, "failing": 1, "slow": 2, "ok": 3}


def rank_endpoints(endpoints: Sequence[Numbers], limit: int) -> tuple[list[Numbers], str]:
    """Return at most ``limit`` rows of the summary's endpoints, and a message about the others.

    Where all fit, they keep the order of the hostfile. Otherwise dead, failing and slow ones come
    first, then the slowest.
    """
    if len(endpoints) <= limit:
        return list(endpoints), ""
    ordered = sorted(endpoints, key=_badness)
    omitted = ordered[limit:]
    bad = sum(endpoint["verdict"] != "ok" for endpoint in omitted)
    message = f"{len(omitted):,} more endpoints, {f'{bad:,} of them not ok' if bad else 'all ok'}"
    return ordered[:limit], f"{message}: endpoints.csv has every one"


def _badness(row: Numbers) -> tuple[int, float]:
    speed = row.get("speed")
    return _RANKS[row["verdict"]], speed if speed is not None else 1.0


def fleet_text(summary: Numbers) -> str:
    """Return the whole fleet in a line: verdicts, differences of endpoints, and the result of a
    sweep."""
    fleet = summary["fleet"]
    text = ", ".join(f"{fleet[verdict]} {verdict}" for verdict in _VERDICTS if fleet[verdict])
    if fleet.get("max_by_min"):
        text += f"; fastest / slowest {fleet['max_by_min']:.2f}, CV {fleet['cv']:.2f}"
    saturation = summary.get("saturation")
    if saturation:
        text += (
            f"; saturated at {saturation['best_rate']:.3g} calls/s, c={saturation['concurrency']}"
        )
        if saturation["sustained_rate"]:
            text += f"; {saturation['sustained_rate']:.3g} requests/s sustained"
    return text


def main_failure_kinds(failures: Sequence[Numbers]) -> dict[str, str]:
    """Return the most frequent kind of failure by endpoint, with its status code."""
    counts: dict[str, dict[str, int]] = {}
    for failure in failures:
        if failure["kind"] != "unfinished":
            kinds = counts.setdefault(failure["endpoint"], {})
            kind = _kind_text(failure["kind"], failure["code"])
            kinds[kind] = kinds.get(kind, 0) + failure["n"]
    return {name: max(kinds, key=kinds.__getitem__) for name, kinds in counts.items()}


def _kind_text(kind: str, code: int | None) -> str:
    return kind if code in (None, 200) else f"{kind} (HTTP {code})"


def failure_lines(failures: Sequence[Numbers], limit: int) -> list[str]:
    """Return the failures of all endpoints and loads by kind, a line each, the most frequent
    first."""
    kinds: dict[str, list[Numbers]] = {}
    for failure in failures:
        kinds.setdefault(_kind_text(failure["kind"], failure["code"]), []).append(failure)
    ordered = sorted(kinds.items(), key=lambda item: -sum(failure["n"] for failure in item[1]))
    lines = [_kind_line(kind, rows) for kind, rows in ordered[:limit]]
    if len(ordered) > limit:
        lines.append(f"{len(ordered) - limit} more kinds of failure: summary.json has every one")
    return lines


def _kind_line(kind: str, rows: Sequence[Numbers]) -> str:
    by_endpoint: dict[str, int] = {}
    for failure in rows:
        by_endpoint[failure["endpoint"]] = by_endpoint.get(failure["endpoint"], 0) + failure["n"]
    (name, count) = max(by_endpoint.items(), key=lambda item: item[1])
    where = f"at {name or 'no endpoint'}"
    if len(by_endpoint) > 1:
        where = f"at {len(by_endpoint):,} endpoints, most ({count:,}) {where}"
    loads = list(dict.fromkeys(failure["load"] for failure in rows))
    within = f"in {loads[0]}" if len(loads) == 1 else f"in {len(loads)} loads"
    most_frequent = max(rows, key=lambda failure: failure["n"])
    example = f": {most_frequent['example']}" if most_frequent["example"] else ""
    total = sum(by_endpoint.values())
    return f"{total:,} x {kind} {where} {within}{example}"
