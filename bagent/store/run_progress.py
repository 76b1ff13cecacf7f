"""Progress files: how far each part of a run is, for readers of the run directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bagent.files import read_regular, write_atomic

PROGRESS_INTERVAL_S = 5.0
"""Seconds between two writes, few enough for a parallel file system."""


class RunProgress(msgspec.Struct, frozen=True):
    """The progress of a start at ``at`` (Unix seconds); an unknown number is None.

    The fields are those of :class:`bagent.observe.Snapshot`.
    """

    at: float
    total: int | None
    total_is_exact: bool
    remaining: int | None
    eta_s: float | None
    part_total: int | None = None
    """Results that the rows of this part need, finished or not."""

    rows_per_s: float | None = None
    """The speed that displays show; None where nothing remains, or the job has stages."""


class ProgressFile:
    """Writes the progress of one part of a run every few seconds.

    Args:
        run_dir: the run directory.
        part: ``all``, or like ``1-of-4``.
    """

    def __init__(self, run_dir: Path, part: str) -> None:
        self._path = _path(run_dir, part)
        self._due = 0.0

    def write(self, progress: RunProgress, *, last: bool = False) -> None:
        """Write the file if it is due or ``last``; errors are ignored."""
        if not last and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + PROGRESS_INTERVAL_S
        with contextlib.suppress(OSError):
            write_atomic(self._path, msgspec.json.encode(progress))


def read_progress(run_dir: Path, parts: Iterable[str]) -> RunProgress | None:
    """Return the combined progress of ``parts``; None if one of them has written none.

    The total of several parts is the sum of their own rows, which do not depend on when each part
    wrote its progress. Parts whose time has passed add no speed.
    """
    parts_progress = []
    for part in parts:
        try:
            data = read_regular(_path(run_dir, part))
            parts_progress.append(msgspec.json.decode(data, type=RunProgress))
        except (OSError, msgspec.DecodeError):
            return None
    if len(parts_progress) < 2:
        return parts_progress[0] if parts_progress else None
    remaining = [p.remaining for p in parts_progress if p.remaining is not None]
    etas = [p.at + p.eta_s for p in parts_progress if p.eta_s is not None]
    at = max(p.at for p in parts_progress)
    totals = [p.part_total for p in parts_progress if p.part_total is not None]
    speeds = [p.rows_per_s for p in parts_progress if p.rows_per_s is not None]
    return RunProgress(
        at=at,
        total=sum(totals) if len(totals) == len(parts_progress) else None,
        total_is_exact=all(p.total_is_exact for p in parts_progress),
        remaining=sum(remaining) if len(remaining) == len(parts_progress) else None,
        eta_s=max(0.0, max(etas) - at) if len(etas) == len(parts_progress) else None,
        rows_per_s=sum(speeds) if speeds else None,
    )


def _path(run_dir: Path, part: str) -> Path:
    return run_dir / ("progress.json" if part == "all" else f"progress-{part}.json")
