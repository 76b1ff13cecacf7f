"""Loading a job file in another program."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagent.errors import UsageError
from bagent.files import write_private

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


@contextmanager
def job_file(job: str | os.PathLike[str] | LoadedJob | Mapping[str, Any]) -> Iterator[Path]:
    """Name the file of a job; a dict gets one in the current folder while the run goes on.

    Raises:
        UsageError: the dict holds what a job file cannot, or the folder cannot be written.
    """
    if isinstance(job, LoadedJob):
        yield job.path
        return
    if not isinstance(job, Mapping):
        yield Path(job)
        return
    try:
        text = json.dumps({"name": "job", **job}, indent=1, default=os.fspath, ensure_ascii=False)
        text.encode()  # refuses what UTF-8 cannot hold
    except (TypeError, ValueError) as error:
        raise UsageError(f"the job cannot be written as a job file: {error}") from None
    # In this folder, since the paths of a job start from the folder of its file.
    path = Path(f".bagent-{secrets.token_hex(8)}.yaml")
    try:
        write_private(path, text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"a job that is a dict needs a file in the current folder: {reason}",
            hint="write the job into a file, and give its path",
        ) from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
