"""Extraction of the JSON value from an answer.

An answer is scanned once from left to right. At the top level three things count: an opening
bracket (with everything up to its closing bracket), a code fence and a reasoning mark. A bracket
that never closes ends the search without a value, since a value inside a cut answer is not the
answer. A unit that is not JSON is not searched for smaller values either. Time is linear.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from bagent.answers.reasoning import OPEN, STRAY, closing
from bagent.text.unicode import MAX_DEPTH, clean_json, clean_text, nested_deeper
from bagent.types import Json


class NotJson:
    """The type of ``NOT_JSON``, which says that a text is not JSON (None is a JSON value)."""


NOT_JSON: Final = NotJson()

_decoder = msgspec.json.Decoder()
_lenient = json.JSONDecoder(strict=False)

_STRING_OR_COMMA = re.compile(
    r'[",](?:(?<=")[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|(?<=,)\s*+(?=[}\]]))', re.DOTALL
)


def decode_strict(text: str) -> Json | NotJson:
    """Return the value of ``text``, which must be JSON (RFC 8259) and no deeper than MAX_DEPTH.

    ``NOT_JSON`` for anything else, also for numbers beyond a double and lone surrogates.
    """
    try:
        value = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return NOT_JSON
    # The count of opening brackets bounds the depth and costs next to nothing.
    if text.count("[") + text.count("{") > MAX_DEPTH and nested_deeper(value):
        return NOT_JSON
    return value


def decode_lenient(text: str) -> Json | NotJson:
    r"""Return the value of almost-JSON ``text``, an object, array or string; else ``NOT_JSON``.

    Taken beyond JSON: trailing commas, raw control characters in strings, and what cannot be
    written back as JSON, which becomes text: ``NaN``, ``Infinity``, numbers beyond a double
    (``"Infinity"``), lone surrogates (visible ``\udXXX``).
    """
    for candidate in (text, _without_trailing_commas(text)):
        try:
            value = _lenient.decode(candidate)
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict | list | str) or nested_deeper(value):
            return NOT_JSON
        return clean_json(value)
    return NOT_JSON


def _without_trailing_commas(text: str) -> str:
    def keep(match: re.Match[str]) -> str:
        token = match.group()
        if token[0] == '"' or not _after_value(text, match.start()):
            return token
        return ""

    return _STRING_OR_COMMA.sub(keep, text)


def _after_value(text: str, end: int) -> bool:
    """Return whether a value ends before ``end``; ``[,]`` has none to drop a comma after."""
    while end and text[end - 1] in " \t\r\n":
        end -= 1
    return bool(end) and text[end - 1] not in "[{,:"


def malformed_at(text: str) -> str:
    """Describe why ``text`` is not JSON, with line and column."""
    try:
        _lenient.decode(text)
    except json.JSONDecodeError as error:
        return f"{error.msg} at line {error.lineno} column {error.colno}"
    except RecursionError:
        pass
    except ValueError as error:
        return str(error)
    return f"nested deeper than {MAX_DEPTH} levels"


How = Literal["plain", "fence", "think", "prose", "repaired"]
"""How a value was found: it was the whole text; it was in a code fence; it was the whole
text after thinking; it was among other text; or it could be read only after a mild repair."""

Accept = Callable[[Json], bool]
"""Returns whether a value is acceptable."""

_MAX_CANDIDATES = 1000
_MAX_UNITS = 100_000
_MAX_RESTARTS = 3
_BLANK = "\ufeff \t\r\n"
_JSON_TAGS = frozenset({"", "json", "json5", "jsonc", "jsonl", "ndjson", "geojson"})
_MARK = re.compile(r"[<{\[◁`~]")  # what an event begins with; ten times faster to search for
_EVENT = re.compile(
    rf"(?P<open>{OPEN})|(?P<stray>{STRAY})"
    r"|(?P<bracket>[{\[])|(?P<fence>`{3,}|~{3,})(?P<tag>[\w+.-]*)",
    re.IGNORECASE,
)
# An unterminated string runs to the end of the text; else each quote in it would be tried again.
# Patterns begin with a character class because the engine skips fast to those only.
_TOKEN = re.compile(r'["{}\[\]](?:(?<=")[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z))?', re.DOTALL)
_STRING = re.compile(r'\s*+("[^"\\]*+(?:\\.[^"\\]*+)*+("?))', re.DOTALL)
# A fence line, or a closing thinking mark at a line's start or end: a raw line break beside such
# a word is never inside valid JSON, so neither is the word.
_NOT_IN_JSON = re.compile(
    r"\n[ \t]*+(?:`{3,}|~{3,})[\w+.-]*[ \t]*+(?:\r?\n|\Z)"
    rf"|\n[ \t]*+(?:{STRAY})|(?:{STRAY})[ \t]*+\r?\n"
)
_FENCED_SCALAR = re.compile(r"\s*+([-0-9tfn][^\n`~]{0,400}+)\s*+(?:`{3,}|~{3,})")
_FENCED_STRING_END = re.compile(r"\s*+(?:`{3,}|~{3,}|\Z)")


class Extracted(msgspec.Struct, frozen=True):
    """A JSON value found in an answer.

    ``raw`` is the value as compact JSON, valid UTF-8, on one line. ``accepted`` is what the
    ``accept`` callable said, None where there was none.
    """

    value: Json
    raw: bytes
    how: How
    accepted: bool | None = None


class _Span(msgspec.Struct, frozen=True):
    start: int
    end: int
    fenced: bool


def extract_json(text: str, accept: Accept | None = None) -> Extracted | None:
    """Return the JSON value that ``text`` gives as its answer, or None.

    The whole text, else the whole text after thinking, else a value in a code fence (the last
    that ``accept`` takes, else the last), else an object or array in prose (the last that
    ``accept`` takes, else the first). Closed thinking blocks are passed over; text that ends
    inside one gives None. Nothing is ever completed: text that breaks off inside a value gives
    None. Repairs are those of ``decode_lenient`` and a byte-order mark.
    """
    value = decode_strict(text)
    if value is not NOT_JSON:
        return _extracted(value, "plain", accept)
    scan = _Scan(text)
    if not scan.run():
        return None
    return _entire_answer(scan, accept) or _best_span(scan, accept)


def why_not_json(text: str) -> str:
    """Describe on one line why ``extract_json`` found nothing."""
    scan = _Scan(text)
    if not scan.run():
        return scan.problem
    spans = list(scan.spans)
    if spans:
        longest = max(spans, key=lambda span: span.end - span.start)
        return f"not JSON: {malformed_at(text[longest.start : longest.end])}"
    begins = " ".join(clean_text(text[scan.answer_start :][:80]).split())
    return f'no JSON in the answer, which begins "{begins}"'


class _Scan:
    """A single pass over a text that collects spans of possible JSON values."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.first: _Span | None = None
        self.spans: deque[_Span] = deque(maxlen=_MAX_CANDIDATES)
        self.answer_start = 0
        self.problem = ""
        self._fence: str | None = None
        self._restarts = 0
        self._units = 0

    def run(self) -> bool:
        """Scan; return False where the text breaks off (``problem`` says in what)."""
        text = self.text
        position = self._skip_string(1 if text.startswith("\ufeff") else 0)
        while position >= 0:
            mark = _MARK.search(text, position)
            if mark is None:
                return True
            match = _EVENT.match(text, mark.start())
            if match is None:
                position = mark.end()
            elif match["bracket"]:
                position = self._scan_unit(match.start())
            elif match["fence"]:
                position = self._toggle_fence(match)
            else:
                position = self._skip_reasoning(match)
        return False

    def _scan_unit(self, start: int) -> int:
        """Add the unit that opens at ``start``; return the next offset, or -1 to stop."""
        depth = 0
        for token in _TOKEN.finditer(self.text, start):
            character = token.group()
            if character in "{[":
                depth += 1
                if depth > MAX_DEPTH:
                    self.problem = f"the answer is nested deeper than {MAX_DEPTH} levels"
                    return -1
            elif character in "}]":
                depth -= 1
                if depth == 0:
                    return self._add(start, token.end())
        proof = _NOT_IN_JSON.search(self.text, start)
        self._restarts += 1
        if proof is not None and self._restarts <= _MAX_RESTARTS:
            return proof.start()
        self.problem = "the answer breaks off inside an object or array"
        return -1

    def _add(self, start: int, end: int) -> int:
        span = _Span(start, end, self._fence in _JSON_TAGS)
        self.first = self.first or span
        self.spans.append(span)
        self._units += 1
        if self._units > _MAX_UNITS:
            self.problem = f"more than {_MAX_UNITS} objects and arrays in the answer"
            return -1
        return end

    def _skip_string(self, start: int) -> int:
        """Skip a JSON string at ``start``, if there is one; return -1 where it never ends."""
        match = _STRING.match(self.text, start)
        if match is None:
            return start
        if not match[2]:
            self.problem = "the answer breaks off inside a string"
            return -1
        return match.end()

    def _toggle_fence(self, match: re.Match[str]) -> int:
        if self._fence is not None:
            self._fence = None
            return match.end()
        self._fence = match["tag"].lower()
        if self._fence not in _JSON_TAGS:
            return match.end()
        scalar = _FENCED_SCALAR.match(self.text, match.end())
        if scalar is not None:
            return self._add(scalar.start(1), scalar.end(1))
        end = self._skip_string(match.end())
        if end > match.end() and _FENCED_STRING_END.match(self.text, end):
            return self._add(match.end(), end)
        return end

    def _skip_reasoning(self, match: re.Match[str]) -> int:
        """Skip reasoning; a closing mark alone makes everything before it reasoning."""
        end: re.Match[str] | None = match
        if match["open"]:
            end = closing(match["open"], self.text, match.end())
            if end is None:
                self.problem = "the answer breaks off inside its thinking"
                return -1
        else:
            self.first = None
            self.spans.clear()
        assert end is not None
        self.answer_start = end.end()
        return self._skip_string(end.end())


