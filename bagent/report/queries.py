"""SQL over the tables of a run, and what several sections of the page share."""

from __future__ import annotations

import math
import shlex
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bagent.duck import quoted

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ANSWERED = "status not in ('failed', 'bad_input') and copied_from is null"
"""SQL: rows that an endpoint answered."""

WEAK = "weak: "
"""Marks a finding that may be chance, or explains only a part."""

FEW = 20
"""What fewer rows than these show is weak."""

STAGE = "case when (select count(distinct stage) > 1 from results) then stage end"
"""SQL: the stage for a table; null where there is one, so that its column is left out."""

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

    def plain_name(self, name: str) -> str:
        """Return a name as an SQL identifier, without quotes where it needs none."""
        if not (name.isascii() and name.isidentifier()):
            return quoted(name)
        category = self.connection.execute(
            "select keyword_category from duckdb_keywords() where keyword_name = lower(?)", [name]
        ).fetchone()
        return name if category in (None, ("unreserved",)) else quoted(name)

    def run(self, sql: str) -> None:
        """Run a statement that returns no rows."""
        self.connection.execute(sql)

    def bins(
        self, column: str, source: str, *, whole: bool = False
    ) -> list[tuple[float, float, int]]:
        """Return (from, to, count) of bins that grow by a constant factor.

        The outermost thousandths fall in the first and the last bin.

        Args:
            column: SQL of the number.
            source: SQL of the rows.
            whole: the numbers are whole, and so are the bounds of the bins.
        """
        span = self.row(
            f"select quantile_cont({column}, 0.001) as low, quantile_cont({column}, 0.999) as high"
            f" from {source} where {column} > 0"
        )
        if span["low"] is None:
            return []
        edges = _edges(float(span["low"]), float(span["high"]), whole=whole)
        last = len(edges) - 2
        counts = ", ".join(
            f"count(*) filter ({within})"
            for index, (low, high) in enumerate(pairwise(edges))
            for within in [_within(column, low if index else None, high if index < last else None)]
        )
        row = self.connection.execute(
            f"select {counts} from {source} where {column} > 0"
        ).fetchone()
        bins = zip(pairwise(edges), row or (), strict=True)
        return [(low, high, count) for (low, high), count in bins]


def _within(column: str, low: float | None, high: float | None) -> str:
    """Return SQL for a number from ``low`` to below ``high``; None is no bound."""
    parts = [f"{column} >= {low!r}"] * (low is not None) + [f"{column} < {high!r}"] * (
        high is not None
    )
    return " and ".join(parts) or "true"


def _edges(low: float, high: float, *, whole: bool) -> list[float]:
    """Return the bounds of at most :data:`BINS` bins."""
    high = max(high, low * 1.1)
    factor = math.log(high / low) / BINS
    edges = [low * math.exp(factor * index) for index in range(BINS + 1)]
    if not whole:
        return edges
    edges[-1] = math.floor(high) + 1
    return sorted({float(math.floor(edge)) for edge in edges})


def quantiles(column: str) -> str:
    """Return SQL for ``mean``, ``p50``, ``p90``, ``p99`` and ``max`` of a column."""
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    parts = [f"quantile_disc({column}, {share}) as {name}" for name, share in shares]
    return ", ".join([f"avg({column}) as mean", *parts, f"max({column}) as max"])


MOST_IDS = 5
"""Rows that are named beside a finding."""

FIRST_IDS = f"arg_min(coalesce(id, 'row ' || row), row, {MOST_IDS})"
"""SQL for the first ids of a group of rows."""


def results_command(run: str, condition: str) -> str:
    """Return the command that lists the rows of a condition; empty without a run."""
    if not run:
        return ""
    typed = shlex.quote(condition)
    if not set(condition) & set('"$`\\!\n'):
        typed = f'"{condition}"'
    return f"bagent results {shlex.quote(run)} --where {typed} --with-input"
