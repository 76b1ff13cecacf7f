"""SQL over the tables of a run, and what several sections of the page share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ANSWERED = "status not in ('failed', 'bad_input') and copied_from is null"
"""SQL: rows that an endpoint answered."""

WEAK = "weak: "
"""Marks a finding that may be chance, or explains only a part."""

FEW = 20
"""What fewer rows than these show is weak."""

BUCKETS = 120
BINS = 48


class ReportDb:
    """Runs SQL over the views of :func:`bagent.store.query.connect`."""

    def __init__(self, connection: DuckDBPyConnection) -> None:
        self.connection = connection

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return all rows as dicts."""
        cursor = self.connection.execute(sql)
        names = [column[0] for column in cursor.description or []]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def row(self, sql: str) -> dict[str, Any]:
        """Return the only row."""
        return self.rows(sql)[0]

    def run(self, sql: str) -> None:
        """Run a statement that returns no rows."""
        self.connection.execute(sql)

    def bins(self, column: str, source: str) -> list[tuple[float, float, int]]:
        """Return (from, to, count) of bins that grow by a constant factor.

        The outermost thousandths fall in the first and the last bin.
        """
        span = self.row(
            f"select quantile_cont({column}, 0.001) as low, quantile_cont({column}, 0.999) as high"
            f" from {source} where {column} > 0"
        )
        low, high = span["low"], span["high"]
        if low is None:
            return []
        low, high = float(low), max(float(high), float(low) * 1.1)
        factor = math.log(high / low) / BINS
        bin_sql = f"greatest(0, least({BINS - 1}, floor(ln({column} / {low}) / {factor})))::int"
        rows = self.rows(
            f"select {bin_sql} as bin, count(*) as n from {source} where {column} > 0 group by 1"
        )
        counts = {row["bin"]: row["n"] for row in rows}
        return [
            (low * math.exp(factor * i), low * math.exp(factor * (i + 1)), counts.get(i, 0))
            for i in range(BINS)
        ]


def quantiles(column: str) -> str:
    """Return SQL for ``mean``, ``p50``, ``p90``, ``p99`` and ``max`` of a column."""
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    parts = [f"quantile_disc({column}, {share}) as {name}" for name, share in shares]
    return ", ".join([f"avg({column}) as mean", *parts, f"max({column}) as max"])


def median(values: Sequence[float]) -> float:
    """Return the middle value."""
    order = sorted(values)
    return order[len(order) // 2]
