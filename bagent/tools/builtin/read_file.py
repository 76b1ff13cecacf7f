"""``read_file``: text files below one folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from bagent.tools.threads import AbandonableThreads
from bagent.tools.types import Arguments, ToolFault
from bagent.types import Json

MOST_BYTES = 1 << 20
"""Bytes that one call reads at most."""

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
DESCRIPTION = "Read a text file. The path of a folder (. is the top one) gives the names in it."

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY


class ReadFile:
    """Reads files below ``root``, an existing folder.

    Each part of a path is opened relative to the folder before it, and never through a link:
    concurrent renames and links cannot lead outside. Links that stay inside are resolved by text.
    """

    def __init__(self, root: Path, threads: AbandonableThreads) -> None:
        self._roots = (Path(os.path.realpath(root)), root.absolute())
        self._threads = threads

    async def run(self, arguments: Arguments) -> str:
        """Return the text of a file, or the requested lines.

        Raises:
            ToolFault: the path is outside, missing, unreadable or no text.
        """
        return await self._threads.run(lambda: self._read(arguments))

    def _read(self, arguments: Arguments) -> str:
        path: str = arguments["path"]
        folders: list[int] = []
        try:
            number = self._open(path, folders)
            if stat.S_ISDIR(os.fstat(number).st_mode):
                return _names(number)
            return _text(number, arguments)
        except OSError as error:
            raise ToolFault(f"{path}: {error.strerror or error}") from None
        finally:
            _close_last(folders, 0)

    def _open(self, path: str, folders: list[int]) -> int:
        """Open ``path``; ``folders`` gets its descriptor behind those of its parent folders.

        Folders that the path leaves again are closed at once: a long path would exhaust the
        descriptors of the process.
        """
        if "\0" in path:
            raise ToolFault("a path holds no NUL character")
        folders.append(os.open(self._roots[0], _FOLDER))
        remaining = self._parts(path, path)
        links = 0
        while remaining:
            part = remaining.pop()
            if part == "..":
                _close_last(folders, len(folders) - 1)
                if not folders:
                    raise _outside(path)
                continue
            target = _link(part, folders[-1])
            if target is not None:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if target.startswith("/"):
                    _close_last(folders, 1)
                remaining += self._parts(target, path)
            else:
                folders.append(_opened(part, folders[-1], _FOLDER if remaining else _FILE))
        return folders[-1]

    def _parts(self, path: str, shown_path: str) -> list[str]:
        """Return the parts of ``path``, the last one first; an absolute path is below the root."""
        if path.startswith("/"):
            below = [Path(path).relative_to(root) for root in self._roots if _is_in(path, root)]
            if not below:
                raise _outside(shown_path)
            path = str(below[0])
        return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _is_in(path: str, root: Path) -> bool:
    return Path(path).is_relative_to(root)


def _outside(path: str) -> ToolFault:
    return ToolFault(f"{path} lies outside the folder that may be read")


def _close_last(folders: list[int], count: int) -> None:
    """Close the last ones until ``count`` are left."""
    while len(folders) > count:
        os.close(folders.pop())


def _opened(part: str, folder: int, flags: int) -> int:
    """Open a file or folder in ``folder``, nothing else: opening a device may have an effect."""
    mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        number = os.open(part, flags, dir_fd=folder)
        mode = os.fstat(number).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return number
        os.close(number)  # it was replaced
    raise ToolFault(f"{part} is no file")


def _link(part: str, folder: int) -> str | None:
    """Return the target of a link, None where ``part`` is no link or missing."""
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
    listed = sorted(names)[:MOST_NAMES]
    more = "" if len(listed) == len(names) else "\n[cut: there are more]"
    return "\n".join(listed) + more if listed else "[an empty folder]"


def _text(number: int, arguments: Arguments) -> str:
    first, count = arguments.get("first_line", 1), arguments.get("lines")
    pieces: list[bytes] = []
    size, more = 0, False
    with os.fdopen(os.dup(number), "rb") as file:
        # In pieces: a line may be as long as the file.
        line = 1
        while piece := file.readline(1 << 16):
            if line >= first:
                pieces.append(piece)
                size += len(piece)
            if piece.endswith(b"\n"):
                line += 1
            if size > MOST_BYTES:
                more = True
                break
            if count is not None and line >= first + count:
                break
    raw = b"".join(pieces)[:MOST_BYTES]
    if b"\0" in raw[:4096]:
        raise ToolFault("it is not text")
    if not more:
        return raw.decode("utf-8-sig", "replace")
    text = raw.decode("utf-8", "ignore")
    return f"{text}\n[cut: line {line} is not whole; go on with first_line]"
