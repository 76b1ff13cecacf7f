"""Cuts a long text into pieces that overlap, at the ends of paragraphs, sentences or words."""

from __future__ import annotations

import re

import msgspec

from bagent.stages.items import estimate

_ENDS = tuple(map(re.compile, (r"\n\s*\n", r"[.!?。!?]['\")\]]*\s+|[。!?]", r"\s+")))
_LATEST = 0.5
"""A piece is cut back at most to so much of its length for a better end."""


class Piece(msgspec.Struct, frozen=True):
    """A part of a text in characters from ``start`` to before ``end``; about ``tokens`` long."""

    start: int
    end: int
    tokens: int


def pieces(text: str, tokens: int, overlap: int) -> list[Piece]:
    """The pieces of ``text``, of at most ``tokens`` tokens each by estimate.

    Each piece but the first repeats about the last ``overlap`` tokens of the one before. All
    characters are in some piece; an empty text has no pieces. The same text has the same pieces.
    """
    found: list[Piece] = []
    start = 0
    while start < len(text):
        end = _reach(text, start, tokens)
        if end < len(text):
            end = _good_end(text, start, end)
        found.append(Piece(start, end, _size(text, start, end)))
        if end >= len(text):
            break
        # A piece that was cut back far may be shorter than the overlap: go on all the same.
        start = max(start + (end - start + 1) // 2, _back(text, start, end, overlap))
    return found


def _size(text: str, start: int, end: int) -> int:
    return estimate(text[start:end].encode("utf-8", "replace"))


def _reach(text: str, start: int, tokens: int) -> int:
    """The furthest end of a piece that begins at ``start``; at least one character on."""
    low, high = start + 1, min(len(text), start + 3 * tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if _size(text, start, middle) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low


def _good_end(text: str, start: int, end: int) -> int:
    """The last end of a paragraph, else sentence, else word, in the second half of a piece."""
    least = start + int((end - start) * _LATEST)
    for pattern in _ENDS:
        ends = [found.end() for found in pattern.finditer(text, least, end)]
        if ends:
            return ends[-1]
    return end


def _back(text: str, start: int, end: int, overlap: int) -> int:
    """Where the next piece begins: ``overlap`` tokens before ``end``, at the start of a word."""
    if not overlap:
        return end
    low, high = start, end
    while low < high:
        middle = (low + high) // 2
        if _size(text, middle, end) <= overlap:
            high = middle
        else:
            low = middle + 1
    space = re.compile(r"\s+").search(text, low, end)
    return space.end() if space is not None and space.end() < end else low
