"""Two runs row by row: how many answers are the same, which differ, and in which words."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

import msgspec

from bagent.duck import Access, connect, file_source
from bagent.errors import UsageError
from bagent.observe.formatting import visible
from bagent.view.rows import PAGE_ROWS, RowKey
from bagent.view.tables import QUERY_SECONDS, SETTINGS, stopped_after

Change = Literal["same", "removed", "added"]

MOST_WORDS = 4000
"""Words of each text that are compared; the work grows with their product."""

MOST_CHARACTERS = 20_000
"""Characters of listed answers in which the first difference is looked for."""

CELL_CHARACTERS = 300
"""Characters of an answer that are listed."""

BEFORE = 100
"""Characters before the first difference that are listed."""

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")

_CONDITIONS = {
    "different": "in_a and in_b and not same",
    "status": "in_a and in_b and status_a <> status_b",
    "same": "same",
    "missing": "not in_a or not in_b",
    "all": "true",
}

_ANSWER = "coalesce(output::varchar, text, error)"

_NUMBER = "case when id is null then row end"
"""SQL: the number of a row that has no id to compare it by."""


def word_diff(first: str, second: str) -> list[tuple[Change, str]]:
    """Return the pieces of both texts in order; beyond :data:`MOST_WORDS` nothing is compared."""
    a, b = (_WORDS.findall(text)[: MOST_WORDS + 1] for text in (first, second))
    if max(len(a), len(b)) > MOST_WORDS:
        same = first == second
        return [("same", first)] if same else [("removed", first), ("added", second)]
    pieces: list[tuple[Change, str]] = []
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            pieces.append(("same", "".join(a[i:j])))
            continue
        if i < j:
            pieces.append(("removed", "".join(a[i:j])))
        if k < m:
            pieces.append(("added", "".join(b[k:m])))
    return pieces


class Comparison(msgspec.Struct, frozen=True):
    """Counts over all rows of two runs, and one page of rows."""

    both: int
    same: int
    different: int
    other_status: int
    missing: int
    rows: list[dict[str, Any]]
    after: RowKey | None


def compare_runs(files: tuple[Path, Path], only: str, after: RowKey | None) -> Comparison:
    """Compare the results of two runs by stage, id and number of the answer.

    Rows without an id are compared by their number.

    Args:
        files: the Parquet files of both results.
        only: which rows are listed: a name of ``_CONDITIONS``.
        after: list the rows that follow this one.

    Raises:
        UsageError: ``only`` is unknown.
        duckdb.Error: it took too long.
    """
    if only not in _CONDITIONS:
        raise UsageError(f"{only} is no choice of rows", hint=", ".join(_CONDITIONS))
    sources = [
        f"(select stage, answer, id, row, {_NUMBER} as number, status, hash({_ANSWER}) as h"
        f" from read_parquet({file_source(path)}))"
        for path in files
    ]
    with (
        connect(Access(files=files), settings=SETTINGS) as connection,
        stopped_after(connection, QUERY_SECONDS),
    ):
        connection.execute(
            f"""create temp table pairs as
                select coalesce(a.row, b.row) as row, coalesce(a.stage, b.stage) as stage,
                       coalesce(a.answer, b.answer) as answer, coalesce(a.id, b.id) as id,
                       a.status as status_a, b.status as status_b,
                       a.h is not null as in_a, b.h is not null as in_b,
                       a.h = b.h and a.status = b.status as same
                from {sources[0]} a full join {sources[1]} b
                on a.stage = b.stage and a.answer = b.answer
                   and a.id is not distinct from b.id
                   and a.number is not distinct from b.number"""
        )
        counts = (
            connection.execute(
                "select "
                + ", ".join(f"count(*) filter ({c})" for c in _CONDITIONS.values())
                + ", count(*) filter (in_a and in_b) from pairs"
            ).fetchone()
            or (0,) * 6
        )
        listed = _list(connection, _CONDITIONS[only], after)
        _add_texts(connection, listed[:PAGE_ROWS], [file_source(path) for path in files])
    last = listed[PAGE_ROWS - 1] if len(listed) > PAGE_ROWS else None
    return Comparison(
        both=counts[5],
        same=counts[2],
        different=counts[0],
        other_status=counts[1],
        missing=counts[3],
        rows=listed[:PAGE_ROWS],
        after=None if last is None else RowKey.of(last),
    )


def _list(connection: Any, condition: str, after: RowKey | None) -> list[dict[str, Any]]:
    """Return the pairs of a page, and one more where another page follows."""
    key, parameters = "true", []
    if after is not None:
        key = "(row, stage, answer, coalesce(id, '')) > (?, ?, ?, ?)"
        parameters = [after.row, after.stage, after.answer, after.id or ""]
    rows = connection.execute(
        f"""select row, stage, answer, id, status_a, status_b from pairs
            where {condition} and {key}
            order by row, stage, answer, coalesce(id, '') limit {PAGE_ROWS + 1}""",
        parameters,
    ).fetchall()
    names = ("row", "stage", "answer", "id", "status_a", "status_b")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _add_texts(connection: Any, rows: list[dict[str, Any]], files: list[str]) -> None:
    """Add the answers of both runs, in pieces that say what differs, and the key of each row."""
    ids = [row["id"] for row in rows]
    for column, file in zip(("text_a", "text_b"), files, strict=True):
        texts = {}
        if ids:
            marks = ", ".join("?" * len(ids))
            for *key, text in connection.execute(
                f"select stage, answer, id, {_NUMBER}, left({_ANSWER}, {MOST_CHARACTERS})"
                f" from read_parquet({file}) where id in ({marks})"
                f" or (id is null and row in ({marks}))",
                [*ids, *(row["row"] for row in rows)],
            ).fetchall():
                texts[tuple(key)] = text
        for row in rows:
            number = row["row"] if row["id"] is None else None
            row[column] = texts.get((row["stage"], row["answer"], row["id"], number)) or ""
            row["key"] = RowKey.of(row)
    for row in rows:
        first, second = _excerpts(row["text_a"], row["text_b"])
        both = row["status_a"] and row["status_b"]
        row["pieces"] = word_diff(first, second) if both else [("same", first or second)]


def _excerpts(first: str, second: str) -> tuple[str, str]:
    """Return the part of each text that is listed: its beginning, or where both first differ."""
    pairs = enumerate(zip(first, second, strict=False))
    begin = next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))
    begin = 0 if first == second or begin < CELL_CHARACTERS - BEFORE else begin - BEFORE
    head = "..." if begin else ""
    texts = [head + visible(text[begin:], CELL_CHARACTERS) for text in (first, second)]
    return texts[0], texts[1]
