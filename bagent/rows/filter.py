"""Selection of rows: the condition ``where``, sample, limit and shard.

DuckDB evaluates the condition, each row by its own values alone: a whole number is BIGINT (HUGEINT,
then DOUBLE, as it gets larger), other numbers DOUBLE, text VARCHAR, lists and objects JSON, and
null or a missing field NULL. So the result for a row does not depend on other rows.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from struct import pack
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.duck import SqlError, check_reads, quoted, syntax_tree
from bagent.errors import InputError
from bagent.rows.formats.duckdb_source import connect
from bagent.rows.warnings import RowWarnings
from bagent.text.unicode import clean_json, clean_text
from bagent.types import Row, row_location

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


FAILED = "rows that `where` could not judge are left out: {count}; first {example}"

FIRST_ROWS = 100
"""A name that is in none of so many first rows is taken for a mistake."""

_NUMBER = "bagent row"
"""Column beside those of the rows; a name with a blank, which a condition will hardly use."""

Cells = tuple[Any, ...]
"""The values of one row for the names of the condition."""

_TYPES: dict[type, str] = {
    bool: "BOOLEAN",
    float: "DOUBLE",
    str: "VARCHAR",
    list: "JSON",
    dict: "JSON",
    type(None): "NULL",
}


def draw(key: int, seed: int) -> int:
    """Return 64 pseudo-random bits from a row's key and the seed."""
    lot = blake2b(pack(">Q", key), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(lot, "big")


class RowSample:
    """The ``size`` rows with the lowest lots: even, and independent of the order of the rows.

    All rows are shown once to find the highest lot that is in, then again to be picked; only
    ``size`` numbers are held. A larger sample of the same seed holds the smaller one.

    Args:
        size: rows to draw, 1 or more.
        seed: another seed draws other rows.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._lots: list[int] = []  # the lowest, negated: heapq keeps the lowest in front
        self._remaining = size

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows in the first pass."""
        lots, seed = self._lots, self._seed
        for row in rows:
            lot = -draw(row.key, seed)
            if len(lots) < self._size:
                heapq.heappush(lots, lot)
            elif lot > lots[0]:
                heapq.heapreplace(lots, lot)

    def select(self, rows: list[Row]) -> list[Row]:
        """Return the drawn ones of ``rows``, in the second pass."""
        if not self._lots:
            return []
        highest, seed = -self._lots[0], self._seed
        drawn = [row for row in rows if draw(row.key, seed) <= highest][: self._remaining]
        self._remaining -= len(drawn)
        return drawn


def limited(batches: Iterator[list[Row]], limit: int) -> Iterator[list[Row]]:
    """Yield the first ``limit`` rows; then nothing more is read."""
    remaining = limit
    while remaining:
        rows = next(batches, None)
        if rows is None:
            return
        rows = rows[:remaining]
        remaining -= len(rows)
        yield rows


def shard_positions(keys: Sequence[int], shard: tuple[int, int] | None) -> Sequence[int]:
    """Return the indexes of the keys in the shard of :func:`in_shard`; None: all rows."""
    if shard is None:
        return range(len(keys))
    part, parts = shard
    remainder = part - 1
    return [at for at, key in enumerate(keys) if key % parts == remainder]


def in_shard(rows: list[Row], shard: tuple[int, int]) -> list[Row]:
    """Return the rows of part ``i`` of ``n`` (from 1): a row's part follows from its key alone."""
    part, parts = shard
    return [row for row in rows if row.key % parts == part - 1]


class Condition:
    """One ``where``.

    Args:
        text: the condition, as it stands behind WHERE.
        base: folder that relative file names in it start from.

    Raises:
        InputError: it cannot be parsed.
    """

    def __init__(self, text: str, base: Path) -> None:
        self._text = text
        self._connection: DuckDBPyConnection = connect(base)
        self.checked = False
        """Whether :meth:`check` was called, once rows were known."""
        needed, maybe = _names(self._parse())
        self.needed = frozenset(needed)
        """The names that rows must have."""
        self.names = self.needed | maybe
        """All names of columns."""
        self._needed = sorted(needed)
        self._names = sorted(self.names)
        lower = [name.lower() for name in self._names]
        if len(set(lower)) < len(lower):
            raise InputError(
                f"where: two of its names differ in case only: {', '.join(self._names)}",
                hint="DuckDB takes them for one; use one of them",
            )
        self._guarded = self._can_guard()

    def check(self, rows: Sequence[dict[str, Any]], *, strict: bool) -> None:
        """Check the condition against the first rows.

        Args:
            rows: the data of the first rows; empty: nothing is checked.
            strict: refuse too what no row of these has the types for.

        Raises:
            InputError: a name is in none of them, or a function does not exist.
        """
        if not rows:
            return
        self.checked = True
        fields = dict.fromkeys(name for row in rows for name in row)
        lower = {name.lower() for name in fields}
        for name in self._needed:
            if name.lower() not in lower:
                near = difflib.get_close_matches(name, fields, n=1)
                raise InputError(
                    f"where: no field '{name}' in the first rows",
                    hint=f"did you mean {near[0]}?"
                    if near
                    else f"there are {', '.join(list(fields)[:20])}",
                )
        import duckdb

        refused: tuple[type[Exception], ...] = (duckdb.CatalogException, duckdb.ParserException)
        if strict:
            refused = (*refused, duckdb.BinderException)
        kinds = {_types(cells): cells for cells in map(self._cells, rows)}
        errors = [self._error_for(cells) for cells in kinds.values()]
        if all(isinstance(error, refused) for error in errors):
            message = str(errors[0]).partition("\n")[0]
            hint = (
                "cells of a CSV and decimals are text: CAST(name AS DOUBLE)"
                if "VARCHAR" in message
                else ""
            )
            raise InputError(f"where: {message}", hint=hint)

    def filter(self, rows: list[Row], warnings: RowWarnings) -> list[Row]:
        """Return the rows that fulfil the condition, and those that cannot be read."""
        passes = [row.error is not None for row in rows]
        groups: dict[tuple[str, ...], list[tuple[int, Cells]]] = {}
        for at, row in enumerate(rows):
            if not passes[at]:
                cells = self._cells(row.data)
                groups.setdefault(_types(cells), []).append((at, cells))
        for types, members in groups.items():
            answers = self._evaluate(types, [cells for _, cells in members])
            for (at, cells), answer in zip(members, answers, strict=True):
                passes[at] = bool(answer)
                if answer is None:
                    self._report(rows[at], cells, warnings)
        return [row for row, good in zip(rows, passes, strict=True) if good]

    def _parse(self) -> Any:
        """Return the syntax tree of the condition."""
        # On lines of their own, so that a comment at the end does not swallow the bracket.
        query = f"SELECT 1 WHERE (\n{self._text}\n)"
        tree = syntax_tree(self._connection, query)
        if tree["error"]:
            raise InputError(
                f"where: {tree['error_message']}: {self._text}",
                hint="a DuckDB condition, e.g. length(text) > 0",
            )
        nodes = [statement["node"] for statement in tree["statements"]]
        if len(nodes) != 1 or nodes[0]["type"] != "SELECT_NODE":
            raise InputError(
                f"where: this is no condition: {self._text}",
                hint="write a condition, such as length(text) > 0",
            )
        try:
            check_reads(nodes)
        except SqlError as error:
            raise InputError(
                f"where: {error}",
                hint="write a condition that only reads, such as length(text) > 0",
            ) from None
        return nodes[0]["where_clause"]

    def _cells(self, data: dict[str, Any]) -> Cells:
        """Return a row's value for each name of the condition; exact case is preferred."""
        values = [
            data[name] if name in data else _value_in_other_case(data, name) for name in self._names
        ]
        return tuple([clean_text(cell) if isinstance(cell, str) else cell for cell in values])

    def _query(self, types: tuple[str, ...], *, guarded: bool) -> str:
        columns = [f'unnest(range($1)) AS "{_NUMBER}"']
        number = 1
        for name, kind in zip(self._names, types, strict=True):
            value = "NULL"
            if kind != "NULL":
                number += 1
                value = f"unnest(${number}::{kind}[])"
            columns.append(f"{value} AS {quoted(name)}")
        test = f"COALESCE(CAST((\n{self._text}\n) AS BOOLEAN), false)"
        if guarded:
            test = f"TRY({test})"
        return f'SELECT {test} FROM (SELECT {", ".join(columns)}) ORDER BY "{_NUMBER}"'

    def _execute(
        self, types: tuple[str, ...], rows: list[Cells], guarded: bool
    ) -> list[bool | None]:
        values: list[Any] = [len(rows)]
        for at, kind in enumerate(types):
            column = [cells[at] for cells in rows]
            if kind == "JSON":
                column = [_json(value) for value in column]
            if kind != "NULL":
                values.append(column)
        query = self._query(types, guarded=guarded)
        return [answer for (answer,) in self._connection.execute(query, values).fetchall()]

    def _evaluate(self, types: tuple[str, ...], rows: list[Cells]) -> list[bool | None]:
        """Return whether each row passes; None where the condition fails on it."""
        import duckdb

        try:
            return self._execute(types, rows, self._guarded)
        except (duckdb.BinderException, duckdb.CatalogException):
            return [None] * len(rows)  # it fails for these types, whatever the values
        except duckdb.Error:
            if len(rows) == 1:
                return [None]
        return [answer for cells in rows for answer in self._evaluate(types, [cells])]

    def _error_for(self, cells: Cells) -> Exception | None:
        """Return what DuckDB says about one row, None where it has an answer."""
        import duckdb

        try:
            self._execute(_types(cells), [cells], guarded=False)
        except duckdb.Error as error:
            return error
        return None

    def _report(self, row: Row, cells: Cells, warnings: RowWarnings) -> None:
        example = ""
        if warnings.is_new(FAILED):
            reason = str(self._error_for(cells)).partition("\n")[0]
            example = f"{row_location(row.source, row.line)}: {reason}"
        warnings.add(FAILED, example)

    def _can_guard(self) -> bool:
        """Return whether TRY accepts the condition: it refuses random ones and subqueries."""
        import duckdb

        try:
            self._execute(("NULL",) * len(self._names), [(None,) * len(self._names)], guarded=True)
        except duckdb.BinderException as error:
            return "TRY can not" not in str(error)
        except duckdb.Error:
            return True
        return True


def _value_in_other_case(data: dict[str, Any], name: str) -> Any:
    """Return the value of a name in other case, None where there is none."""
    lower = name.lower()
    return next((value for other, value in data.items() if other.lower() == lower), None)


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(clean_json(value)).decode()


def _types(cells: Cells) -> tuple[str, ...]:
    return tuple([_type(value) for value in cells])


def _type(value: Any) -> str:
    """Return the DuckDB type of a JSON value."""
    if type(value) is int:
        if -(2**63) <= value < 2**63:
            return "BIGINT"
        return "HUGEINT" if -(2**127) < value < 2**127 else "DOUBLE"
    return _TYPES[type(value)]


def _names(tree: Any) -> tuple[set[str], set[str]]:
    """Return the columns that a condition needs, and those that may belong to its subqueries."""
    needed: set[str] = set()
    maybe: set[str] = set()
    for name, inner in _references(tree, frozenset(), inner=False):
        (maybe if inner else needed).add(name)
    return needed, maybe - needed


def _references(node: Any, bound: frozenset[str], *, inner: bool) -> Iterator[tuple[str, bool]]:
    """Yield the first name of every column reference, and whether it is in a subquery."""
    if isinstance(node, list):
        for item in node:
            yield from _references(item, bound, inner=inner)
        return
    if not isinstance(node, dict):
        return
    kind = node.get("class")
    if kind == "COLUMN_REF":
        name = node["column_names"][0]
        if name not in bound:
            yield name, inner
        return
    if kind == "LAMBDA":
        parameters = [name for name, _ in _references(node["lhs"], frozenset(), inner=inner)]
        yield from _references(node["expr"], bound.union(parameters), inner=inner)
        return
    for name, child in node.items():
        yield from _references(child, bound, inner=inner or name == "subquery")
