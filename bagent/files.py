"""Private files and folders, atomic writes, and reads that follow no links."""

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
"""Mode of folders and scripts that may hold secrets."""


def make_private_folder(path: Path) -> None:
    """Make the folder ``path`` with mode 0700; leave an existing one as it is.

    Raises:
        OSError: it cannot be made, or is not a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(PRIVATE)
    except FileExistsError:
        if not path.is_dir():
            raise


def ensure_own_folder(path: Path) -> None:
    """Make the folder ``path`` for this user alone, or check that it is theirs alone.

    For folders with guessable names, as in ``/tmp``: another user could have made one there and
    put files into it that are executed later.

    Raises:
        OSError: it cannot be made, is a link or not a folder, or belongs to another user.
    """
    make_private_folder(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
        os.fchmod(descriptor, PRIVATE)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, *content: bytes | str, mode: int = 0o666, sync: bool = False) -> None:
    """Replace the file at ``path``: readers see the old content or the new one, never a part.

    Args:
        path: the file.
        content: pieces of its content, written one after the other; text as UTF-8.
        mode: mode of the new file, less the process's umask.
        sync: wait until the content is on the disk.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            for piece in content:
                file.write(piece.encode() if isinstance(piece, str) else piece)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

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
    """Return the content of a regular file; raises as :func:`open_regular`."""
    with open_regular(path) as handle:
        return handle.read()


def is_regular(path: Path) -> bool:
    """Return whether ``path`` is a regular file and not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def link_error(path: Path) -> UsageError:
    """Return the error for a link in place of the journal or of a file in it."""
    return UsageError(
        f"{path} is a link to {path.readlink()}, which is not followed",
        hint="put what it leads to in its place",
    )
