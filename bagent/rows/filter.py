"""Selection of rows: the condition ``where``, sample, limit and shard.

DuckDB evaluates the condition, each row by its own values alone: a whole number is BIGINT (HUGEINT,
then DOUBLE, as it gets larger), other numbers DOUBLE, text VARCHAR, lists and objects JSON, and
null or a missing field NULL. So the result for a row does not depend on other rows. A field inside
an object, ``meta.year``, becomes a column of its own, with the type of its value.
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

from bagent.duck import SqlError, check_reads, quoted, sql_of_tree, syntax_tree
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
"""The values of one row for the paths of the condition."""

FieldPath = tuple[str, ...]
"""A field of the row, or one inside of objects: each name from the outside."""

_SELECT = "SELECT 1 WHERE "

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
        """SQL in which each path is one column."""
        self._connection: DuckDBPyConnection = connect(base)
        self.checked = False
        """Whether :meth:`check` was called, once rows were known."""
        needed, maybe = self._take_paths(self._parse())
        self.needed = frozenset(path[0] for path in needed)
        """The names that rows must have."""
        self.names = self.needed | {path[0] for path in maybe}
        """All names of columns."""
        self._needed = sorted(needed)
        self._paths = sorted(needed | maybe)
        self._names = [_column_name(path) for path in self._paths]
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
        for path in self._needed:
            _check_path(path, rows)
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
        if any(map(_is_malformed, errors)):
            cells = [cells for cells in map(self._cells, rows) if "JSON" in _types(cells)]
            if cells and all(_is_malformed(self._error_for(row)) for row in cells):
                raise InputError(
                    "where: a list or an object of JSON is compared with a text",
                    hint="take the text out of it: tags->>0 = 'a', meta->>'kind' = 'a'",
                )

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
        """Return the syntax tree of a query with the condition."""
        # On lines of their own, so that a comment at the end does not swallow the bracket.
        query = f"{_SELECT}(\n{self._text}\n)"
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
        return tree

    def _take_paths(self, tree: Any) -> tuple[set[FieldPath], set[FieldPath]]:
        """Make each path one column, and return the needed paths, and those of subqueries.

        A name in a subquery may be that of a column of the subquery.
        """
        needed: set[FieldPath] = set()
        maybe: set[FieldPath] = set()
        condition = tree["statements"][0]["node"]["where_clause"]
        for node, inner in _references(condition, frozenset(), inner=False):
            path = tuple(node["column_names"])
            (maybe if inner else needed).add(path[:1] if inner else path)
            if not inner:
                node["column_names"] = [_column_name(path)]
        if any(len(path) > 1 for path in needed):
            self._text = sql_of_tree(self._connection, tree).removeprefix(_SELECT)
        return needed, maybe - needed

    def _cells(self, data: dict[str, Any]) -> Cells:
        """Return a row's value for each path of the condition; exact case is preferred."""
        values = [_value_at(data, path) for path in self._paths]
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


def _column_name(path: FieldPath) -> str:
    return ".".join(path)


def _value_at(value: Any, path: FieldPath) -> Any:
    """Return the value of a path, None where there is none."""
    for name in path:
        key = _key_of(value, name)
        if key is None:
            return None
        value = value[key]
    return value


def _key_of(value: Any, name: str) -> str | None:
    """Return the key of an object that has this name, or has it in other case."""
    if not isinstance(value, dict):
        return None
    if name in value:
        return name
    lower = name.lower()
    return next((key for key in value if key.lower() == lower), None)


def _check_path(path: FieldPath, rows: Sequence[dict[str, Any]]) -> None:
    """Refuse a path that no row has.

    Raises:
        InputError: the first rows have other fields.
    """
    values: list[Any] = list(rows)
    for depth, name in enumerate(path):
        objects = [value for value in values if isinstance(value, dict)]
        keys = [(value, _key_of(value, name)) for value in objects]
        values = [value[key] for value, key in keys if key is not None]
        if values:
            continue
        before = path[:depth]
        fields = list(dict.fromkeys(key for value in objects for key in value))
        raise InputError(
            f"where: no field '{_column_name((*before, name))}' in the first rows",
            hint=_hint_of_fields(path, before, fields),
        )


def _hint_of_fields(path: FieldPath, before: FieldPath, fields: list[str]) -> str:
    name = path[len(before)]
    if _column_name(path) in fields:
        return f"write {quoted(_column_name(path))}: its name has a dot"
    if not fields:
        rest = path[len(before) :]
        return f"{_column_name(before)} is no object; if it is JSON as text: " + "->>".join(
            [_column_name(before), *(f"'{key}'" for key in rest)]
        )
    near = difflib.get_close_matches(name, fields, n=1)
    if near:
        return f"did you mean {_column_name((*before, near[0]))}?"
    return f"there are {', '.join(_column_name((*before, field)) for field in fields[:20])}"


def _is_malformed(error: Exception | None) -> bool:
    return "Malformed JSON" in str(error)


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


def _references(node: Any, bound: frozenset[str], *, inner: bool) -> Iterator[tuple[Any, bool]]:
    """Yield the node of every column reference, and whether it is in a subquery."""
    if isinstance(node, list):
        for item in node:
            yield from _references(item, bound, inner=inner)
        return
    if not isinstance(node, dict):
        return
    kind = node.get("class")
    if kind == "COLUMN_REF":
        if node["column_names"][0] not in bound:
            yield node, inner
        return
    if kind == "LAMBDA":
        references = _references(node["lhs"], frozenset(), inner=inner)
        parameters = [reference["column_names"][0] for reference, _ in references]
        yield from _references(node["expr"], bound.union(parameters), inner=inner)
        return
    for name, child in node.items():
        yield from _references(child, bound, inner=inner or name == "subquery")
