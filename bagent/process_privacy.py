"""Protection of this process's keys from the programs that it starts.

A tool or an agent program runs as the same user. On Linux it could read ``/proc/PPID/environ``, or
the parent's memory as a debugger does. Root can read memory in any case.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ORDINARY = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR"}
    | {"LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR"}
)
"""The variables, besides ``LC_*``, that programs need and that hold no secrets."""

_PR_SET_DUMPABLE = 4
_ENV_START, _ENV_END = 50, 51
"""Fields of /proc/PID/stat, counted from 1 (proc(5))."""


def hide_from_children() -> None:
    """Make memory and environment of this process unreadable for others, on Linux.

    The process becomes undumpable (prctl(2)), so only root can read its memory. Values in the
    kernel's copy of the environment are overwritten, except for harmless variables. The process
    and its children see them as before.
    """
    with suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        _overwrite_environment(os.putenv)


def _overwrite_environment(keep: Callable[[bytes, bytes], None]) -> None:
    """Overwrite the initial values; ``keep`` gives the C library copies of them."""
    start, end = _environment_range()
    offset = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        name, mark, value = entry.partition(b"=")
        if mark and value and not is_ordinary(os.fsdecode(name)):
            current = os.environb.get(name)
            if current is not None:
                keep(name, current)
            ctypes.memset(offset + len(name) + 1, ord("*"), len(value))
        offset += len(entry) + 1


def is_ordinary(name: str) -> bool:
    """Return whether programs need the variable to run and it holds no secret."""
    return name in ORDINARY or name.startswith("LC_")


def _environment_range() -> tuple[int, int]:
    """Return the address range of the environment, from ``/proc/self/stat``.

    Raises:
        OSError, ValueError: this system has no such range.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    # The first field after the name, which may hold blanks, is the third.
    start, end = int(fields[_ENV_START - 3]), int(fields[_ENV_END - 3])
    if not 0 < start <= end:
        raise ValueError("no environment")
    return start, end
