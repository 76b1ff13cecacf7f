"""Groups of equal errors.

Two errors are equal when their kind, their HTTP status and their text agree without what differs
from row to row: addresses, ids, numbers, quoted text.
"""

from __future__ import annotations

import functools
import re
from operator import attrgetter

import msgspec

from bagent.observe.formatting import name_of, visible
from bagent.observe.snapshot import ErrorGroup
from bagent.types import Outcome

MAX_GROUPS = 50
MAX_TEXT = 300
# More is normalised than compared, so that a longer number does not move the end of the text.
_NORMALISED = 600
_COMPARED = 200
_MAX_ENDPOINTS = 100
_REMEMBERED_TEXTS = 256
_SHORTEST_ID = 4
_LOCAL_KINDS = frozenset(
    {"bad_input", "template", "tool", "max_turns", "budget", "client_closed", "internal"}
)
"""Failures that did not happen at an endpoint, though one may have answered the row before."""

_TO_ZERO = str.maketrans("123456789", "000000000")

_HTTP_STATUS = re.compile(
    r"""(?:\bHTTP(?:/\d(?:\.\d)?)?|\b(?:HTTP|status|error)[ _]code|(?<!exit )\bstatus|"""
    r"""["']code["'])[\s:=]*([1-5]\d\d)(?![\w.])|^([45]\d\d)(?=:? (?-i:[A-Z])|$)""",
    re.IGNORECASE,
)

_DOUBLE = r'"(?:[^"\\]|\\.)*(?:"|\\?$)'
_SINGLE = r"'(?:[^'\\]|\\.)*(?:'(?!\w)|\\?$)"

_SAID = re.compile(
    r"""(["'])(message|msg|error|type|code|detail|reason)\1\s*:\s*"""
    r"""(?:"((?:[^"\\]|\\.)*)"?|'((?:[^'\\]|\\.)*)'?|(-?\d+|null|None))"""
)

# A validator begins with the value that it refuses: {"a": [1]} is not of type "array".
_VALUE = re.compile(r"^([^\[{]*)[\[{].*[\]}](?= (?:is|has|does|should)\b)")

# In this order: a larger match is replaced before its parts.
_NORMAL: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(_DOUBLE), "'_'"),
    (re.compile(r"`[^`]*(?:`|$)"), "'_'"),
    # An apostrophe inside a word (don't) opens no quotation.
    (re.compile(rf"(?<!\w){_SINGLE}"), "'_'"),
    (re.compile(r"\b\w+://[^\s,;)\]}>]+"), "<url>"),
    (re.compile(r"\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\](?::\d+)?"), "<host>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "<host>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "<id>"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<id>"),
    # A name of letters, then a long part that holds a digit: chatcmpl-9f2ab1c, req_011CQx.
    (re.compile(r"\b(?:[A-Za-z]+[-_])+(?=\w*\d)\w{6,}\b"), "<id>"),
    (re.compile(r"\b(?=[0-9a-fA-F]*[a-fA-F])(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{6,}\b"), "<id>"),
    (re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])\w{16,}\b"), "<id>"),
    (re.compile(r"\d+(?:[.,]\d+)*"), "#"),
    # Lists of any length are alike.
    (re.compile(r"(#|'_'|<id>)(?:, ?\1)+"), r"\1"),
)


def http_status(text: str) -> int | None:
    """Return the HTTP status in an error text (``HTTP 503``, ``status code: 400``), or None."""
    match = _HTTP_STATUS.search(text)
    return int(match[1] or match[2]) if match else None


def normal_form(text: str, endpoint: str | None = None) -> str:
    """Return ``text`` without what differs from row to row, and without ``endpoint``."""
    if endpoint:
        host = endpoint.split("://", 1)[-1].split("/", 1)[0]
        text = text.replace(endpoint, "<host>")
        if host:
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "<host>", text)
    # The message in a server's JSON error is the cause, not a quotation.
    text = _SAID.sub(_unquoted, _VALUE.sub(r"\1<value>", text))
    for pattern, mark in _NORMAL:
        text = pattern.sub(mark, text)
    return text


