"""Loading a job file in another program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagent.job.spec import Job


@dataclass(frozen=True)
class LoadedJob:
    """A checked job: its file, the ``dotted.key=value`` texts that were set, and what they say."""

    path: Path
    sets: tuple[str, ...]
    spec: Job

    def __repr__(self) -> str:
        # All settings would fill a notebook's screen, and keys may be among them.
        return f"<job {self.spec.name} of {self.path}>"


def load_job(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> LoadedJob:
    """Read and check a job file, as ``bagent run`` does before it sends anything.

    Args:
        path: the job file.
        sets: as of ``--set``: ``limits.concurrency=64``.

    Raises:
        bagent.errors.JobError: the first fault, with file, line and column.
    """
    from bagent.job.load import JobRequest
    from bagent.job.load import load_job as load

    file = Path(path).absolute()
    request = JobRequest(
        path=file, sets=tuple(sets), env=dict(os.environ), cwd=Path.cwd(), needs_input=False
    )
    return LoadedJob(file, tuple(sets), load(request))
