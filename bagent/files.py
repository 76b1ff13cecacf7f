"""Files and folders that only their owner may read."""

from __future__ import annotations

import errno
import os
import uuid
from contextlib import suppress
from pathlib import Path

PRIVATE = 0o700
"""The mode of folders and scripts that may hold secrets."""


def make_private(path: Path) -> None:
    """Make the folder ``path`` with mode 0700; one that is there stays as it is.

    Raises:
        OSError: it cannot be made, or is no folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(PRIVATE)
    except FileExistsError:
        if not path.is_dir():
            raise


def own_folder(path: Path) -> None:
    """Make the folder ``path`` for this user alone, or make sure that it is that.

    For folders whose names others can know, as in ``/tmp``: who made one before could put files
    into it that are run later.

    Raises:
        OSError: it cannot be made, is a link or no folder, or belongs to somebody else.
    """
    make_private(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
        os.fchmod(descriptor, PRIVATE)
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0700 in place of what is at ``path``.

    At no time may others read it, also where an older file of theirs was there.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(temporary, flags, PRIVATE), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
