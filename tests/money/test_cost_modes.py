"""What the same tokens cost by mode; what is not known stays so."""

from __future__ import annotations

import pytest

from bagent.money.prices import (
    BATCH,
    CACHED,
    FLEET,
    SINGLE,
    Price,
    StageUsage,
    mode_costs,
    sum_costs,
)

PRICE = Price("p", "m", input=4.0, output=20.0, cached=0.4, cache_write=5.0, batch=0.5)
SPENT = StageUsage(prompt=1_000_000, cached=600_000, completion=50_000)


def test_each_mode_has_its_own_sum() -> None:
    result = mode_costs(PRICE, SPENT)
    assert result[SINGLE] == pytest.approx(4 + 1)
    assert result[CACHED] == pytest.approx(0.4 * 4 + 0.6 * 0.4 + 1)
    assert result[BATCH] == pytest.approx(0.5 * (4 + 1))
    assert result[FLEET] is None


@pytest.mark.parametrize(
    ("price", "spent", "expected"),
    [
        (None, SPENT, set()),
        (Price("p", "m", 4.0, 20.0), SPENT, {SINGLE}),
        (PRICE, StageUsage(completion=5), set()),
        (PRICE, StageUsage(prompt=5), set()),
        (PRICE, StageUsage(prompt=5, completion=5), {SINGLE, BATCH}),
        (None, StageUsage(prompt=5, completion=5, gpu_usd=0.25), {FLEET}),
    ],
    ids=["no-price", "bare-price", "no-prompts", "no-answers", "no-cache-counts", "gpus-only"],
)
def test_what_has_no_price_or_was_not_counted_is_unknown(
    price: Price | None, spent: StageUsage, expected: set[str]
) -> None:
    assert {mode for mode, usd in mode_costs(price, spent).items() if usd is not None} == expected


def test_stages_add_up_and_one_unknown_makes_the_sum_unknown() -> None:
    costs = mode_costs(PRICE, SPENT)
    result = {item.mode: item for item in sum_costs([costs, costs], 200)}
    assert result[SINGLE].usd == pytest.approx(10.0)
    assert result[SINGLE].per_thousand == pytest.approx(50.0)
    assert result[FLEET].usd is result[FLEET].per_thousand is None
    mixed = {item.mode: item.usd for item in sum_costs([costs, mode_costs(None, SPENT)], 200)}
    assert set(mixed.values()) == {None}


def test_no_rows_cost_nothing_a_thousand() -> None:
    assert all(item.usd is None and item.per_thousand is None for item in sum_costs([], 0))
