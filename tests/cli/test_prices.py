"""``bagent prices``: each price with the page that says so."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

from support.cli import Completed

Bagent = Callable[..., Completed]


def test_prices_are_a_table_with_sources(bagent: Bagent) -> None:
    done = bagent(["prices"])
    assert done.code == 0
    head, line, *rows = done.out.splitlines()
    assert head.split()[:4] == ["provider", "model", "input", "output"]
    assert set(line) <= {"-", " "}
    assert len(rows) > 5
    assert all("https://" in row for row in rows)
    assert done.err == ""


def test_what_a_source_does_not_tell_is_null_and_not_zero(bagent: Bagent) -> None:
    found = [json.loads(line) for line in bagent(["prices", "--json"]).out.splitlines()]
    assert any(price["cached"] is None for price in found)
    assert all(price["cached"] != 0 for price in found)
    rows = list(csv.DictReader(io.StringIO(bagent(["prices", "--csv"]).out)))
    assert [row["model"] for row in rows] == [price["model"] for price in found]
