"""Concatenation of Parquet files with equal columns, without decoding their row groups.

A Parquet file is a sequence of row groups and a footer with their offsets
(https://parquet.apache.org/docs/file-format/). The footer is a Thrift structure in the compact
protocol (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md). It is
decoded here, its offsets are shifted, and it is encoded again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_MAGIC = b"PAR1"
_PIECE = 1 << 20

# Types of the compact protocol. A boolean field has its value in its type; in a list, in a byte.
_STOP, _I16, _I32, _I64, _BINARY, _LIST, _STRUCT = 0, 4, 5, 6, 8, 9, 12
_BOOLEAN = (1, 2)
_FIXED = {1: 1, 2: 1, 3: 1, 7: 8}
"""Types with a fixed number of bytes, which are copied."""

# Fields of parquet.thrift.
_NEEDED = _SCHEMA, _ROWS, _GROUPS = 2, 3, 4
_COLUMNS, _GROUP_OFFSET, _ORDINAL = 1, 5, 7
_CHUNK_OFFSET, _META, _OFFSET_INDEX, _COLUMN_INDEX = 2, 3, 4, 6
_CONVERTED, _LOGICAL = 6, 10
_UTF8, _JSON, _STRING = 0, 19, 1
_DATA_PAGE, _INDEX_PAGE, _DICTIONARY_PAGE, _BLOOM = 9, 10, 11, 14


class Field(NamedTuple):
    """A typed value of a structure."""

    kind: int
    value: Any


Struct = dict[int, Field]
"""Fields of a Thrift structure by number. A list is (type of its items, items)."""


class ParquetConcat:
    """A Parquet file to which complete files are appended.

    Args:
        path: the file, which is incomplete until :meth:`finish`.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._file.write(_MAGIC)
        self._footer: Struct = {}
        self._groups: list[bytes] = []

    def add(self, part: Path) -> int:
        """Append a Parquet file with the columns of the first one; return its number of rows.

        Raises:
            ValueError: it is not a Parquet file, or has other columns.
        """
        with part.open("rb") as source:
            footer, end = _read_footer(source)
            moved = self._file.tell() - len(_MAGIC)
            source.seek(len(_MAGIC))
            _copy(source, self._file, end - len(_MAGIC))
        rows: int = footer[_ROWS].value
        for group in footer[_GROUPS].value[1]:
            _move_group(group, moved, len(self._groups))
            out = bytearray()
            _write_struct(group, out)
            self._groups.append(bytes(out))
        if not self._footer:
            self._footer = footer
        elif footer[_SCHEMA] != self._footer[_SCHEMA]:
            raise ValueError(f"{part} has other columns than the parts before it")
        else:
            self._footer[_ROWS] = Field(_I64, rows + self._footer[_ROWS].value)
        return rows

    def finish(self) -> None:
        """Write the footer and close the file, which must have at least one part."""
        for element in self._footer[_SCHEMA].value[1]:
            _declare_json_as_text(element)
        self._footer[_GROUPS] = Field(_LIST, (_STRUCT, self._groups))
        out = bytearray()
        _write_struct(self._footer, out)
        self._file.write(out + len(out).to_bytes(4, "little") + _MAGIC)
        self._file.close()

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()


def _declare_json_as_text(element: Struct) -> None:
    """Declare a column of JSON as text, since other readers treat Parquet's JSON as bytes."""
    if element.get(_CONVERTED) == Field(_I32, _JSON):
        element[_CONVERTED] = Field(_I32, _UTF8)
        element[_LOGICAL] = Field(_STRUCT, {_STRING: Field(_STRUCT, {})})


def count_rows(path: Path) -> int:
    """Return the number of rows of a Parquet file.

    Raises:
        ValueError: it is not a Parquet file.
    """
    with path.open("rb") as source:
        rows: int = _read_footer(source)[0][_ROWS].value
    return rows


