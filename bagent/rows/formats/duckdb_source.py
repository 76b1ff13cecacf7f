"""Rows from DuckDB: Parquet files, and queries over anything that it reads.

Rows are fetched a few hundred at a time from a result that DuckDB makes as it is read, so memory
does not follow the number of rows.

Parquet has no type of durations: Arrow writes whole numbers, and its own schema, a base64 text in
the metadata of the file, has the units.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from bagent import duck
from bagent.duck import Access, Setting, SqlError, file_literal
from bagent.errors import InputError, MissingPackage, Position
from bagent.remote import RemoteFile
from bagent.remote.files import serve_file
from bagent.rows.discovery import FileSource, SqlSource, TableColumns
from bagent.rows.formats.json import ROWS, Chunk, Item, Unreadable, bytes_text, decimal_value
from bagent.text.unicode import float_or_text
from bagent.types import Json

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


_MEMORY = "1GB"
"""What DuckDB may take before a sort or a join goes to the temporary folder."""

ONE_QUERY = "one SELECT; a DuckDB file: FROM read_duckdb('FILE', table_name = 'TABLE')"
"""How to write the sql of an input."""

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_REMOTE_ERROR = re.compile(r"RemoteError: (?:\[Errno \d+\] )?")
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)
_NOT_UTF8 = "is not valid UTF8"
_FLOATS = re.compile(r"FLOAT(?:\[\d*\])*")

_AS_THEY_ARE = frozenset(
    {"VARCHAR", "BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT"}
    | {"UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT", "ENUM"}
)
_ISO = "replace(CAST({0} AS VARCHAR), ' ', 'T')"
_IN_SQL = {
    # DuckDB's own text for what Python's types cannot hold: infinities, years above 9999,
    # nanoseconds, months of an interval.
    "DATE": "CAST({0} AS VARCHAR)",
    "TIME": "CAST({0} AS VARCHAR)",
    "TIME_NS": "CAST({0} AS VARCHAR)",
    "TIME WITH TIME ZONE": "CAST({0} AS VARCHAR)",
    "INTERVAL": "CAST({0} AS VARCHAR)",
    "UUID": "CAST({0} AS VARCHAR)",
    "TIMESTAMP": _ISO,
    "TIMESTAMP_S": _ISO,
    "TIMESTAMP_MS": _ISO,
    "TIMESTAMP_NS": _ISO,
    "TIMESTAMP WITH TIME ZONE": _ISO,
    "TIMESTAMPTZ_NS": _ISO,
}


def connect(base: Path) -> DuckDBPyConnection:
    """Return a DuckDB in memory: one thread, so that the order of rows is always the same.

    Args:
        base: folder that relative file names in SQL start from.

    Raises:
        MissingPackage: DuckDB is not installed.
    """
    settings: dict[str, Setting] = {
        "threads": 1,
        "memory_limit": _MEMORY,
        "TimeZone": "UTC",
        "file_search_path": str(base),
    }
    try:
        return duck.connect(Access(everything=True), settings=settings)
    except ImportError as error:
        raise MissingPackage(
            "DuckDB is not installed; Parquet, sql and where need it", hint="pip install duckdb"
        ) from error


class _InvalidText(InputError):
    """A text in a Parquet file is not UTF-8."""


class Table:
    """The rows of one Parquet file or query.

    Args:
        source: where they come from.
        base: folder that relative file names in SQL start from.
        columns: what to read; None: all columns.

    Raises:
        InputError: DuckDB cannot read the file or bind the query, or two columns have one name.
    """

    def __init__(
        self, source: FileSource | SqlSource, base: Path, columns: TableColumns | None = None
    ) -> None:
        self._source = source
        self._columns = columns
        self._partition = partition_of(source.name) if isinstance(source, FileSource) else {}
        self._connection = connect(base)
        self.read = 0
        """Rows given out so far."""
        self.rows: int | None = None
        """Number of rows, None if unknown before reading."""
        try:
            if isinstance(source, FileSource):
                self._prepare_parquet(source)
            else:
                self._prepare_sql(source)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the memory and the files go."""
        self._connection.close()

    def interrupt(self) -> None:
        """Stop a query that is running; may be called from another thread."""
        self._connection.interrupt()

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows, numbered from 1; one with a text that is no UTF-8 is unreadable."""
        try:
            for records in self._records(self._select):
                yield self._chunk(records)
        except _InvalidText:
            for records in self._records(f"{self._checked_select()} OFFSET {self.read}"):
                chunk = self._chunk([record[:-1] for record in records])
                for at, record in enumerate(records):
                    if True in record[-1]:
                        chunk.items[at] = self._unreadable(chunk.items[at], record[-1])
                yield chunk

    def _records(self, select: str) -> Iterator[list[Any]]:
        result = self._run(lambda: self._connection.execute(select))
        while records := self._run(lambda: result.fetchmany(ROWS)):
            yield records

    def _chunk(self, records: list[Any]) -> Chunk:
        lines = range(self.read + 1, self.read + len(records) + 1)
        self.read += len(records)
        names = self._names
        items: list[Any] = [dict(zip(names, record, strict=True)) for record in records]
        if self._partition:
            items = [self._partition | item for item in items]
        for name, convert in self._converted.items():
            for item in items:
                item[name] = convert(item[name])
        return Chunk(self._source.name, lines, items)

    def _checked_select(self) -> str:
        """Return SQL of the rows, each with a list of the columns that are not UTF-8.

        DuckDB replaces or leaves out bytes that are not UTF-8; texts that differ then have some.
        """
        indexes, width = self._indexes, self._width
        invalid = ", ".join(f"#{at + 1} IS DISTINCT FROM #{at + 1 + width}" for at in indexes)
        replaced, without = (
            _from_parquet(self._path, f"utf8_validation = '{way}'") for way in ("replace", "ignore")
        )
        return (
            f"SELECT {', '.join(self._expressions)}, [{invalid}]"
            f" FROM ({replaced}) POSITIONAL JOIN ({without})"
        )

    def _unreadable(self, item: Item, invalid: list[bool]) -> Unreadable:
        """Return a row some of whose columns are not UTF-8."""
        assert isinstance(item, dict)
        columns = tuple(name for name, bad in zip(self._names, invalid, strict=True) if bad)
        rest = {name: value for name, value in item.items() if name not in columns}
        raw = msgspec.json.encode(item)
        return Unreadable(f"not UTF-8: {', '.join(columns)}", raw, rest, columns)

    def _prepare_parquet(self, source: FileSource) -> None:
        # The names as the file has them: DuckDB renames those that differ in case only.
        if isinstance(source.path, RemoteFile):
            path = serve_file(self._connection, source.path)
        else:
            path = file_literal(source.path)
        schema = self._run(
            lambda: self._connection.execute(
                "SELECT name, num_children, type = 'INT64' AND converted_type IS NULL"
                f" AND logical_type IS NULL FROM parquet_schema({path})"
            ).fetchall()
        )
        self.rows = self._run(
            lambda: self._connection.execute(
                f"SELECT num_rows FROM parquet_file_metadata({path})"
            ).fetchall()
        )[0][0]
        self._path = path
        self._describe_columns(_from_parquet(path), _top_level(schema))
        if not any(is_bare for _, _, is_bare in schema):
            return  # there is no duration; another read of the metadata of a remote file costs
        metadata = f"SELECT value FROM parquet_kv_metadata({path}) WHERE key = '{SCHEMA_KEY}'"
        for (value,) in self._run(lambda: self._connection.execute(metadata).fetchall()):
            for name, unit in duration_units(value).items():
                if name in self._names:
                    self._converted[name] = partial(iso_duration, unit=unit)

    def _prepare_sql(self, source: SqlSource) -> None:
        try:
            query = self._run(lambda: duck.single_query(self._connection, source.query))
        except SqlError as error:
            raise InputError(f"the sql of the input: {error}", hint=ONE_QUERY) from None
        self._describe_columns(f"FROM (\n{query}\n)", None)

    def _describe_columns(self, from_: str, names: list[str] | None) -> None:
        """Find the columns, and how each becomes JSON."""
        described = self._run(lambda: self._connection.execute(f"DESCRIBE {from_}").fetchall())
        types = [str(column[1]) for column in described]
        self._names = names or [str(column[0]) for column in described]
        twice = {name for name in self._names if self._names.count(name) > 1}
        if twice:
            raise InputError(
                f"two columns have the name {sorted(twice)[0]!r}",
                hint="rename one of them, in SQL by AS",
            )
        kinds = [kind.partition("(")[0] if "[" not in kind else "LIST" for kind in types]
        self._converted = {
            name: _json if kind == "JSON" else plain
            for name, kind in zip(self._names, kinds, strict=True)
            if kind not in _AS_THEY_ARE and kind not in _IN_SQL
        }
        indexes: Sequence[int] = range(len(kinds))
        if self._columns is not None:
            # A partition's columns are in no file, and whoever needs one reads all of the others.
            indexes = self._columns.of(self._names) or indexes
        self._names = [self._names[index] for index in indexes]
        self._converted = {
            name: convert for name, convert in self._converted.items() if name in self._names
        }
        self._indexes, self._width = indexes, len(kinds)
        self._expressions = [
            _expression(types[index], kinds[index]).format(f"#{index + 1}") for index in indexes
        ]
        self._select = f"SELECT {', '.join(self._expressions)} {from_}"

    def _run(self, call: Callable[[], Any]) -> Any:
        import duckdb

        try:
            return call()
        except duckdb.Error as error:
            source = self._source
            at = Position(source.path) if isinstance(source, FileSource) else None
            if at is None:
                raise InputError(f"the sql of the input: {error}") from error
            # DuckDB's words name the file and the kind of its own error, which says no more.
            message = str(error).replace(f" '{at.file}'", "").removeprefix("Invalid Input Error: ")
            if _NOT_UTF8 in message:
                raise _InvalidText(message, at=at) from error
            hint = "is it Parquet, and whole? copy or make it again"
            if match := _REMOTE_ERROR.match(message):
                message, hint = message[match.end() :], ""
            raise InputError(
                f"the Parquet file cannot be read: {message}", hint=hint, at=at
            ) from error


def _from_parquet(path: str, *options: str) -> str:
    return f"FROM read_parquet({', '.join((path, 'hive_partitioning = false', *options))})"


def _expression(type_: str, kind: str) -> str:
    """Return SQL of a column, with ``{0}`` in place of its name.

    Single-precision numbers become the shortest double: 1.1 is not 1.100000023841858.
    """
    if _FLOATS.fullmatch(type_):
        texts, doubles = (type_.replace("FLOAT", to) for to in ("VARCHAR", "DOUBLE"))
        return f"CAST(CAST({{0}} AS {texts}) AS {doubles})"
    return _IN_SQL.get(kind, "{0}")


def partition_of(name: str) -> dict[str, Json]:
    """Return the hive partition columns in a path such as ``year=2024/month=1/a.parquet``.

    Whole numbers are numbers, other values text, as is ``007``.
    """
    columns: dict[str, Json] = {}
    for folder in name.split("/")[:-1]:
        key, equals, text = folder.partition("=")
        if not key or not equals:
            continue
        value = unquote(text)
        is_integer = _WHOLE.fullmatch(value)
        columns[unquote(key)] = None if value == _NO_VALUE else int(value) if is_integer else value
    return columns


def plain(value: Any) -> Json:
    """Return a Python value from DuckDB as JSON.

    Dates and times become ISO text; decimals with decimal places the text of their digits; bytes
    text where they are UTF-8, else base64; NaN and infinities text.
    """
    convert = _CONVERT.get(type(value))
    return value if convert is None else convert(value)


def _json(text: str | None) -> Json:
    """Return the value of a column of DuckDB's type JSON, which comes as text."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


