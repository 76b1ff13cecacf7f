"""Which rows of earlier starts a start sends again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bagent.errors import EXIT_NEEDS_PERSON, EXIT_OK, EXIT_ROWS_FAILED
from bagent.runs.context import STAGE, RunContext
from bagent.stages.loop import section_stage
from bagent.store.journal.codec import salt_of
from bagent.store.journal.done_index import ResumePolicy
from bagent.store.journal.edited_rows import UnseenRows
from bagent.store.run_dir import RunInfo
from bagent.store.totals import LastStage
from bagent.types import EXTERNAL_KINDS, PASSING_KINDS

if TYPE_CHECKING:
    from bagent.stages.prepare import PreparedStage


def make_retry_policy(prepared: RunContext, info: RunInfo | None, *, changed: bool) -> ResumePolicy:
    """Return which outcomes of earlier starts are left as they are.

    Args:
        prepared: the job.
        info: what ``run.json`` says of the earlier starts.
        changed: the job is another one than they had: whatever failed may come out otherwise.
    """
    options = prepared.options
    retry = options.retry
    if retry is None and not options.skip_failed:
        retry = "all" if changed else _mended(info)
    return ResumePolicy.parse(
        retry,
        skip_failed=options.skip_failed,
        ended=_ended_once(info),
        again=resent_kinds(prepared) - PASSING_KINDS,
        accept_truncated=prepared.job.output.truncated == "accept",
    )


def resent_kinds(prepared: RunContext) -> frozenset[str]:
    """Return the kinds of failure that the same command sends again once the run has ended.

    An invalid answer is among them where another one may come: not at temperature 0.
    """
    jobs = [asking.job for stage in prepared.stages for asking in stage.asking] or [prepared.job]
    varied = any(job.sampling.temperature != 0 for job in jobs)
    return PASSING_KINDS | EXTERNAL_KINDS | (frozenset({"schema"}) if varied else frozenset())


def _ended_once(info: RunInfo | None) -> bool:
    """Whether some start got to its end."""
    return info is not None and any(
        start.exit_code in (EXIT_OK, EXIT_ROWS_FAILED) for start in info.starts
    )


def _mended(info: RunInfo | None) -> str | None:
    """The kinds to send again, as ``--retry`` has them, after a stop that asked for a person.

    A person has acted since: what a key or an account refused then may go through now.
    """
    if info is None or _ended_once(info):
        return None
    if all(start.exit_code != EXIT_NEEDS_PERSON for start in info.starts):
        return None
    return ",".join(sorted(PASSING_KINDS | {"auth", "budget"}))


def find_unseen_failures(prepared: RunContext, taken_up: Iterable[int]) -> UnseenRows | None:
    """What failed earlier and must be in the input still, or count no more once it was read.

    None where that cannot be told: not all rows are read, they come of other stages, or nothing
    had failed. A part of the rows knows its own by their keys; with several answers a row units
    do not tell the key.
    """
    picked = prepared.rows_config
    if prepared.stages or any(pick is not None for pick in (picked.where, picked.limit)):
        return None
    if picked.sample is not None or (picked.shard and prepared.job.answers > 1):
        return None
    if picked.shard:
        part, parts = picked.shard
        salt = salt_of(STAGE, 0)
        taken_up = [unit for unit in taken_up if (unit ^ salt) % parts == part - 1]
    units = list(taken_up)
    return UnseenRows(units) if units else None


def last_stage(stages: Sequence[PreparedStage]) -> LastStage | None:
    """The last of ``stages``; None where there are none: then all outcomes count."""
    if not stages:
        return None
    last = stages[-1]
    return LastStage(last.name, last.spec.kind == "sql")


def stage_names(stages: Sequence[PreparedStage]) -> list[str]:
    """The names of all stages in results, in order; sections of a loop before the loop."""
    names = []
    for stage in stages:
        if stage.spec.kind == "loop":
            names += [section_stage(stage.name, asking.name) for asking in stage.asking]
        names.append(stage.name)
    return names