def _entire_answer(scan: _Scan, accept: Accept | None) -> Extracted | None:
    """Return the whole answer, less thinking, a byte-order mark and blanks."""
    text = scan.text[scan.answer_start :].strip(_BLANK)
    value = decode_strict(text)
    if value is not NOT_JSON:
        return _extracted(value, "think" if scan.answer_start else "repaired", accept)
    if text.startswith('"'):
        value = decode_lenient(text)
    return None if value is NOT_JSON else _extracted(value, "repaired", accept)


def _best_span(scan: _Scan, accept: Accept | None) -> Extracted | None:
    last_fenced: Extracted | None = None
    for span in reversed(scan.spans):
        extracted = _read(scan.text, span, accept) if span.fenced else None
        if extracted is not None:
            if accept is None or extracted.accepted:
                return extracted
            last_fenced = last_fenced or extracted
    loose = [span for span in scan.spans if not span.fenced]
    for span in reversed(loose if accept else []):
        extracted = _read(scan.text, span, accept)
        if extracted is not None and extracted.accepted:
            return extracted
    if last_fenced is not None:
        return last_fenced
    for span in [scan.first, *loose] if scan.first else []:
        extracted = _read(scan.text, span, accept)
        if extracted is not None:
            return extracted
    return None


def _read(text: str, span: _Span, accept: Accept | None) -> Extracted | None:
    piece = text[span.start : span.end]
    how: How = "fence" if span.fenced else "prose"
    value = decode_strict(piece)
    if value is NOT_JSON:
        value, how = decode_lenient(piece), "repaired"
    return None if value is NOT_JSON else _extracted(value, how, accept)


def _extracted(value: Json, how: How, accept: Accept | None) -> Extracted:
    return Extracted(
        value, msgspec.json.encode(value), how, None if accept is None else accept(value)
    )
