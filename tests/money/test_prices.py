"""Known prices, and what tokens cost."""

from __future__ import annotations

from datetime import date

import pytest

from bagent.money.prices import (
    BATCH,
    CACHED,
    FLEET,
    SINGLE,
    Price,
    StageUsage,
    find_price,
    known_prices,
    mode_costs,
    pricer,
    sum_costs,
)
from bagent.types import Usage

PRICE = Price("p", "m", input=4.0, output=20.0, cached=0.4, cache_write=5.0)


def test_every_known_price_stands_once_and_has_its_source_and_date() -> None:
    for price in known_prices():
        assert price.source.startswith("https://")
        assert date.fromisoformat(price.date) <= date(2100, 1, 1)
        assert 0 < price.input < price.output
    names = [(price.provider, price.model) for price in known_prices()]
    assert len(names) == len(set(names))


def test_tokens_are_billed_by_what_the_cache_did_with_them() -> None:
    usage = Usage(prompt=1_000_000, cached=600_000, cache_write=100_000, completion=50_000)
    assert PRICE.cost(usage) == pytest.approx(0.3 * 4 + 0.6 * 0.4 + 0.1 * 5 + 0.05 * 20)


def test_what_is_unknown_stays_unknown() -> None:
    bare = Price("p", "m", input=4.0, output=20.0)
    assert bare.cost(Usage(prompt=10, completion=None)) is None
    assert bare.cost(Usage(prompt=None, completion=10)) is None
    assert bare.cost(Usage(prompt=10, cached=5, completion=1)) is None
    assert bare.cost(Usage(prompt=10, cache_write=5, completion=1)) is None
    assert bare.cost(Usage(prompt=10, cached=0, completion=1)) == pytest.approx(6e-5)
    assert pricer(None) is None


def test_a_call_can_cost_no_more_than_its_upper_bound() -> None:
    usage = Usage(prompt=1000, cached=0, cache_write=1000, completion=100)
    assert PRICE.cost(usage) == pytest.approx(PRICE.at_most(1000, 100))


@pytest.mark.parametrize(
    ("provider", "name", "found"),
    [
        ("p", "m", True),
        ("p", "m-20250929", True),
        ("p", "m-latest", True),
        ("p", "m-2025-09-29", True),
        ("p", "m@20250929", True),
        ("p", "m-mini", False),
        ("other", "m", False),
    ],
)
def test_a_dated_name_is_found_by_its_name(provider: str, name: str, found: bool) -> None:
    assert find_price([PRICE], provider, name) is (PRICE if found else None)


MODEL_PRICE = Price("p", "m", input=4.0, output=20.0, cached=0.4, cache_write=5.0, batch=0.5)
SPENT = StageUsage(prompt=1_000_000, cached=600_000, completion=50_000)


def test_each_mode_has_its_own_sum() -> None:
    result = mode_costs(MODEL_PRICE, SPENT)
    assert result[SINGLE] == pytest.approx(4 + 1)
    assert result[CACHED] == pytest.approx(0.4 * 4 + 0.6 * 0.4 + 1)
    assert result[BATCH] == pytest.approx(0.5 * (4 + 1))
    assert result[FLEET] is None


@pytest.mark.parametrize(
    ("price", "spent", "expected"),
    [
        (None, SPENT, set()),
        (Price("p", "m", 4.0, 20.0), SPENT, {SINGLE}),
        (MODEL_PRICE, StageUsage(completion=5), set()),
        (MODEL_PRICE, StageUsage(prompt=5), set()),
        (MODEL_PRICE, StageUsage(prompt=5, completion=5), {SINGLE, BATCH}),
        (None, StageUsage(prompt=5, completion=5, gpu_usd=0.25), {FLEET}),
    ],
    ids=["no-price", "bare-price", "no-prompts", "no-answers", "no-cache-counts", "gpus-only"],
)
def test_what_has_no_price_or_was_not_counted_is_unknown(
    price: Price | None, spent: StageUsage, expected: set[str]
) -> None:
    assert {mode for mode, usd in mode_costs(price, spent).items() if usd is not None} == expected


def test_stages_add_up_and_one_unknown_makes_the_sum_unknown() -> None:
    costs = mode_costs(MODEL_PRICE, SPENT)
    result = {item.mode: item for item in sum_costs([costs, costs], 200)}
    assert result[SINGLE].usd == pytest.approx(10.0)
    assert result[SINGLE].per_thousand == pytest.approx(50.0)
    assert result[FLEET].usd is result[FLEET].per_thousand is None
    mixed = {item.mode: item.usd for item in sum_costs([costs, mode_costs(None, SPENT)], 200)}
    assert set(mixed.values()) == {None}
    assert all(item.usd is None and item.per_thousand is None for item in sum_costs([], 0))
