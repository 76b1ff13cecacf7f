"""Messages about invalid values, for people and for the model that is asked again.

They come from jsonschema-rs, which is quick. ``jsonschema`` takes seconds to import and runs
patterns on Python's ``re``, so it only explains broken schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError

MAX_WORDS = 200
"""Longest message about one fault, in characters."""

_BRANCHES = frozenset({"anyOf", "oneOf"})


def shorten(text: str, limit: int = MAX_WORDS) -> str:
    """Return ``text`` on one line and at most ``limit`` characters; the middle gives way."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    tail = (limit - 3) * 2 // 3
    return f"{text[: limit - 3 - tail]}...{text[-tail:]}"


def pointer(path: Iterable[str | int]) -> str:
    """Return a path as JSON Pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def validation_messages(errors: Iterable[ValidationError], limit: int) -> list[str]:
    """Return up to ``limit`` different one-line messages, each at most MAX_WORDS long.

    A message is ``POINTER: WORDS``; the pointer ``/`` stands for the whole value. Where no branch
    of an ``anyOf`` or ``oneOf`` holds, the errors of the nearest branch are given.
    """
    seen: dict[str, None] = {}
    for error in errors:
        for inner in _nearest(error):
            seen.setdefault(_phrase(inner))
            if len(seen) == limit:
                return list(seen)
    return list(seen)


def _phrase(error: ValidationError) -> str:
    where = shorten(pointer(error.instance_path) or "/", MAX_WORDS // 2)
    return f"{where}: {shorten(_message(error), MAX_WORDS - len(where) - 2)}"


def _message(error: ValidationError) -> str:
    options = getattr(error.kind, "options", None)
    if options is None:
        return error.message
    # The library names two options and counts the others; a model needs them all.
    allowed = json.dumps(options, ensure_ascii=False, default=str)
    value = json.dumps(error.instance, ensure_ascii=False, default=str)
    return f"{shorten(value, MAX_WORDS // 4)} is not one of {allowed}"


def _nearest(error: ValidationError) -> Sequence[ValidationError]:
    if error.kind.name not in _BRANCHES:
        return (error,)
    branches: list[list[ValidationError]] = getattr(error.kind, "context", [])
    depth = len(error.instance_path)
    scores = [_distance(branch, depth) for branch in branches]
    if not scores or scores.count(min(scores)) > 1:
        return (error,)
    nearest = branches[scores.index(min(scores))]
    return [inner for fault in islice(nearest, 5) for inner in _nearest(fault)]


def _distance(branch: Sequence[ValidationError], depth: int) -> int:
    """Return how far a value is from a branch: a wrong type is far, a wrong tag nearer."""
    distance = 0
    for fault in branch:
        if fault.kind.name == "type" and len(fault.instance_path) == depth:
            distance += 100
        elif fault.kind.name in ("const", "enum"):
            distance += 10
        else:
            distance += 1
    return distance
