"""What makes the numbers of a load test less than they seem, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Numbers = Mapping[str, Any]

SHORTER = 0.02
"""Answers that are shorter than requested by more than this share are not of that length."""

FEW = 0.1
"""Answers of an endpoint that came in one piece by chance: below this share of all."""


def doubts(
    endpoints: Sequence[Numbers], most: int | None = None, requested: float | None = None
) -> list[str]:
    """What is to be known of the numbers, from those of each endpoint over all loads.

    Args:
        most: tokens that an answer was allowed; None where answers had different limits.
        requested: tokens that an answer should have; None where answers had different lengths.
    """
    found = []
    estimated = {one["endpoint"]: one["estimated"] for one in endpoints if one["estimated"]}
    if estimated:
        found.append(
            f"output tokens of {_of(estimated)} are estimated by the pieces that came: "
            "the server tells no usage"
        )
    undertold = {one["endpoint"]: one["undertold"] for one in endpoints if one["undertold"]}
    if undertold:
        found.append(
            f"the usage of {_of(undertold)} tells fewer tokens than pieces came: tokens a second "
            "and TPOT are wrong there"
        )
    too_many = {
        one["endpoint"]: one["ok"]
        for one in endpoints
        if most is not None and (one["output_tokens"] or 0) > most
    }
    if too_many:
        found.append(
            f"the usage of {_of(too_many)} tells more output tokens than the {most} that an answer "
            "may have: tokens a second and TPOT are wrong there"
        )
    if requested is not None:
        found += _shorter(endpoints, requested)
    whole = {
        one["endpoint"]: one["one_piece"] for one in endpoints if one["one_piece"] > FEW * one["ok"]
    }
    if whole:
        found.append(
            f"answers to {_of(whole)} came in one piece: TTFT is the whole time there and TPOT is "
            "not known (something on the way buffers streams, or the server sends none)"
        )
    return found


def _shorter(endpoints: Sequence[Numbers], requested: float) -> list[str]:
    """What is to be known of answers that ended before the length that was requested."""
    short = [
        one
        for one in endpoints
        if one["ok"]
        and one["output_tokens"] is not None
        and one["output_tokens"] < requested * (1 - SHORTER)
    ]
    if not short:
        return []
    answers = sum(one["ok"] for one in short)
    mean = sum(one["output_tokens"] * one["ok"] for one in short) / answers
    where = _of({one["endpoint"]: one["ok"] for one in short})
    return [
        f"the answers to {where} have {mean:.1f} output tokens on average, not the {requested:g} "
        "that were requested: times and rates are those of shorter answers (the server does not "
        "take ignore_eos, or is not known to)"
    ]


def _of(counts: Mapping[str, int]) -> str:
    """``12 requests at a:1``, ``40 requests at 3 endpoints (a:1, b:1, ...)``."""
    names, number = list(counts), sum(counts.values())
    where = names[0] if len(names) == 1 else f"{len(names):,} endpoints ({', '.join(names[:2])}"
    if len(names) > 1:
        where += ", ...)" if len(names) > 2 else ")"
    return f"{number:,} request{'s' * (number != 1)} at {where}"
