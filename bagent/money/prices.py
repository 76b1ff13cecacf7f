"""Prices of hosted models, from ``prices.json`` or the job, and the cost of each way to run.

A price is that of the provider's own API; other resellers of the model charge differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files

import msgspec

from bagent.types import Usage

MILLION = 1e6

_SNAPSHOT = re.compile(r"(-latest|[-@]\d{8}|-\d{4}-\d{2}-\d{2})$")


class Price(msgspec.Struct, frozen=True):
    """The price of a model in dollars per million tokens; an unknown price is None.

    ``input`` is for uncached prompt tokens, ``cached`` for those read from a cache, ``cache_write``
    for those written to one for five minutes. ``batch`` is the factor of the provider's batch
    service; that of OpenAI is from https://developers.openai.com/api/docs/guides/batch. ``source``
    is the page of the price on ``date``.
    """

    provider: str
    model: str
    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None
    batch: float | None = None
    source: str = ""
    date: str = ""

    def cost(self, usage: Usage) -> float | None:
        """Return the dollars for ``usage``; None if a count or a price is unknown."""
        if usage.prompt is None or usage.completion is None:
            return None
        read, written = usage.cached or 0, usage.cache_write or 0
        if (read and self.cached is None) or (written and self.cache_write is None):
            return None
        fresh = max(0, usage.prompt - read - written)
        total = fresh * self.input + usage.completion * self.output
        total += read * (self.cached or 0.0) + written * (self.cache_write or 0.0)
        return total / MILLION

    def in_batches(self) -> Price | None:
        """Return the price in the provider's batch service; None if unknown."""
        factor = self.batch
        if factor is None:
            return None
        return msgspec.structs.replace(
            self,
            input=self.input * factor,
            output=self.output * factor,
            cached=None if self.cached is None else self.cached * factor,
            cache_write=None if self.cache_write is None else self.cache_write * factor,
        )

    def at_most(self, prompt: int, completion: int) -> float:
        """Return the maximum cost: no cache hit, and the complete prompt written to the cache."""
        dearest = max(self.input, self.cache_write or 0.0)
        return (prompt * dearest + completion * self.output) / MILLION


def known_prices() -> list[Price]:
    """Return the built-in prices, sorted by provider and model."""
    text = files("bagent.money").joinpath("prices.json").read_bytes()
    prices = msgspec.json.decode(text, type=list[Price])
    return sorted(prices, key=lambda price: (price.provider, price.model))


def find_price(prices: Sequence[Price], provider: str, model: str) -> Price | None:
    """Return the price of a model, also by a name with a date; None if unknown."""
    bare = _SNAPSHOT.sub("", model)
    for price in prices:
        if price.provider == provider and price.model in (model, bare):
            return price
    return None


def pricer(price: Price | None) -> Callable[[str | None, Usage], float | None] | None:
    """Return a function for the cost of a row by its tokens; None without a price."""
    return None if price is None else lambda _, usage: price.cost(usage)


def gpu_pricer(hour: float) -> Callable[[str | None, Usage], float | None]:
    """Return a function for the cost of a row by its GPU time; ``hour`` is dollars a GPU hour."""

    def cost(_: str | None, usage: Usage) -> float | None:
        return None if usage.gpu_seconds is None else usage.gpu_seconds * hour / 3600

    return cost


SINGLE, CACHED, BATCH, FLEET = "single", "cached", "provider batch", "own fleet"

MODE_DESCRIPTIONS = {
    SINGLE: "each row a call of its own, every prompt token at its full price",
    CACHED: "the same, with the prompt tokens that a cache held at their price",
    BATCH: "by the provider's batch service, within a day; nothing cached",
    FLEET: "the GPUs' time, by your price of an hour",
}
"""The modes in the order of tables, with their descriptions."""


class StageUsage(msgspec.Struct, frozen=True):
    """Tokens of a stage's answers and the cost of its GPU time; unknown values are None."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    gpu_usd: float | None = None


class ModeCost(msgspec.Struct, frozen=True):
    """The dollars of one mode, in total and per 1,000 rows."""

    mode: str
    usd: float | None
    per_thousand: float | None
    how: str


class StagePrice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The prices of a stage, as stored in run.json: of tokens, or of a GPU hour on own GPUs."""

    stage: str
    price: Price | None = None
    gpu_hour: float | None = None


def mode_costs(price: Price | None, spent: StageUsage) -> dict[str, float | None]:
    """Return the dollars by mode."""
    single = cached = None
    if price is not None and spent.prompt is not None and spent.completion is not None:
        single = price.cost(Usage(prompt=spent.prompt, completion=spent.completion))
        if spent.cached is not None:
            usage = Usage(prompt=spent.prompt, cached=spent.cached, completion=spent.completion)
            cached = price.cost(usage)
    factor = None if price is None else price.batch
    batch = None if single is None or factor is None else single * factor
    return {SINGLE: single, CACHED: cached, BATCH: batch, FLEET: spent.gpu_usd}


def sum_costs(parts: Iterable[dict[str, float | None]], rows: int) -> Sequence[ModeCost]:
    """Return the costs of several stages by mode; None if one of them is unknown."""
    stages = list(parts)
    table = []
    for mode, how in MODE_DESCRIPTIONS.items():
        costs = [cost[mode] for cost in stages]
        sums = [cost for cost in costs if cost is not None]
        usd = sum(sums) if stages and len(sums) == len(stages) else None
        each = None if usd is None or not rows else 1000 * usd / rows
        table.append(ModeCost(mode, usd, each, how))
    return tuple(table)
