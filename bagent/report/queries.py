"""Questions to the tables of a run, and the few sums that several sections of the page use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ANSWERED = "status not in ('failed', 'bad_input') and copied_from is null"
"""Rows that an endpoint gave an answer for."""

BUCKETS = 120
BINS = 48


class ReportDb:
    """Runs SQL over the views of :func:`bagent.store.query.connect`."""

    def __init__(self, connection: DuckDBPyConnection) -> None:
        self._connection = connection

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """All rows as dicts."""
        cursor = self._connection.execute(sql)
        names = [column[0] for column in cursor.description or []]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def row(self, sql: str) -> dict[str, Any]:
        """The only row."""
        return self.rows(sql)[0]

    def run(self, sql: str) -> None:
        """A statement without rows."""
        self._connection.execute(sql)

    def columns(self, table: str) -> list[str]:
        """The names of a table's columns."""
        return [row["column_name"] for row in self.rows(f"describe {table}")]

    def bins(self, column: str, source: str) -> list[tuple[float, float, int]]:
        """A histogram with bins that grow by a constant factor: (from, to, count) of each.

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
    """SQL for the usual percentiles of a column, named ``p50`` ... ``max``."""
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    parts = [f"quantile_cont({column}, {share}) as {name}" for name, share in shares]
    return ", ".join([f"avg({column}) as mean", *parts, f"max({column}) as max"])


def median(values: Sequence[float]) -> float:
    """The middle one of some values."""
    order = sorted(values)
    return order[len(order) // 2]
