"""Validation errors of a job with positions, and the context of validators."""

from __future__ import annotations

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