_CONVERT: dict[type, Callable[[Any], Json]] = {
    float: float_or_text,
    Decimal: decimal_value,
    bytes: bytes_text,
    bytearray: lambda value: bytes_text(bytes(value)),
    memoryview: lambda value: bytes_text(bytes(value)),
    list: lambda value: [plain(item) for item in value],
    tuple: lambda value: [plain(item) for item in value],
    dict: lambda value: {str(plain(name)): plain(item) for name, item in value.items()},
    str: lambda value: value,
    int: lambda value: value,
    bool: lambda value: value,
    type(None): lambda value: value,
    datetime: datetime.isoformat,
    date: date.isoformat,
    time: time.isoformat,
    timedelta: str,
}


def _top_level(schema: list[tuple[str, int | None, bool | None]]) -> list[str]:
    """Return names of the columns, from a tree of columns written out depth first, root first."""
    names: list[str] = []
    at = 1
    for _ in range(schema[0][1] or 0):
        names.append(schema[at][0])
        open_ = 1
        while open_:
            open_ += (schema[at][1] or 0) - 1
            at += 1
    return names


SCHEMA_KEY = "ARROW:schema"
"""The name of Arrow's schema in the metadata of a Parquet file."""

_UNITS = ("s", "ms", "us", "ns")
_DURATION = 18
_MARKER = b"\xff\xff\xff\xff"


