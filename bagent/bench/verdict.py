"""Which endpoints are bad: each is compared with the others, which are few at times."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
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
    endpoints: Sequence[str],
    not_ready: Mapping[str, Judged],
    seen: Iterable[Seen],
    causes: Mapping[str, str] | None = None,
) -> list[Judged]:
    """A verdict for each endpoint, in the order given.

    Args:
        not_ready: verdicts that are known already: of endpoints that got no load, or are gone.
        seen: what is known of the others, load by load.
        causes: the most frequent failure of an endpoint in words.
    """
    by_name: dict[str, list[Seen]] = defaultdict(list)
    for row in seen:
        by_name[row.endpoint].append(row)
    found: dict[str, Judged] = {}
    for name in endpoints:
        verdict = _alone(name, not_ready, by_name[name], (causes or {}).get(name))
        if verdict is not None:
            found[name] = verdict
    telling = {
        name: [row for row in rows if row.telling]
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


_Key = tuple[str, str | None]


def _key(row: Seen) -> _Key:
    """What endpoints must share to be compared."""
    return row.load, row.model


def _grouped(rows: Iterable[Seen]) -> dict[_Key, list[Seen]]:
    found: dict[_Key, list[Seen]] = defaultdict(list)
    for row in rows:
        found[_key(row)].append(row)
    return found


class _Peers:
    """Endpoints of one model in one load, sorted once: a fleet has thousands."""

    def __init__(self, rows: Sequence[Seen]) -> None:
        self._works = sorted(row.output_tok_s for row in rows if row.output_tok_s is not None)
        self._waits = sorted(row.pace_ms for row in rows if row.pace_ms is not None)

    def work(self, own: Seen) -> float | None:
        """Its tokens a second by the others' median; None where that cannot be told."""
        if not own.closed or own.output_tok_s is None:
            return None
        # Of an even number the faster of the two in the middle.
        middle = _without(self._works, own.output_tok_s, (len(self._works) - 1) // 2)
        return own.output_tok_s / middle if middle else None

    def wait(self, own: Seen) -> float | None:
        """The others' median time by its own; None where that cannot be told."""
        if not own.pace_ms:
            return None
        middle = _without(self._waits, own.pace_ms, (len(self._waits) - 2) // 2)
        return None if middle is None else middle / own.pace_ms


def _without(values: Sequence[float], own: float, place: int) -> float | None:
    """What is at ``place`` of the sorted ``values`` less ``own``, one of them."""
    if len(values) < 2:
        return None
    return values[place if place < bisect_left(values, own) else place + 1]


def _alone(
    name: str, not_ready: Mapping[str, Judged], own: Sequence[Seen], cause: str | None
) -> Judged | None:
    """The verdict that needs no other endpoint, None where there is none."""
    if name in not_ready:
        return not_ready[name]
    sent, ok = sum(row.requests for row in own), sum(row.ok for row in own)
    failed = sum(row.failed for row in own)
    why = f", mostly {cause}" if cause else ""
    if sent and not ok and not any(row.tokens for row in own):
        if failed == sent:
            return Judged(name, "dead", f"all of {sent} requests failed{why}")
        return Judged(name, "dead", f"none of {sent} requests ended well{why}")
    share = failed / sent if sent else 0.0
    if share > FAILING and (failed >= FEWEST_FAILURES or share >= 0.1):
        return Judged(name, "failing", f"{failed} of {sent} requests failed{why}")
    return None


def _compared(name: str, rows: Sequence[Seen], peers: Mapping[_Key, _Peers]) -> Judged:
    """The verdict by the other endpoints' speed; the worst of its two measures counts."""
    works = [work for row in rows if (work := peers[_key(row)].work(row)) is not None]
    waits = [wait for row in rows if (wait := peers[_key(row)].wait(row)) is not None]
    speeds = [statistics.median(shares) for shares in (works, waits) if shares]
    if not speeds:
        return Judged(name, "ok", "nothing to compare it with")
    speed = min(speeds)
    if speed < SLOW:
        words = f"{speed:.2f} times as fast as the median of the others (below {SLOW:g})"
        return Judged(name, "slow", words, speed)
    return Judged(name, "ok", "", speed)
