"""``bagent prices``: each price with the page that says so."""

from __future__ import annotations

import csv
import io
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
    found = bagent(["prices", "--json"]).lines()
    cached = [price["cached"] for price in found]
    assert None in cached and 0 not in cached, "what a source does not tell is unknown"
    csv_rows = csv.DictReader(io.StringIO(bagent(["prices", "--csv"]).out))
    assert [row["model"] for row in csv_rows] == [price["model"] for price in found]
