"""A Unix socket to listen on, which only its owner may connect to."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from bagent.errors import UsageError

UNIX_BASE_URL = "http://localhost/v1"
"""The base address for clients of a socket: the host is theirs to ignore."""

MAX_PATH_BYTES = 107
"""What Linux takes as the path of a socket (unix(7))."""


def listen_unix(path: Path) -> socket.socket:
    """Return a listening socket at ``path`` with mode 0600; one that nobody serves is replaced.

    Raises:
        UsageError: the path is too long, taken, or cannot be written.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UsageError(
            f"--unix {path} is longer than {MAX_PATH_BYTES} bytes", hint="choose a shorter path"
        )
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Between bind and listen nobody can connect, so nobody else is ever let in.
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(128)
    except OSError as error:
        listening.close()
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot listen on {path}: {reason}") from None
    return listening


def remove_socket(path: Path | None) -> None:
    """Remove the socket at ``path``, where there is one."""
    with suppress(OSError):
        if path is not None and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} is there and is no socket", hint="choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise UsageError(f"another process serves {path}", hint="end it, or choose another path")
