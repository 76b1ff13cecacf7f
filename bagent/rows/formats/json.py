"""JSON: the lines and elements of files, one for each row, and the data of a row.

A .json file is not parsed as a whole: a small scanner finds where each element ends, so that memory
follows the largest element and a broken one does not spoil the others.

msgspec decodes nearly all rows; what it refuses is decoded again with the standard library, which
accepts lone surrogates, NaN and infinities. NaN, Infinity and -Infinity (also numbers too large for
a double) become text. A lone surrogate in a name becomes the visible text ``\\udXXX``; in a value
it stays, since senders and stores replace it. The last of two equal names in an object counts.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from bagent.errors import InputError, Position
from bagent.remote import InputFile
from bagent.text.unicode import clean_text, float_or_text
from bagent.types import Json

ROWS = 512
"""Rows handed on at once, at most."""

LONGEST = 64 << 20
"""Bytes of one row, unpacked, at most: what is larger is a file without line ends, or an archive of
a few bytes that is to fill the memory, but no row that a model takes."""

# Runs without structure, whole texts included where they hold no escape; commas matter only
# between elements. Possessive, so that nothing is kept for going back.
_BETWEEN = re.compile(rb'(?:[^"\[\]{},]++|"[^"\\]*+")*+')
_INSIDE = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+")*+')
_IN_TEXT = re.compile(rb'["\\]')
_BRACKET_ALONE = re.compile(rb"^\{\r?$", re.MULTILINE)
_QUOTE, _COMMA = ord('"'), ord(",")
_OPENER = {ord("}"): ord("{"), ord("]"): ord("[")}
_OPEN = frozenset(_OPENER.values())

CUT_OFF = "the text ends inside its array: it is cut off"

Element = tuple[int, bytes]
"""Physical line (from 1) and bytes of one element; no bytes: a comma with nothing before it."""


class LineSplitter:
    """Splits bytes into lines without their line feeds, fed piece by piece.

    Args:
        name: the file, for errors.
        longest: bytes of one line, at most.
    """

    def __init__(self, name: str | InputFile, longest: int = LONGEST) -> None:
        self._name = name
        self._longest = longest
        self._parts: list[bytes] = []  # of the line that has not ended yet
        self._size = 0
        self._line = 1

    def feed(self, block: bytes) -> list[bytes]:
        """Return the lines that end in this block.

        Raises:
            InputError: a line is longer than that.
        """
        lines = block.split(b"\n")
        tail = lines.pop()
        if lines:
            if self._parts:
                lines[0] = b"".join(self._parts) + lines[0]
                self._parts, self._size = [], 0
            self._line += len(lines)
        if tail:
            self._parts.append(tail)
            self._size += len(tail)
            if self._size > self._longest:
                raise too_long(self._name, self._line)
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line, where it has no line feed."""
        return [b"".join(self._parts)] if self._parts else []


def split_lines(blocks: Iterable[bytes], name: str | InputFile) -> Iterator[list[bytes]]:
    """Yield the lines of each block, as :class:`LineSplitter` cuts them."""
    splitter = LineSplitter(name)
    for block in blocks:
        yield splitter.feed(block)
    yield splitter.finish()


def too_long(name: str | InputFile, line: int) -> InputError:
    """Return the error for one row of more than :data:`LONGEST` bytes."""
    return InputError(
        f"one row is longer than {LONGEST >> 20} MiB",
        hint="is this JSON with one row a line?",
        at=Position(name, line),
    )


def line_chunks(source: str, lists: Iterable[list[bytes]], line: int = 1) -> Iterator[Chunk]:
    """Lines as chunks of at most :data:`ROWS` rows.

    Blank lines are not in the chunks but do count as lines; a chunk may therefore be empty.

    Args:
        source: name for the rows.
        lists: consecutive lines.
        line: physical number of the first.
    """
    for lines in lists:
        for start in range(0, len(lines), ROWS):
            yield chunk_of(source, lines[start : start + ROWS], line + start)
        line += len(lines)


def chunk_of(source: str, raws: list[bytes], line: int) -> Chunk:
    """Consecutive lines, from physical line ``line`` on, as one chunk without the blank ones."""
    return without_blanks(Chunk(source, range(line, line + len(raws)), [], raws))


def without_blanks(chunk: Chunk) -> Chunk:
    """Return the chunk with its ``items`` decoded from its ``raws``, and without the blank ones."""
    raws = chunk.raws or []
    decoded = decode_lines(raws)
    items: list[Item] = [item for item in decoded if item is not None]
    if len(items) == len(raws):
        return chunk._replace(items=items)
    indexes = [at for at, item in enumerate(decoded) if item is not None]
    lines = chunk.lines
    return Chunk(chunk.source, [lines[at] for at in indexes], items, [raws[at] for at in indexes])