def _read_footer(source: BinaryIO) -> tuple[Struct, int]:
    """Return the footer of a Parquet file and its offset."""
    size = source.seek(0, os.SEEK_END)
    source.seek(max(0, size - 8))
    tail = source.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or length > size - 12:
        raise ValueError("not a Parquet file")
    source.seek(size - 8 - length)
    try:
        footer = _Reader(source.read(length)).struct()
    except (IndexError, RecursionError):
        raise ValueError("the footer of a Parquet file is damaged") from None
    if [footer[n].kind for n in _NEEDED if n in footer] != [_LIST, _I64, _LIST]:
        raise ValueError("the footer of a Parquet file is damaged")
    return footer, size - 8 - length


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size > 0 and (piece := source.read(min(size, _PIECE))):
        target.write(piece)
        size -= len(piece)


def _move_group(group: Struct, moved: int, number: int) -> None:
    """Shift the offsets in a row group by ``moved`` bytes, and set its number."""
    _move(group, (_GROUP_OFFSET,), moved)
    if _ORDINAL in group:  # 16 bits; optional, so larger numbers are left out
        group[_ORDINAL] = Field(_I16, number)
        if number > 0x7FFF:
            del group[_ORDINAL]
    for chunk in group[_COLUMNS].value[1]:
        _move(chunk, (_CHUNK_OFFSET, _OFFSET_INDEX, _COLUMN_INDEX), moved)
        _move(chunk[_META].value, (_DATA_PAGE, _INDEX_PAGE, _DICTIONARY_PAGE, _BLOOM), moved)


def _move(struct: Struct, numbers: tuple[int, ...], moved: int) -> None:
    for number in numbers:
        field = struct.get(number)
        if field is not None and field.value > 0:  # 0 means none
            struct[number] = Field(field.kind, field.value + moved)


class _Reader:
    """Decodes values of the compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _read(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._data):
            raise IndexError(self._at)
        return self._data[self._at - size : self._at]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)

    def struct(self) -> Struct:
        """Decode a structure."""
        fields: Struct = {}
        number = 0
        while (head := self._read(1)[0]) != _STOP:
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            fields[number] = Field(kind, None if kind in _BOOLEAN else self._value(kind))
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (_I16, _I32, _I64):
            return self._signed()
        if kind == _BINARY:
            return self._read(self._unsigned())
        if kind == _STRUCT:
            return self.struct()
        if kind == _LIST:
            head = self._read(1)[0]
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            return head & 15, [self._value(head & 15) for _ in range(count)]
        if kind in _FIXED:
            return self._read(_FIXED[kind])
        raise ValueError(f"a value of type {kind} in the footer of a Parquet file")


def _write_unsigned(value: int, out: bytearray) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _write_signed(value: int, out: bytearray) -> None:
    _write_unsigned(value << 1 if value >= 0 else ~value << 1 | 1, out)


def _write_struct(fields: Struct, out: bytearray) -> None:
    before = 0
    for number, (kind, value) in sorted(fields.items()):
        step = number - before
        if 0 < step < 16:
            out.append(step << 4 | kind)
        else:
            out.append(kind)
            _write_signed(number, out)
        before = number
        if kind not in _BOOLEAN:
            _write(kind, value, out)
    out.append(_STOP)


def _write(kind: int, value: Any, out: bytearray) -> None:
    if isinstance(value, bytes) and kind != _BINARY:  # fixed size, or an encoded structure
        out += value
    elif kind == _BINARY:
        _write_unsigned(len(value), out)
        out += value
    elif kind == _STRUCT:
        _write_struct(value, out)
    elif kind == _LIST:
        inner, items = value
        if len(items) < 15:
            out.append(len(items) << 4 | inner)
        else:
            out.append(15 << 4 | inner)
            _write_unsigned(len(items), out)
        for item in items:
            _write(inner, item, out)
    else:
        _write_signed(value, out)
