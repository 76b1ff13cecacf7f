"""Positions of template text in the file that holds it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bagent.errors import Position

_OPENER = re.compile(r"\{\{|\{%|\{#")
_CLOSERS = {"{{": "}}", "{%": "%}", "{#": "#}"}
_WORD = re.compile(r"\w+")
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of one text: ``file``, and the part of ``source`` from ``start`` to ``end``.

    ``line`` and ``column`` are where the part begins. A text typed as an option has no source.
    """

    file: str | Path
    source: str = ""
    start: int = 0
    end: int = 0
    line: int = 0
    column: int = 0

    def position(self, text: str, line: int, word: str = "") -> Position:
        """Return the position of ``word`` (else of the tag) on ``line`` of the template ``text``.

        YAML may fold, indent or quote the text. Tags stand in the file in the same order as in
        the text, so the n-th one there is the n-th one here.
        """
        tag = _tag_on_line(text, line, word)
        tags = [match.start() for match in _OPENER.finditer(self.source, self.start, self.end)]
        if tag is None or tag >= len(tags) or len(tags) != len(_OPENER.findall(text)):
            return Position(self.file, self.line, self.column)
        offset = tags[tag]
        if word:
            match = _search(word, self.source, offset, self.end)
            offset = offset if match is None else match
        return self._at(offset)

    def word(self, text: str, offset: int) -> Position:
        """Return the position in the file of the word or sign at ``offset`` of the value ``text``.

        YAML may fold, indent or quote the text. Words stand in the file in the same order as in
        the text, so the n-th such word there is the n-th one here; else it is where the value
        begins.
        """
        match = _WORD.match(text, offset)
        if match:
            word = re.compile(rf"(?<!\w){re.escape(match[0])}(?!\w)")
        else:
            word = re.compile(re.escape(text[offset : offset + 1] or "\0"))
        in_text = [hit.start() for hit in word.finditer(text)]
        in_source = [hit.start() for hit in word.finditer(self.source, self.start, self.end)]
        if len(in_text) != len(in_source) or offset not in in_text:
            return Position(self.file, self.line, self.column)
        return self._at(in_source[in_text.index(offset)])

    def _at(self, offset: int) -> Position:
        before = _LINE_END.split(self.source[:offset])
        return Position(self.file, len(before), len(before[-1]) + 1)


def _tag_on_line(text: str, line: int, word: str) -> int | None:
    """Return the ordinal of the tag that belongs to ``line`` (from 1) of ``text``, or None.

    It is the first one on the line that holds ``word``, else the first on the line, else the
    last before it: a tag may run over several lines.
    """
    starts = [0, *(match.end() for match in _LINE_END.finditer(text)), len(text) + 1]
    line = min(max(line, 1), len(starts) - 1)
    first, after = starts[line - 1], starts[line]
    best: int | None = None
    best_start = -1
    for ordinal, tag in enumerate(_OPENER.finditer(text)):
        start = tag.start()
        if start >= after:
            break
        closing = text.find(_CLOSERS[tag[0]], start)
        end = len(text) if closing < 0 else closing
        is_code = tag[0] != "{#" and word
        if is_code and end > first and _search(word, text, max(start, first), end) is not None:
            return ordinal
        if best_start < first:
            best, best_start = ordinal, start
    return best


def _search(word: str, text: str, start: int, end: int) -> int | None:
    """Return the offset of ``word`` in the range; one that follows no dot is preferred."""
    for before in (r"(?<![\w.])", r"(?<!\w)"):
        match = re.compile(rf"{before}{re.escape(word)}(?!\w)").search(text, start, end)
        if match:
            return match.start()
    return None
