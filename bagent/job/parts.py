"""The parts of a job that may have servers, tools and programs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagent.job.spec import Job
    from bagent.job.spec_stages import StagePart

Path = tuple[str | int, ...]
"""Where a value stands in a job file."""


def stage_parts(job: Job) -> Iterator[tuple[Path, StagePart]]:
    """Yield the stages of ``job``, their sections and its topology's parts, with their paths."""
    for number, stage in enumerate(job.stages):
        yield ("stages", number), stage
        for index, section in enumerate(stage.sections):
            yield ("stages", number, "sections", index), section
    topology = job.topology
    for key, part in (
        ("plan", topology.plan),
        ("reduce", topology.reduce),
        ("judge", topology.judge),
    ):
        if part is not None:
            yield ("topology", key), part
    for key, parts in (("steps", topology.steps), ("sections", topology.sections)):
        for index, one in enumerate(parts):
            yield ("topology", key, index), one
