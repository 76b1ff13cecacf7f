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
    found = mode_costs(PRICE, SPENT)
    assert found[SINGLE] == pytest.approx(4 + 1)
    assert found[CACHED] == pytest.approx(0.4 * 4 + 0.6 * 0.4 + 1)
    assert found[BATCH] == pytest.approx(0.5 * (4 + 1))
    assert found[FLEET] is None


@pytest.mark.parametrize(
    ("price", "spent", "known"),
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
    price: Price | None, spent: StageUsage, known: set[str]
) -> None:
    assert {mode for mode, usd in mode_costs(price, spent).items() if usd is not None} == known


def test_stages_add_up_and_one_unknown_makes_the_sum_unknown() -> None:
    known = mode_costs(PRICE, SPENT)
    found = {one.mode: one for one in sum_costs([known, known], 200)}
    assert found[SINGLE].usd == pytest.approx(10.0)
    assert found[SINGLE].per_thousand == pytest.approx(50.0)
    assert found[FLEET].usd is found[FLEET].per_thousand is None
    mixed = {one.mode: one.usd for one in sum_costs([known, mode_costs(None, SPENT)], 200)}
    assert set(mixed.values()) == {None}


def test_no_rows_cost_nothing_a_thousand() -> None:
    assert all(one.usd is None and one.per_thousand is None for one in sum_costs([], 0))
