"""How far a start of a run is, for readers of its directory: one small file for each part."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bagent.store.inside import read_inside

EVERY_S = 5.0
"""Seconds between two notes: a parallel file system is asked for little."""


class RunProgress(msgspec.Struct, frozen=True):
    """What a start knew of its end at one moment; each number is None where nobody knew it.

    ``at`` is in Unix seconds. The others are those of :class:`bagent.observe.Snapshot`.
    """

    at: float
    total: int | None
    total_is_exact: bool
    remaining: int | None
    eta_s: float | None


class ProgressFile:
    """Writes the progress of one part of a run, now and then.

    Args:
        run_dir: the run directory.
        part: ``all``, or like ``1-of-4``.
    """

    def __init__(self, run_dir: Path, part: str) -> None:
        self._path = _path(run_dir, part)
        self._due = 0.0

    def write(self, progress: RunProgress, *, last: bool = False) -> None:
        """Write the file if it is due, or for the last time; a full disk stops nothing."""
        if not last and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_S
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            fresh.write_bytes(msgspec.json.encode(progress))
            fresh.replace(self._path)


def read_progress(run_dir: Path, parts: Iterable[str]) -> RunProgress | None:
    """Return the progress of all ``parts`` as one; None where one of them has written none.

    The total of several parts is left to the caller: each of them knows its own rows alone.
    """
    found = []
    for part in parts:
        try:
            data = read_inside(_path(run_dir, part))
            found.append(msgspec.json.decode(data, type=RunProgress))
        except (OSError, msgspec.DecodeError):
            return None
    if len(found) < 2:
        return found[0] if found else None
    remaining = [one.remaining for one in found if one.remaining is not None]
    etas = [one.at + one.eta_s for one in found if one.eta_s is not None]
    at = max(one.at for one in found)
    return RunProgress(
        at=at,
        total=None,
        total_is_exact=all(one.total_is_exact for one in found),
        remaining=sum(remaining) if len(remaining) == len(found) else None,
        eta_s=max(0.0, max(etas) - at) if len(etas) == len(found) else None,
    )


def _path(run_dir: Path, part: str) -> Path:
    return run_dir / ("progress.json" if part == "all" else f"progress-{part}.json")
