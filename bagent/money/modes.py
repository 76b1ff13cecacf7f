"""What the same tokens cost by the ways in which a job can be sent.

Every sum is of measured (or, before a run, estimated) tokens and of dated prices. What has no
price, or was not counted, is None and never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from bagent.money.prices import Price
from bagent.types import Usage

SINGLE, CACHED, BATCH, FLEET = "single", "cached", "provider batch", "own fleet"

HOW = {
    SINGLE: "each row a call of its own, every prompt token at its full price",
    CACHED: "the same, with the prompt tokens that a cache held at their price",
    BATCH: "by the provider's batch service, within a day; nothing cached",
    FLEET: "the GPUs' time, by your price of an hour",
}
"""The modes in the order of tables, and what each means."""


class Spent(msgspec.Struct, frozen=True):
    """Tokens of a stage's answers, and what its rows' share of GPU time cost; None: not known."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    gpu_usd: float | None = None


class ModeCost(msgspec.Struct, frozen=True):
    """Dollars of one mode; ``per_thousand`` is that of 1,000 rows."""

    mode: str
    usd: float | None
    per_thousand: float | None
    how: str


class StagePrice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a stage's tokens cost, as it stands in run.json.

    ``price`` is that of tokens, ``gpu_hour`` that of one GPU for an hour, where the stage ran on
    GPUs of the user's own.
    """

    stage: str
    price: Price | None = None
    gpu_hour: float | None = None


def costs_of(price: Price | None, spent: Spent) -> dict[str, float | None]:
    """Dollars by mode."""
    single = cached = None
    if price is not None and spent.prompt is not None and spent.completion is not None:
        single = price.cost(Usage(prompt=spent.prompt, completion=spent.completion))
        if spent.cached is not None:
            found = Usage(prompt=spent.prompt, cached=spent.cached, completion=spent.completion)
            cached = price.cost(found)
    factor = None if price is None else price.batch
    batch = None if single is None or factor is None else single * factor
    return {SINGLE: single, CACHED: cached, BATCH: batch, FLEET: spent.gpu_usd}


def together(parts: Iterable[dict[str, float | None]], rows: int) -> Sequence[ModeCost]:
    """The table of several stages' costs: None where one of them is not known."""
    stages = list(parts)
    found = []
    for mode, how in HOW.items():
        known = [one[mode] for one in stages]
        sums = [one for one in known if one is not None]
        usd = sum(sums) if stages and len(sums) == len(stages) else None
        each = None if usd is None or not rows else 1000 * usd / rows
        found.append(ModeCost(mode, usd, each, how))
    return tuple(found)
