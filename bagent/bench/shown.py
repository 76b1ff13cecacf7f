"""What people are shown of a large fleet: the bad endpoints, and as many others as find room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
