"""Invariants of shards, which share a run."""

from __future__ import annotations

from collections import Counter

from worlds.evidence import Problems, invariant_for
from worlds.history import History


@invariant_for("shards")
def a_row_belongs_to_one_shard(history: History) -> Problems:
    """No two shards send one row."""
    shards: dict[int, int] = {}
    for sent in history.network.sent:
        shard = sent.start % history.world.job.shards
        for row in sent.rows:
            if shards.setdefault(row, shard) != shard:
                yield f"row {row} was sent by shards {shards[row]} and {shard}"


@invariant_for("shards")
def all_shards_have_all_rows(history: History) -> Problems:
    """Once each shard has ended, each row has one outcome, and all counts agree on them."""
    start, rows = history.starts[-1], len(history.world.rows)
    numbers = sorted(result["row"] for result in start.results)
    if len(set(numbers)) < len(numbers):
        yield f"results of rows {numbers}"
    if start.code not in (0, 1):
        return
    if numbers != list(range(rows)):
        yield f"results of rows {numbers}, expected {rows}"
    statuses = Counter(result["status"] for result in start.results)
    status = start.status
    if statuses != status["by_status"]:
        yield f"results {dict(statuses)}, status {status}"
    if status["total_is_exact"] and status["total"] != rows:
        yield f"{rows} rows, status says {status['total']}"
