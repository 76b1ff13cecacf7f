"""Files of a run directory, which may come from somebody else: links in it are not followed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from bagent.errors import UsageError


def open_inside(path: Path) -> BinaryIO:
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


def read_inside(path: Path) -> bytes:
    """Read a file of a run directory.

    Raises:
        OSError: it is a link, a pipe or a device, or cannot be read.
    """
    with open_inside(path) as handle:
        return handle.read()


def is_regular(path: Path) -> bool:
    """Whether a path is a regular file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def link_refused(path: Path) -> UsageError:
    """The error for a link in the place of the journal or of a file in it."""
    return UsageError(
        f"{path} is a link to {path.readlink()}, which is not followed",
        hint="put what it leads to in its place",
    )
