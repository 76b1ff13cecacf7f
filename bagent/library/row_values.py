"""Rows of other programs, and of pandas, polars and Arrow tables, as JSON lines.

Dates and times become ISO 8601, numpy scalars plain numbers, decimals the text of their digits,
bytes and paths text. A value that JSON cannot hold is left out, and the row is ``bad_input`` where
the job uses its column.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sized
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import islice, repeat
from typing import Any

import msgspec

from bagent.errors import UsageError
from bagent.library.arguments import Rows
from bagent.rows.formats.json import TOO_DEEP, bytes_text, decimal_value, unreadable_line
from bagent.types import Json

_MISSING = object()
_FIRST = 100  # rows that are looked at before the run starts
_TABLE_ROWS = 4096  # rows of a table that are converted at once
_TABLE_METHODS = {
    "pandas": ("itertuples",),
    "polars": ("iter_rows", "collect"),
    "pyarrow": ("to_batches", "num_rows"),
}
_NO_VALUE = frozenset({"NAType", "NaTType"})
_PLAIN = frozenset({str, int, bool, type(None)})


class _BadValue(ValueError):
    """A value that JSON cannot hold."""


def check_rows(rows: Any) -> None:
    """Refuse values that cannot be rows, before the run starts.

    Raises:
        UsageError: text, a path or a mapping, values that are no rows, or a table with two columns
            of one name.
    """
    if isinstance(rows, str | bytes | Mapping) or hasattr(rows, "__fspath__"):
        hint = 'rows=[{"id": 1, "text": "..."}]; a file: options=["-i", "rows.jsonl"]'
        raise UsageError(f"rows are a list of dicts or a table, not {_kind(rows)}", hint=hint)
    if not isinstance(rows, Iterable | AsyncIterable) and not _is_table(rows):
        raise UsageError(
            f"rows are a list of dicts or a table, not {_kind(rows)}",
            hint="pass a list of dicts, or a pandas, polars or Arrow table",
        )
    if isinstance(rows, Sized) and not _is_table(rows) and len(rows):
        first = list(islice(rows, _FIRST)) if isinstance(rows, Iterable) else []
        if first and not any(isinstance(row, Mapping) or _is_table(row) for row in first):
            raise UsageError(
                f"rows are dicts or a table, not {_kind(first[0])} each",
                hint='rows=[{"text": value} for value in values]',
            )
    names = _columns(rows)
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise UsageError(
            f"two columns of the rows have the name {duplicates[0]!r}", hint="rename one of them"
        )


_LIKE_AN_ID = re.compile(r"(?i:(?:^|[_\W])(?:id|key|uuid|guid))$|[a-z](?:Id|ID)$")


def id_column(rows: Any) -> str | None:
    """Return the first column of a table that is called like an id, and names each row.

    The named index of a pandas table may have any name. None for other rows, and where a column has
    the name that jobs take by default.
    """
    names = _columns(rows)
    if not names or {"id", "custom_id"} & set(names):
        return None
    is_index = hasattr(rows, "itertuples") and len(names) == rows.shape[1] + 1
    for at, name in enumerate(names):
        if (_LIKE_AN_ID.search(name) or (is_index and not at)) and _is_unique(rows, at):
            return name
    return None


def _is_unique(table: Any, at: int) -> bool:
    """Return whether all values of a column are there and differ."""
    if hasattr(table, "itertuples"):
        column = _pandas_columns(table)[at][1]
        return bool(column.is_unique and column.notna().all())
    column = table.to_series(at) if hasattr(table, "iter_rows") else table.column(at)
    nulls = column.null_count
    return (nulls() if callable(nulls) else nulls) == 0 and len(column.unique()) == len(column)


async def row_lines(rows: Rows) -> AsyncIterator[bytes]:
    """Yield each row as one line of JSON, without a line end."""
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            for line in _lines_of(row):
                yield line
    else:
        for row in _each(rows):
            for line in _lines_of(row):
                yield line


def encode_row(row: Any, *, drop_null: bool = False) -> bytes:
    """Encode one row as a line of JSON; with a value that JSON cannot hold, as an unreadable line.

    Args:
        drop_null: leave out fields that are None, which in a table means that there is no value.
    """
    if not isinstance(row, Mapping):
        return unreadable_line(f"a row is a dict, not {_kind(row)}")
    data: dict[str, Json] = {}
    faults: dict[str, str] = {}
    for key, value in row.items():
        name = key if type(key) is str else str(key)
        try:
            plain = value if type(value) in _PLAIN else _plain(value)
        except (_BadValue, RecursionError) as error:
            faults[name] = str(error) if isinstance(error, _BadValue) else TOO_DEEP
            continue
        if plain is not _MISSING and not (drop_null and plain is None):
            data[name] = plain
    if not faults:
        return _encode(data)
    message = "; ".join(f"column {name!r}: {fault}" for name, fault in faults.items())
    return unreadable_line(message, data, list(faults))


def _encode(data: dict[str, Json]) -> bytes:
    try:
        return msgspec.json.encode(data)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, an integer above 64 bits
        return json.dumps(data).encode()


def _lines_of(row: Any) -> Iterator[bytes]:
    if _is_table(row):  # such as the record batches of an Arrow reader
        for table_row in _table_rows(row):
            yield encode_row(table_row, drop_null=True)
    else:
        yield encode_row(row)


def _each(rows: Any) -> Iterable[Any]:
    return [rows] if _is_table(rows) else rows


def _is_table(rows: Any) -> bool:
    """Return whether this is a table or a part of one, without importing its package."""
    package = type(rows).__module__.partition(".")[0]
    return any(hasattr(rows, name) for name in _TABLE_METHODS.get(package, ()))


def _columns(table: Any) -> list[str]:
    if not _is_table(table):
        return []
    if hasattr(table, "collect"):  # a lazy frame of polars has no duplicate names
        return []
    if hasattr(table, "itertuples"):
        return [name for name, _ in _pandas_columns(table)]
    names = table.schema.names if type(table).__module__.startswith("pyarrow") else table.columns
    return [str(name) for name in names]


def _pandas_columns(table: Any) -> list[tuple[str, Any]]:
    """Return the columns of a pandas table, after the levels of its index that have a name."""
    index, names = table.index, [str(name) for name in table.columns]
    levels = [
        (str(name), index.get_level_values(level))
        for level, name in enumerate(index.names)
        if name is not None and str(name) not in names
    ]
    return levels + [(name, table.iloc[:, at]) for at, name in enumerate(names)]


def _table_rows(table: Any) -> Iterator[dict[str, Any]]:
    if hasattr(table, "collect"):  # a lazy frame of polars
        table = table.collect()
    if hasattr(table, "itertuples"):
        for start in range(0, len(table), _TABLE_ROWS):
            part = table.iloc[start : start + _TABLE_ROWS]
            columns = dict(_pandas_columns(part))
            lists = [column.tolist() for column in columns.values()]
            values = zip(*lists, strict=True) if lists else repeat((), len(part))
            yield from (dict(zip(columns, row, strict=True)) for row in values)
    elif hasattr(table, "iter_rows"):
        yield from table.iter_rows(named=True)
    elif hasattr(table, "to_batches"):
        for batch in table.to_batches():
            yield from _table_rows(batch)
    else:
        for start in range(0, table.num_rows, _TABLE_ROWS):
            yield from table.slice(start, _TABLE_ROWS).to_pylist()


def _plain(value: Any) -> Any:
    """Convert a value to JSON; :data:`_MISSING` stands for no value.

    Raises:
        _BadValue: JSON cannot hold it.
    """
    if value is None or isinstance(value, bool):
        return value
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if type(value).__module__.partition(".")[0] == "numpy" and kind:
        return _from_numpy(value, kind)
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(float(value))
    if type(value).__name__ in _NO_VALUE:
        return _MISSING
    if isinstance(value, Mapping):
        return {str(name): _nested(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nested(item) for item in value]
    return _text(value)


def _nested(value: Any) -> Json:
    plain = value if type(value) in _PLAIN else _plain(value)
    return None if plain is _MISSING else plain  # a list keeps the positions of its items


def _number(value: float) -> Any:
    if math.isfinite(value):
        return value
    return _MISSING if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _from_numpy(value: Any, kind: str) -> Any:
    if getattr(value, "ndim", 0):
        return [_nested(item) for item in value]
    if kind in "mM":
        if value != value:  # NaT
            return _MISSING
        return str(value) if kind == "M" else _text(value.astype("m8[us]").item())
    if kind not in "biufSUO":
        raise _BadValue(f"{_kind(value)} has no form in JSON")
    item = value.item()
    # The item of a longdouble is a longdouble again.
    return _plain(float(item) if type(item).__module__ == "numpy" else item)


def _text(value: Any) -> Any:
    """Convert a value of a type that JSON lacks."""
    if isinstance(value, Decimal):
        return decimal_value(value) if not value.is_nan() else _MISSING
    if isinstance(value, datetime):
        text = value.isoformat()
        return text.removesuffix("+00:00") + "Z" if text.endswith("+00:00") else text
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        duration = timedelta(value.days, value.seconds, value.microseconds)
        return msgspec.to_builtins(duration)
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
        return value if isinstance(value, str) else bytes_text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes_text(bytes(value))
    if isinstance(value, set | frozenset):
        return sorted((_nested(item) for item in value), key=json.dumps)  # in a stable order
    series = getattr(value, "to_list", None) or getattr(value, "tolist", None)
    if series is not None:
        return [_nested(item) for item in series()]
    if isinstance(value, msgspec.Struct):
        return _nested(msgspec.structs.asdict(value))
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _nested(getattr(value, field.name)) for field in fields}
    raise _BadValue(f"{_kind(value)} has no form in JSON")


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