class ElementSplitter:
    """Splits JSON text into elements, fed piece by piece.

    Args:
        name: the file, for errors.
        array: the elements are those of an array (or of arrays one after the other);
            otherwise they are values one after the other.
        longest: bytes of one element, at most.
    """

    def __init__(self, name: str | InputFile, *, array: bool, longest: int = LONGEST) -> None:
        self._name = name
        self._longest = longest
        self._top = 1 if array else 0  # how many brackets are open around an element
        self._open = bytearray()
        self._in_text = False
        self._escaped = False
        self._parts: list[bytes] = []  # of the element that has not ended yet
        self._size = 0
        self.line = 1  # where it begins

    def feed(self, block: bytes) -> list[Element]:
        """Return the elements that end in this block.

        Raises:
            InputError: one element is longer than that.
        """
        elements: list[Element] = []
        at = start = 0
        while at < len(block):
            if self._in_text:
                at = self._skip_text(block, at)
                continue
            plain = _BETWEEN if len(self._open) == self._top else _INSIDE
            at = plain.match(block, at).end() + 1  # type: ignore[union-attr]
            if at > len(block):
                break
            byte = block[at - 1]
            if byte == _QUOTE:
                self._in_text = True
            elif self._ends_element(byte):
                end = at if self._top == 0 else at - 1
                self._emit(block[start:end], byte, elements)
                start = at
        self._parts.append(block[start:])
        self._size += len(block) - start
        if self._size > self._longest:
            raise too_long(self._name, self.line)
        return elements

    def finish(self) -> list[Element]:
        """Return what the text ends with: nothing, or bytes behind the last element."""
        elements: list[Element] = []
        self._emit(b"", 0, elements)
        return elements

    @property
    def cut_off(self) -> bool:
        """Whether the text so far ends inside an array."""
        return bool(self._top and self._open)

    def _skip_text(self, block: bytes, at: int) -> int:
        """Go on behind the next quote or escape inside a text."""
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _IN_TEXT.search(block, at)
        if match is None:
            return len(block)
        self._in_text = block[match.start()] != _QUOTE
        self._escaped = self._in_text
        return match.end()

    def _ends_element(self, byte: int) -> bool:
        """Follow one bracket or comma; whether an element ends with or before it."""
        brackets = self._open
        if byte == _COMMA:
            return self._top == 1 and len(brackets) == 1
        if byte in _OPEN:
            brackets.append(byte)
            return self._top == 1 and len(brackets) == 1  # text before the array
        # A bracket of the other kind left open inside a broken element closes with it.
        opener = brackets.rfind(_OPENER[byte])
        if opener < 0:
            return False
        del brackets[opener:]
        return not brackets

    def _emit(self, last: bytes, by: int, elements: list[Element]) -> None:
        raw = b"".join(self._parts) + last
        self._parts, self._size = [], 0
        text = raw.lstrip()
        line = self.line + raw.count(b"\n", 0, len(raw) - len(text))
        self.line += raw.count(b"\n")
        if text or by == _COMMA:
            elements.append((line, text.rstrip()))


def json_chunks(source: str, blocks: Iterable[bytes], name: str | InputFile) -> Iterator[Chunk]:
    """Yield the rows of a .json file, whichever of its forms it has."""
    blocks = iter(blocks)
    head = b""
    for block in blocks:
        head += block
        if head.strip():
            break
    blocks = chain([head], blocks)
    text = head.lstrip()
    if not text.startswith(b"[") and _is_lines(text):
        yield from line_chunks(source, split_lines(blocks, name))
        return
    elements = ElementSplitter(name, array=text.startswith(b"["))
    for block in blocks:
        yield from element_chunks(source, elements.feed(block))
    yield last_chunk(source, elements)


def last_chunk(source: str, elements: ElementSplitter) -> Chunk:
    """Return what is left at the end of the text; where it ends inside an array, one bad row."""
    trailing = elements.finish()
    if not elements.cut_off:
        return _chunk(source, trailing)
    line, raw = trailing[0] if trailing else (elements.line, b"[")
    return Chunk(source, [line], [Unreadable(CUT_OFF, raw)], [raw])


def element_chunks(source: str, elements: list[Element]) -> Iterator[Chunk]:
    """ElementSplitter as chunks of at most :data:`bagent.rows.formats.json.ROWS` rows."""
    for start in range(0, len(elements), ROWS):
        yield _chunk(source, elements[start : start + ROWS])


def _chunk(source: str, elements: list[Element]) -> Chunk:
    lines = [line for line, _ in elements]
    return without_blanks(Chunk(source, lines, [], [raw or b"," for _, raw in elements]))


def _is_lines(text: bytes) -> bool:
    """Return whether these are rows of one line each, as far as the first block tells."""
    line, feed, _ = text.partition(b"\n")
    if not feed:
        return False
    if text.startswith(b"{") and isinstance(decode_line(line), Unreadable):
        return False
    # An object laid out over several lines begins with a bracket on a line of its own.
    return not _BRACKET_ALONE.search(text)


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
