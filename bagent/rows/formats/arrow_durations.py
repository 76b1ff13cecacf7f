"""Durations in Parquet files of Arrow.

Parquet has no type of durations: Arrow writes whole numbers, and its own schema, a base64 text in
the metadata of the file, has the units.
"""

from __future__ import annotations

import base64
import struct

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
