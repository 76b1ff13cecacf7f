"""JSON text to the data of a row.

msgspec decodes nearly all rows; what it refuses is decoded again with the standard library, which
accepts lone surrogates, NaN and infinities. NaN, Infinity and -Infinity (also numbers too large for
a double) become text. A lone surrogate in a name becomes the visible text ``\\udXXX``; in a value
it stays, since senders and stores replace it. The last of two equal names in an object counts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from bagent.text.unicode import clean_text, float_or_text
from bagent.types import Json


class Unreadable(NamedTuple):
    """What could not be read as a row, at least not as a whole."""

    error: str
    """Why."""
    raw: bytes
    row: dict[str, Any] | None = None
    """The columns that could be read; None where that is unknown."""
    columns: tuple[str, ...] = ()
    """The columns that could not be read."""


Item = dict[str, Any] | Unreadable
"""One row before it has a number: its data, or why there is none."""


class Chunk(NamedTuple):
    """Some rows of one source before they have a number: lists of the same length.

    ``lines`` as in :class:`bagent.types.Row`. ``raws`` are the bytes that the items were read
    from, None where a format has none.
    """

    source: str
    lines: Sequence[int]
    items: list[Item]
    raws: list[bytes] | None = None


TOO_DEEP = "the JSON is nested too deep"

_UNREADABLE = b"!bad_input "
"""Prefix of a line that says why a row of another program could not be written."""

_KINDS = {list: "an array", bool: "a boolean", type(None): "null"}

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def is_batch_row(data: dict[str, Any]) -> bool:
    """Return whether a row is a line of an OpenAI batch file: ``custom_id, method, url, body``."""
    return (
        isinstance(data.get("body"), dict)
        and isinstance(data.get("custom_id"), str)
        and isinstance(data.get("method"), str)
        and isinstance(data.get("url"), str)
    )


def decode_lines(raws: list[bytes]) -> list[Item | None]:
    """Decode JSON texts; a blank one gives None, a broken one :class:`Unreadable`."""
    try:
        return [_decode(raw) for raw in raws]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [decode_line(raw) for raw in raws]


def decode_line(raw: bytes) -> Item | None:
    """As :func:`decode_lines`, for one JSON text."""
    if not raw or raw.isspace():
        return None
    try:
        data: dict[str, Any] = _decode(raw)
    except RecursionError:
        return Unreadable(TOO_DEEP, raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_leniently(raw)
    return data


def unreadable_line(
    error: str, row: Mapping[str, Json] | None = None, columns: Sequence[str] = ()
) -> bytes:
    """Return a line that :func:`decode_line` reads as a row that could not be written.

    Arguments as in :class:`Unreadable`.
    """
    reason = {"error": error, "row": row, "columns": columns}
    return _UNREADABLE + json.dumps(reason).encode()


def decimal_value(value: Decimal) -> Json:
    """Convert a decimal to an int if it has no decimal places, else to the text of its digits.

    A double would lose digits: 1.10 is a price, 1.1 is not the same text in a prompt.
    """
    if value.is_finite() and value.as_tuple().exponent == 0:
        return int(value)
    return f"{value:f}"


def bytes_text(value: bytes) -> str:
    """Return bytes as text where they are UTF-8, else in base64."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _decode_leniently(raw: bytes) -> Item | None:
    if raw.startswith(_UNREADABLE):
        try:
            reason: dict[str, Any] = _clean(json.loads(raw.removeprefix(_UNREADABLE)))
            row, columns = reason["row"], tuple(map(str, reason["columns"]))
            row = row if isinstance(row, dict) else None
            return Unreadable(clean_text(str(reason["error"])), raw, row, columns)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # written by somebody else
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        return Unreadable(f"not UTF-8: byte 0x{byte:02x} (column {error.start + 1})", raw)
    text = text.removeprefix("\ufeff")
    if not text.strip():
        return None
    try:
        value = _LENIENT.decode(text)
        if not isinstance(value, dict):
            quoted = text.lstrip().startswith('"')  # NaN came out as text too, but is a number
            kind = "a string" if quoted else _KINDS.get(type(value), "a number")
            return Unreadable(f"not a JSON object but {kind}", raw)
        data: dict[str, Any] = _clean(value)
    except json.JSONDecodeError as error:
        return Unreadable(f"malformed JSON: {_describe_error(error)}", raw)
    except RecursionError:
        return Unreadable(TOO_DEEP, raw)
    except ValueError as error:  # an integer of more digits than Python converts
        return Unreadable(f"malformed JSON: {error}", raw)
    return data


def _describe_error(error: json.JSONDecodeError) -> str:
    if error.msg == "Extra data" and "\r" in error.doc[: error.pos]:
        return "lines end in CR alone (write them with LF)"
    position = f"column {error.colno}" if error.lineno == 1 else f"its line {error.lineno}"
    return f"{error.msg} ({position})"


_LENIENT = json.JSONDecoder(parse_float=lambda text: float_or_text(float(text)), parse_constant=str)


def _clean(value: Any) -> Any:
    """Return the same value with every name made visible."""
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(name): _clean(item) for name, item in value.items()}
    return value