def duration_units(schema: bytes) -> dict[str, str]:
    """Return the units (``s``, ``ms``, ``us``, ``ns``) of the top-level durations, by column.

    Empty for a text that is no schema of Arrow.

    Args:
        schema: the value of :data:`SCHEMA_KEY`.
    """
    try:
        message = base64.b64decode(schema)
        buffer = _Flatbuffer(message[8:] if message.startswith(_MARKER) else message[4:])
        header = buffer.child(buffer.root(), 2)
        fields = [] if header is None else buffer.tables(header, 1)
        return {
            buffer.text(field, 0): _UNITS[_unit(buffer, field)]
            for field in fields
            if buffer.number(field, 2, "<B", 0) == _DURATION
        }
    except (ValueError, struct.error, IndexError):
        return {}


def iso_duration(count: int | None, unit: str) -> str | None:
    """Return a duration as ISO 8601 writes it, such as ``PT1M1.5S``."""
    if count is None:
        return None
    digits = 3 * _UNITS.index(unit)
    seconds, fraction = divmod(abs(count), 10**digits)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    decimals = f".{fraction:0{digits}}".rstrip("0") if fraction else ""
    text = f"{hours}H" * bool(hours) + f"{minutes}M" * bool(minutes)
    if seconds or decimals or not text:
        text += f"{seconds}{decimals}S"
    return "-" * (count < 0) + "PT" + text


