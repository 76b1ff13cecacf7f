"""Where a piece of a prompt's text stands in the file that holds it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bagent.errors import Position

_OPENER = re.compile(r"\{\{|\{%|\{#")
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
        """The position of ``word`` (else of the tag) on ``line`` of the template ``text``.

        YAML may fold, indent or quote the text. Tags stand in the file in the same order as in
        the text, so the n-th one there is the n-th one here.
        """
        tag = _tag_on_line(text, line, word)
        tags = [found.start() for found in _OPENER.finditer(self.source, self.start, self.end)]
        if tag is None or tag >= len(tags) or len(tags) != len(_OPENER.findall(text)):
            return Position(self.file, self.line, self.column)
        offset = tags[tag]
        if word:
            found = re.compile(rf"(?<![\w.]){re.escape(word)}(?!\w)").search(
                self.source, offset, self.end
            )
            offset = found.start() if found else offset
        before = _LINE_END.split(self.source[:offset])
        return Position(self.file, len(before), len(before[-1]) + 1)


def _tag_on_line(text: str, line: int, word: str) -> int | None:
    """The ordinal of the tag that ``line`` (from 1) of ``text`` is about, None if there is none.

    It is the first one on the line that holds ``word``, else the first on the line, else the
    last before it: a tag may run over several lines.
    """
    starts = [0, *(found.end() for found in _LINE_END.finditer(text)), len(text) + 1]
    line = min(max(line, 1), len(starts) - 1)
    first, after = starts[line - 1], starts[line]
    tags = [found.start() for found in _OPENER.finditer(text)]
    holds = re.compile(rf"(?<![\w.]){re.escape(word)}(?!\w)") if word else None
    best: int | None = None
    for ordinal, start in enumerate(tags):
        if start >= after:
            break
        end = tags[ordinal + 1] if ordinal + 1 < len(tags) else len(text)
        if holds and end > first and holds.search(text, max(start, first), end):
            return ordinal
        if start < first or best is None or tags[best] < first:
            best = ordinal
    return best
