"""Validation errors of a job and the positions in its files, and the context of validators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bagent.errors import JobError, Position
from bagent.job.overrides import option_name
from bagent.job.yaml.parser import YamlMap, YamlSpot, child_spot, find
from bagent.text.suggest import describe_value, dotted
from bagent.types import Json

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


@dataclass(slots=True)
class Problems:
    """The faults found so far in one job; the first in file order is raised for all."""

    items: list[tuple[Position, str, str]] = field(default_factory=list)

    def add(self, at: Position, message: str, hint: str = "") -> None:
        """Note one fault; the same place and message counts once."""
        if (at, message, hint) not in self.items:
            self.items.append((at, message, hint))

    def raise_first(self) -> None:
        """Raise the first fault in file order, those of options before those of the file.

        Raises:
            JobError: with ``(and N more)`` where there are more.
        """
        if not self.items:
            return
        at, message, hint = min(self.items, key=lambda fault: (fault[0].line, fault[0].column))
        more = len(self.items) - 1
        if more:
            message += f" (and {more} more)"
        raise JobError(message, hint=hint, at=at)


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Passed to every validator: ``folder`` of the job file, ``cwd``, environment, faults."""

    folder: Path
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)

    def absolute(self, path: str, *, from_command: bool) -> Path:
        """Return ``path`` as an absolute path; ``~`` is the home folder of ``env``."""
        home = self.env.get("HOME", "")
        if home and (path == "~" or path.startswith("~/")):
            path = home + path[1:]
        return (self.cwd if from_command else self.folder) / path


ErrorPath = tuple[str | int, ...]


def note_faults(error: ValidationError, data: Json, root: YamlSpot, problems: Problems) -> None:
    """Add every complaint of ``error`` about ``data`` to ``problems``, each at its place."""
    for item in error.errors(include_url=False):
        path = tuple(item["loc"])
        missing = item["type"] == "missing"
        message, hint, inner = _explain(item)
        path = path[:-1] if missing else (*path, *inner)
        spot, found_path = find(data, path, root)
        if _has_unknown_key(data, found_path, problems):
            # What it lacks is what the unknown key was meant to be.
            continue
        if missing:
            at = spot.key_at if found_path else Position(spot.file)
            problems.add(at, f"{dotted((*found_path, item['loc'][-1]))} is missing")
            continue
        at = _value_position(data, found_path, root)
        # A position that is an option names the key already.
        names_it = str(at.file) in (f"--set {_plain(found_path)}", option_name(_plain(found_path)))
        name = "" if names_it else dotted(found_path)
        problems.add(at, f"{name}: {message}" if name else message, hint)


def _has_unknown_key(data: Json, path: ErrorPath, problems: Problems) -> bool:
    for part in path:
        data = data[part]
    if not isinstance(data, YamlMap):
        return False
    keys = {spot.key_at for spot in data.spots.values()}
    return any(at in keys and text.startswith("unknown key") for at, text, _ in problems.items)


def _plain(path: ErrorPath) -> str:
    return ".".join(str(part) for part in path)


def _explain(item: ErrorDetails) -> tuple[str, str, ErrorPath]:
    context: dict[str, Any] = item.get("ctx") or {}
    if item["type"] == "bagent":
        inner = tuple(
            int(part) if part.isdecimal() else part
            for part in str(context["key"]).split(".")
            if part
        )
        return context["message"], context["hint"], inner
    if item["type"] in ("tuple_type", "list_type"):
        return f"expected a list, got {describe_value(item['input'])}", "", ()
    return item["msg"].lower(), "", ()


def _value_position(data: Json, path: ErrorPath, root: YamlSpot) -> Position:
    """Return the value's position; for a mapping or list on later lines the key's."""
    if not path:
        return Position(root.file, root.line, root.column) if root.line else Position(root.file)
    parent = data
    for part in path[:-1]:
        parent = parent[part]
    spot = child_spot(parent, path[-1]) or root
    return spot.value_at if spot.style or spot.line == spot.key_line else spot.key_at