def _unit(buffer: _Flatbuffer, field: int) -> int:
    duration = buffer.child(field, 3)
    return 1 if duration is None else buffer.number(duration, 0, "<h", 1)


class _Flatbuffer:
    """The tables of a FlatBuffers message, each known by its offset."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def root(self) -> int:
        """Return the offset of the root table."""
        return self._read("<I", 0)

    def number(self, table: int, field: int, form: str, default: int) -> int:
        """Return a number of a table."""
        offset = self._offset(table, field)
        return default if offset is None else self._read(form, offset)

    def child(self, table: int, field: int) -> int | None:
        """Return the offset of what a field of a table refers to; None where it has none."""
        offset = self._offset(table, field)
        return None if offset is None else offset + self._read("<I", offset)

    def tables(self, table: int, field: int) -> list[int]:
        """Return the offsets of the tables in a vector."""
        start = self.child(table, field)
        if start is None:
            return []
        slots = range(start + 4, start + 4 + 4 * self._read("<I", start), 4)
        return [slot + self._read("<I", slot) for slot in slots]

    def text(self, table: int, field: int) -> str:
        """Return a text of a table."""
        start = self.child(table, field)
        if start is None:
            return ""
        return self._data[start + 4 : start + 4 + self._read("<I", start)].decode()

    def _offset(self, table: int, field: int) -> int | None:
        fields = table - self._read("<i", table)
        slot = 4 + 2 * field
        offset = self._read("<H", fields + slot) if slot < self._read("<H", fields) else 0
        return table + offset if offset else None

    def _read(self, form: str, offset: int) -> int:
        if offset < 0:
            raise ValueError("an offset before the message")
        (number,) = struct.unpack_from(form, self._data, offset)
        return int(number)