def _unquoted(match: re.Match[str]) -> str:
    text = match[3] or match[4] or match[5] or ""
    return f"{match[2]}: " + text.replace('\\"', '"').replace("\\'", "'")


class _Group(msgspec.Struct):
    first: ErrorGroup
    weight: int
    count: int
    endpoints: set[str]


class ErrorGroups:
    """Counts of equal errors in bounded memory.

    Beyond ``limit`` groups a new one replaces that of least weight and inherits its weight
    (the "Space-Saving" rule of Metwally, Agrawal, El Abbadi:
    "Efficient computation of frequent and top-k elements in data streams", ICDT 2005), so an
    error behind more than 1/limit of all failures is always among them, however late it begins.

    Args:
        limit: how many groups are kept at most.
    """

    __slots__ = ("_described", "_groups", "_limit", "_normal", "other")

    def __init__(self, limit: int = MAX_GROUPS) -> None:
        self._limit = limit
        self._groups: dict[tuple[str, int | None, str], _Group] = {}
        # The patterns cost some 50 microseconds. Equal errors mostly have equal texts, or texts
        # that differ in digits only, so they run once for each of those.
        self._described = functools.lru_cache(maxsize=_REMEMBERED_TEXTS)(self._describe)
        self._normal = functools.lru_cache(maxsize=_REMEMBERED_TEXTS)(normal_form)
        self.other = 0

    def add(self, o: Outcome) -> None:
        """Count one row that is not ok."""
        kind = o.error_kind or o.status
        raw = o.error or o.finish_reason or ""
        if type(o.id) is str and len(o.id) >= _SHORTEST_ID and o.id in raw:
            raw = raw.replace(o.id, "<id>")
        endpoint = None if kind in _LOCAL_KINDS else o.endpoint
        status, pattern = self._described(raw[: 4 * MAX_TEXT], endpoint)
        key = (kind, status, pattern)
        group = self._groups.get(key)
        if group is None:
            weight = self._make_room() if len(self._groups) >= self._limit else 0
            first = _example(o, kind, endpoint, status, pattern)
            group = self._groups[key] = _Group(first, weight, 0, set())
        group.weight += 1
        group.count += 1
        if endpoint is not None and len(group.endpoints) < _MAX_ENDPOINTS:
            group.endpoints.add(endpoint)

    def _describe(self, text: str, endpoint: str | None) -> tuple[int | None, str]:
        text = visible(text, _NORMALISED)
        zeros = None if endpoint is None else endpoint.translate(_TO_ZERO)
        return http_status(text), self._normal(text.translate(_TO_ZERO), zeros)[:_COMPARED]

    def _make_room(self) -> int:
        key, least = min(self._groups.items(), key=lambda item: item[1].weight)
        del self._groups[key]
        self.other += least.count
        return least.weight

    def __len__(self) -> int:
        return len(self._groups)

    def groups(self) -> tuple[ErrorGroup, ...]:
        """Return the groups, largest first; equal counts in order of appearance."""
        order = sorted(self._groups.values(), key=attrgetter("count"), reverse=True)
        return tuple(
            msgspec.structs.replace(g.first, count=g.count, endpoints=len(g.endpoints))
            for g in order
        )


def _example(
    o: Outcome, kind: str, endpoint: str | None, status: int | None, pattern: str
) -> ErrorGroup:
    return ErrorGroup(
        count=0,
        kind=visible(kind),
        pattern=pattern,
        http_status=status,
        endpoint=None if endpoint is None else visible(endpoint, MAX_TEXT),
        endpoints=0,
        row=o.row,
        id=name_of(o.id),
        source=visible(o.source, MAX_TEXT),
        line=o.line,
        text=visible(o.error or o.finish_reason or "", MAX_TEXT),
    )
