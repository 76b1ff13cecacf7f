"""Which endpoints are bad: each is compared with the others, which are few at times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

Verdict = Literal["ok", "slow", "failing", "dead"]
"""``dead``: it does not answer, or no request of it ended well. ``failing``: requests fail there,
or it answers and takes no load. ``slow``: less than :data:`SLOW` times as fast as the others (their
median; of an even number the faster of the two in the middle, since with few endpoints a mean of
two means little). ``ok``: none of it."""

SLOW = 0.7
"""An endpoint is slow below this share of the median of the others."""

FAILING = 0.01
"""An endpoint is failing above this share of failed requests."""

FEWEST_FAILURES = 2
"""One failure alone may be chance, unless it is one in ten."""

FEWEST_TOKENS = 20
"""An endpoint that gave fewer output tokens in a load is not judged by their speed, where tokens
are told; without them it takes :data:`FEWEST_REQUESTS`."""

FEWEST_REQUESTS = 3


class Seen(msgspec.Struct, frozen=True):
    """One endpoint in one load.

    Attributes:
        requests: those that were sent to it, ``ok`` of which ended well and ``failed`` did not;
            the rest were still going on when the load ended.
        tokens: output tokens that came from it; None where none are told.
        output_tok_s: output tokens a second, for each of its GPUs where their number is known.
        pace_ms: median time for each output token from sending on; where no tokens are told, for
            each request.
        model: what it was asked for: only endpoints of one model are compared.
        closed: whether the load was a closed loop, in which a fast endpoint does more.
    """

    endpoint: str
    load: str
    requests: int
    ok: int
    failed: int
    tokens: float | None = None
    output_tok_s: float | None = None
    pace_ms: float | None = None
    closed: bool = True
    model: str | None = None

    @property
    def telling(self) -> bool:
        """Whether it is enough to judge by."""
        if self.tokens is not None:
            return self.tokens >= FEWEST_TOKENS
        return self.ok >= FEWEST_REQUESTS


class Judged(msgspec.Struct, frozen=True):
    """The verdict on one endpoint and the reason in words; ``speed`` is its speed as a share of
    the median of the others (the median over all loads), None where there is nothing to compare."""

    endpoint: str
    verdict: Verdict
    reason: str = ""
    speed: float | None = None


def judge(
    endpoints: Sequence[str], not_ready: Mapping[str, Judged], seen: Iterable[Seen]
) -> list[Judged]:
    """A verdict for each endpoint, in the order given.

    Args:
        not_ready: verdicts that are known already: of endpoints that got no load, or are gone.
        seen: what is known of the others, load by load.
    """
    rows = list(seen)
    found: dict[str, Judged] = {}
    for name in endpoints:
        own = [row for row in rows if row.endpoint == name]
        verdict = _alone(name, not_ready, own)
        if verdict is not None:
            found[name] = verdict
    healthy = [row for row in rows if row.endpoint not in found]
    for name in endpoints:
        if name not in found:
            found[name] = _compared(name, healthy)
    return [found[name] for name in endpoints]


def _alone(name: str, not_ready: Mapping[str, Judged], own: Sequence[Seen]) -> Judged | None:
    """The verdict that needs no other endpoint, None where there is none."""
    if name in not_ready:
        return not_ready[name]
    sent, ok = sum(row.requests for row in own), sum(row.ok for row in own)
    failed = sum(row.failed for row in own)
    if sent and not ok and not any(row.tokens for row in own):
        words = "failed" if failed == sent else "ended well"
        return Judged(
            name, "dead", f"{'all' if failed == sent else 'none'} of {sent} requests {words}"
        )
    share = failed / sent if sent else 0.0
    if share > FAILING and (failed >= FEWEST_FAILURES or share >= 0.1):
        return Judged(name, "failing", f"{failed} of {sent} requests failed")
    return None


def _compared(name: str, rows: Sequence[Seen]) -> Judged:
    """The verdict by the other endpoints' speed; the worst of its two measures counts."""
    works, waits = [], []
    for own in rows:
        if own.endpoint != name or not own.telling:
            continue
        others = [
            row
            for row in rows
            if (row.load, row.model) == (own.load, own.model)
            and row.endpoint != name
            and row.telling
        ]
        work = _known(row.output_tok_s for row in others)
        if own.closed and own.output_tok_s is not None and work and statistics.median_high(work):
            works.append(own.output_tok_s / statistics.median_high(work))
        wait = _known(row.pace_ms for row in others)
        if own.pace_ms and wait:
            waits.append(statistics.median_low(wait) / own.pace_ms)
    speeds = [statistics.median(shares) for shares in (works, waits) if shares]
    if not speeds:
        return Judged(name, "ok", "nothing to compare it with")
    speed = min(speeds)
    if speed < SLOW:
        words = f"{speed:.2f} times as fast as the median of the others (below {SLOW:g})"
        return Judged(name, "slow", words, speed)
    return Judged(name, "ok", "", speed)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
