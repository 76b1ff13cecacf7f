"""Everything about one row: result, attempts, tool calls, parents and children."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bagent.report.queries import ReportDb
from bagent.view.rows import RowKey

MOST_ATTEMPTS = 200
MOST_RELATIVES = 100
DEEPEST = 12
"""Generations of parents that are read."""

_JSON = ("output", "input", "logprobs")
_RELATIVE = "row, stage, answer, id, status, error_kind, error, text, output, parents"


class RowDetails(msgspec.Struct, frozen=True):
    """One row of ``results`` with all that belongs to it."""

    key: RowKey
    result: dict[str, Any]
    attempts: list[dict[str, Any]]
    tool_calls: list[dict[str, Any]]
    parents: list[dict[str, Any]]
    """The results that it was made of, and theirs; ``depth`` is 1 for the nearest."""

    children: list[dict[str, Any]]
    more_parents: int = 0


def find_row(db: ReportDb, key: RowKey) -> RowDetails | None:
    """Return a row; None if it is not there."""
    condition, parameters = key.sql()
    results = _select(db, f"select * from results where {condition} limit 1", parameters)
    if not results:
        return None
    result = results[0]
    attempts = _select(
        db,
        f"select * from attempts where {condition} order by turn, try, sent limit {MOST_ATTEMPTS}",
        parameters,
    )
    tools = _select(
        db,
        f"select * from tool_calls where {condition} order by turn, started limit {MOST_ATTEMPTS}",
        parameters,
    )
    names = result["parents"] or []
    parents = list(_ancestors(db, names))
    own = f"{key.stage}:{key.id}:{key.answer}"
    children = _select(
        db,
        f"select {_RELATIVE} from results where list_contains(parents, ?)"
        f" order by row, stage, answer, id limit {MOST_RELATIVES}",
        [own],
    )
    more = max(0, len(names) - MOST_RELATIVES)
    return RowDetails(key, result, attempts, tools, parents, children, more)


def find_same(db: ReportDb, key: RowKey) -> dict[str, Any] | None:
    """Return the result of another run with the same stage, id and answer.

    A row without an id is compared by its number.
    """
    rows = _select(
        db,
        "select * from results where stage = ? and answer = ? and id is not distinct from ?"
        " and (id is not null or row = ?) limit 1",
        [key.stage, key.answer, key.id, key.row],
    )
    return rows[0] if rows else None


def _ancestors(db: ReportDb, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for depth in range(1, DEEPEST + 1):
        names = [name for name in names[:MOST_RELATIVES] if name not in seen]
        following: list[str] = []
        for name in names:
            seen.add(name)
            parent = _find_parent(db, name)
            if parent is not None:
                parent["depth"] = depth
                following += parent["parents"] or []
                yield parent
        names = following
        if not names:
            return


def _find_parent(db: ReportDb, name: str) -> dict[str, Any] | None:
    stage, _, rest = name.partition(":")
    row_id, _, answer = rest.rpartition(":")
    if not answer.isdecimal():
        return None
    rows = _select(
        db,
        f"select {_RELATIVE} from results where stage = ? and id = ? and answer = ? limit 1",
        [stage, row_id, int(answer)],
    )
    return rows[0] if rows else None


def _select(db: ReportDb, sql: str, parameters: list[Any]) -> list[dict[str, Any]]:
    cursor = db.connection.execute(sql, parameters)
    names = [column[0] for column in cursor.description or []]
    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    for row in rows:
        for name in _JSON:
            if isinstance(row.get(name), str):
                row[name] = _decoded(row[name])
    return rows


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
