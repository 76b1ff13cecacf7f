"""The files that a pattern matches, each once, whatever links there are between folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import escape, glob
from pathlib import Path

_ANY_DEPTH = "**"


def matches(pattern: str) -> list[Path]:
    """The files that an absolute ``pattern`` matches, sorted; ``**`` is folders of any depth.

    A file under several names, as links give it, comes once: under the name with the fewest
    folders. Hidden files and folders are matched only where the pattern names them. A folder that
    links lead back to is entered once, since every way around a circle would double the rest.
    """
    chosen: dict[str, Path] = {}
    for name in sorted(set(_expand(pattern))):
        path = Path(name)
        if path.is_dir():
            continue
        real = os.path.realpath(name)
        if real not in chosen or len(path.parts) < len(chosen[real].parts):
            chosen[real] = path
    return sorted(chosen.values(), key=str)


def _expand(pattern: str) -> Iterator[str]:
    parts = pattern.split("/")
    if _ANY_DEPTH not in parts:
        yield from glob(pattern)  # noqa: PTH207  (Path.glob matches hidden files too)
        return
    at = parts.index(_ANY_DEPTH)
    rest = "/".join(parts[at + 1 :])
    for start in sorted(glob("/".join(parts[:at]) + "/")):  # noqa: PTH207
        for folder in _folders(start, set()):
            yield from _expand(escape(folder) + (rest or "*"))


def _folders(folder: str, entered: set[str]) -> Iterator[str]:
    """The folder and all below it, each once, with a ``/`` at its end."""
    real = os.path.realpath(folder)
    if real in entered:
        return
    entered.add(real)
    yield folder
    try:
        with os.scandir(folder) as found:
            names = sorted(one.name for one in found if one.is_dir())
    except OSError:
        return  # as the shell does with a folder that may not be read
    for name in names:
        if not name.startswith("."):
            yield from _folders(f"{folder}{name}/", entered)
