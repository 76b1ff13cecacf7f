"""Known prices, and what tokens cost."""

from __future__ import annotations

from datetime import date

import pytest

from bagent.money.prices import Price, find_price, known_prices, pricer
from bagent.types import Usage

PRICE = Price("p", "m", input=4.0, output=20.0, cached=0.4, cache_write=5.0)


def test_every_known_price_has_its_source_and_date() -> None:
    for price in known_prices():
        assert price.source.startswith("https://")
        assert date.fromisoformat(price.date) <= date(2100, 1, 1)
        assert 0 < price.input < price.output


def test_no_model_of_a_provider_stands_twice() -> None:
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


@pytest.mark.parametrize("name", ["m", "m-20250929", "m-latest", "m-2025-09-29", "m@20250929"])
def test_a_dated_name_is_found_by_its_name(name: str) -> None:
    assert find_price([PRICE], "p", name) is PRICE


def test_another_provider_or_model_has_no_price() -> None:
    assert find_price([PRICE], "other", "m") is None
    assert find_price([PRICE], "p", "m-mini") is None
