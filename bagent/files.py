"""Files and folders that only their owner may read."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from bagent.errors import UsageError

PRIVATE = 0o700
"""The mode of folders and scripts that may hold secrets."""


def make_private_folder(path: Path) -> None:
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


def ensure_own_folder(path: Path) -> None:
    """Make the folder ``path`` for this user alone, or make sure that it is that.

    For folders whose names others can know, as in ``/tmp``: who made one before could put files
    into it that are run later.

    Raises:
        OSError: it cannot be made, is a link or no folder, or belongs to somebody else.
    """
    make_private_folder(path)
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


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a run directory for reading.

    Raises:
        OSError: it is a link, a pipe or a device, or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link, which is not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Read a file of a run directory.

    Raises:
        OSError: it is a link, a pipe or a device, or cannot be read.
    """
    with open_regular(path) as handle:
        return handle.read()


def is_regular(path: Path) -> bool:
    """Whether a path is a regular file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def link_error(path: Path) -> UsageError:
    """The error for a link in the place of the journal or of a file in it."""
    return UsageError(
        f"{path} is a link to {path.readlink()}, which is not followed",
        hint="put what it leads to in its place",
    )
