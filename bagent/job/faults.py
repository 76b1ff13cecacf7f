"""Pydantic's complaints as faults with positions."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bagent.errors import Position
from bagent.job.context import Problems
from bagent.job.overrides import option_name
from bagent.job.words import dotted, shown
from bagent.job.yamlfile import Spot, YamlMap, child_spot, find
from bagent.types import Json

Path = tuple[str | int, ...]


def note_faults(error: ValidationError, data: Json, root: Spot, problems: Problems) -> None:
    """Add every complaint of ``error`` about ``data`` to ``problems``, each at its place."""
    for item in error.errors(include_url=False):
        path = tuple(item["loc"])
        missing = item["type"] == "missing"
        message, hint, inner = _explain(item)
        path = path[:-1] if missing else (*path, *inner)
        spot, there = find(data, path, root)
        if _has_unknown_key(data, there, problems):
            # What it lacks is what the unknown key was meant to be.
            continue
        if missing:
            at = spot.key_at if there else Position(spot.file)
            problems.add(at, f"{dotted((*there, item['loc'][-1]))} is missing")
            continue
        at = _place(data, there, root)
        # A position that is an option names the key already.
        names_it = str(at.file) in (f"--set {_plain(there)}", option_name(_plain(there)))
        name = "" if names_it else dotted(there)
        problems.add(at, f"{name}: {message}" if name else message, hint)


def _has_unknown_key(data: Json, path: Path, problems: Problems) -> bool:
    for part in path:
        data = data[part]
    if not isinstance(data, YamlMap):
        return False
    keys = {spot.key_at for spot in data.spots.values()}
    return any(at in keys and text.startswith("unknown key") for at, text, _ in problems.found)


def _plain(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _explain(item: ErrorDetails) -> tuple[str, str, Path]:
    context: dict[str, Any] = item.get("ctx") or {}
    if item["type"] == "bagent":
        inner = tuple(
            int(part) if part.isdecimal() else part
            for part in str(context["key"]).split(".")
            if part
        )
        return context["message"], context["hint"], inner
    if item["type"] in ("tuple_type", "list_type"):
        return f"expected a list, got {shown(item['input'])}", "", ()
    return item["msg"].lower(), "", ()


def _place(data: Json, path: Path, root: Spot) -> Position:
    """The value's own position; for a mapping or list on later lines, its key's."""
    if not path:
        return Position(root.file, root.line, root.column) if root.line else Position(root.file)
    parent = data
    for part in path[:-1]:
        parent = parent[part]
    spot = child_spot(parent, path[-1]) or root
    return spot.value_at if spot.style or spot.line == spot.key_line else spot.key_at
