"""``read_file``: text files below one folder, and nothing outside it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from bagent.tools.threads import AbandonableThreads
from bagent.tools.types import Arguments, ToolFault
from bagent.types import Json

MOST_BYTES = 1 << 20
"""What one call reads at most."""

MOST_LINKS = 20
MOST_NAMES = 100

SCHEMA: Json = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "The file, relative to the folder."},
        "first_line": {
            "type": "integer",
            "minimum": 1,
            "description": "Where to begin; default: 1.",
        },
        "lines": {"type": "integer", "minimum": 1, "description": "How many; default: all."},
    },
    "required": ["path"],
    "additionalProperties": False,
}
WORDS = "Read a text file. The path of a folder (. is the top one) gives the names in it."

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY


class ReadFile:
    """Reads below ``root``, which must be an existing folder.

    Every part of a path is opened from the folder before it and never through a link, so that
    nothing that is renamed or linked meanwhile leads outside. Links that stay inside are followed
    by their text.
    """

    def __init__(self, root: Path, threads: AbandonableThreads) -> None:
        self._roots = (Path(os.path.realpath(root)), root.absolute())
        self._threads = threads

    async def run(self, arguments: Arguments) -> str:
        """The text, or the part of it that was asked for.

        Raises:
            ToolFault: it is outside, missing, unreadable or no text.
        """
        return await self._threads.run(lambda: self._read(arguments))

    def _read(self, arguments: Arguments) -> str:
        given: str = arguments["path"]
        held: list[int] = []
        try:
            number = self._open(given, held)
            if stat.S_ISDIR(os.fstat(number).st_mode):
                return _names(number)
            return _text(number, arguments)
        except OSError as error:
            raise ToolFault(f"{given}: {error.strerror or error}") from None
        finally:
            _leave(held, 0)

    def _open(self, given: str, held: list[int]) -> int:
        """The open file (or folder); ``held`` gets it and the folders that lead to it, open too.

        What a path turns away from is closed at once: a long one would take all the files that a
        process may have open.
        """
        if "\0" in given:
            raise ToolFault("a path holds no NUL character")
        held.append(os.open(self._roots[0], _FOLDER))
        left = self._parts(given, given)
        links = 0
        while left:
            part = left.pop()
            if part == "..":
                _leave(held, len(held) - 1)
                if not held:
                    raise _outside(given)
                continue
            target = _link(part, held[-1])
            if target is not None:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if target.startswith("/"):
                    _leave(held, 1)
                left += self._parts(target, given)
            else:
                held.append(_opened(part, held[-1], _FOLDER if left else _FILE))
        return held[-1]

    def _parts(self, path: str, given: str) -> list[str]:
        """The parts of ``path``, the last one first; an absolute one must lie below the root."""
        if path.startswith("/"):
            below = [Path(path).relative_to(root) for root in self._roots if _is_in(path, root)]
            if not below:
                raise _outside(given)
            path = str(below[0])
        return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _is_in(path: str, root: Path) -> bool:
    return Path(path).is_relative_to(root)


def _outside(given: str) -> ToolFault:
    return ToolFault(f"{given} lies outside the folder that may be read")


def _leave(held: list[int], kept: int) -> None:
    """Close the last ones until ``kept`` are left."""
    while len(held) > kept:
        os.close(held.pop())


def _opened(part: str, folder: int, flags: int) -> int:
    """A file or folder in ``folder``; nothing else is opened: a device may act on it."""
    mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        number = os.open(part, flags, dir_fd=folder)
        mode = os.fstat(number).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return number
        os.close(number)  # another took its place
    raise ToolFault(f"{part} is no file")


def _link(part: str, folder: int) -> str | None:
    """Where a link leads, None where ``part`` is none (or is missing: opening it says so)."""
    try:
        return os.readlink(part, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _names(number: int) -> str:
    names = []
    with os.scandir(number) as entries:
        for entry in entries:
            names.append(entry.name + ("/" if entry.is_dir(follow_symlinks=False) else ""))
            if len(names) > 10 * MOST_NAMES:
                break
    shown = sorted(names)[:MOST_NAMES]
    more = "" if len(shown) == len(names) else "\n[cut: there are more]"
    return "\n".join(shown) + more if shown else "[an empty folder]"


def _text(number: int, arguments: Arguments) -> str:
    first, count = arguments.get("first_line", 1), arguments.get("lines")
    kept: list[bytes] = []
    size, more = 0, False
    with os.fdopen(os.dup(number), "rb") as file:
        # In pieces: a line may be as long as the file.
        line = 1
        while piece := file.readline(1 << 16):
            if line >= first:
                kept.append(piece)
                size += len(piece)
            if piece.endswith(b"\n"):
                line += 1
            if size > MOST_BYTES:
                more = True
                break
            if count is not None and line >= first + count:
                break
    raw = b"".join(kept)[:MOST_BYTES]
    if b"\0" in raw[:4096]:
        raise ToolFault("it is not text")
    if not more:
        return raw.decode("utf-8-sig", "replace")
    text = raw.decode("utf-8", "ignore")
    return f"{text}\n[cut: line {line} is not whole; go on with first_line]"
