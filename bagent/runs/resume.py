"""Resuming: which rows of earlier starts are sent again.

The rule for each outcome is :class:`~bagent.store.journal.done_index.ResumePolicy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bagent.errors import EXIT_NEEDS_PERSON, EXIT_OK, EXIT_ROWS_FAILED
from bagent.observe.formatting import counted
from bagent.runs.context import STAGE, RunContext
from bagent.stages.loop import section_stage
from bagent.store.journal.codec import ACCEPTED_CODE, salt_of
from bagent.store.journal.done_index import DoneIndex, ResumePolicy
from bagent.store.journal.edited_rows import UnseenRows
from bagent.store.run_dir import RunDir, RunInfo
from bagent.store.totals import TRUNCATED_CODE, LastStage
from bagent.types import EXTERNAL_KINDS, PASSING_KINDS

if TYPE_CHECKING:
    from bagent.stages.prepare import PreparedStage


def make_retry_policy(prepared: RunContext, info: RunInfo | None, *, changed: bool) -> ResumePolicy:
    """Return which outcomes of earlier starts stay as they are.

    Args:
        prepared: the job.
        info: the content of ``run.json``, with the earlier starts.
        changed: the job has changed since, so any failed row may succeed now.
    """
    options = prepared.options
    retry = options.retry
    if retry is None and not options.skip_failed:
        retry = "all" if changed else _kinds_after_repair(info)
    return ResumePolicy.parse(
        retry,
        skip_failed=options.skip_failed,
        ended=has_ended(info),
        again=resent_kinds(prepared) - PASSING_KINDS,
        accept_truncated=prepared.job.output.truncated == "accept",
    )


def resent_kinds(prepared: RunContext) -> frozenset[str]:
    """Return the kinds of failure that the same command sends again after the end of a run.

    Invalid answers are among them, except at temperature 0, where no other answer can come.
    """
    jobs = [asking.job for stage in prepared.stages for asking in stage.requests] or [prepared.job]
    varied = any(job.sampling.temperature != 0 for job in jobs)
    return PASSING_KINDS | EXTERNAL_KINDS | (frozenset({"schema"}) if varied else frozenset())


def has_ended(info: RunInfo | None) -> bool:
    """Return whether some start reached its end."""
    return info is not None and any(
        start.exit_code in (EXIT_OK, EXIT_ROWS_FAILED) for start in info.starts
    )


def _kinds_after_repair(info: RunInfo | None) -> str | None:
    """Return the kinds to send again, in the form of ``--retry``, after a stop that needs a person.

    What a key or an account refused then may succeed now.
    """
    if info is None or has_ended(info):
        return None
    if all(start.exit_code != EXIT_NEEDS_PERSON for start in info.starts):
        return None
    return ",".join(sorted(PASSING_KINDS | {"auth", "budget"}))


def notes_of_earlier_starts(
    prepared: RunContext, changed: Sequence[str], done: DoneIndex
) -> Iterator[str]:
    """Yield messages about the rows that the run has from earlier starts.

    Args:
        changed: what changed of the job since.
        done: the outcomes of earlier starts.
    """
    if changed:
        yield f"{', '.join(changed)} changed; {len(done):,} finished rows are kept as they are"
    earlier = sum(done.codes.values())
    if not earlier and (other := _run_beside_job(prepared)) is not None:
        yield f"this is a new run; the one of this name in the job's folder: -o {other}"
    if earlier and str(prepared.options.job) == "-" and not prepared.is_named:
        yield (
            f"the run {prepared.run_dir.name} has {counted(earlier, 'row')} of earlier pipes, which"
            " count too; --name NAME begins a run of its own"
        )


def reads_all_rows(prepared: RunContext, *, of_shard: bool = False) -> bool:
    """Return whether a start reads all rows of the input, or of its shard, and these are sent."""
    config = prepared.rows_config
    selections = (config.where, config.limit, config.sample, None if of_shard else config.shard)
    return all(selection is None for selection in selections)


def _run_beside_job(prepared: RunContext) -> Path | None:
    """Return a run of the same name in the job's folder, where that is not the current folder."""
    options, job = prepared.options, prepared.job
    if options.output not in (None, "-") or options.job is None:
        return None
    folder = options.job.parent / (job.results.dir.text if job.results.dir else "runs") / job.name
    is_other = (options.cwd / folder).resolve() != prepared.run_dir.resolve()
    return folder if is_other and RunDir(options.cwd / folder).is_run() else None


def find_unseen_failures(prepared: RunContext, done: DoneIndex) -> UnseenRows | None:
    """Return the failed units of earlier starts, to drop those that the input no longer holds.

    Accepted truncated answers are no failures.

    Return None where that cannot be decided: not all rows are read, or nothing had failed. A shard
    knows its own units by the row key, which units do not hold where rows have several answers or
    stages.
    """
    config, stages = prepared.rows_config, prepared.stages
    if not reads_all_rows(prepared, of_shard=prepared.job.answers == 1 and not stages):
        return None
    accepted = {ACCEPTED_CODE}
    outputs = [prepared.job.output, *(stage.spec.output for stage in stages)]
    if any(output is not None and output.truncated == "accept" for output in outputs):
        accepted.add(TRUNCATED_CODE)
    outcomes = zip(done.failed_units, done.failed_codes, strict=True)
    units = [unit for unit, code in outcomes if code not in accepted]
    if config.shard:
        part, parts = config.shard
        salt = salt_of(STAGE, 0)
        units = [unit for unit in units if (unit ^ salt) % parts == part - 1]
    return UnseenRows(units) if units else None


def last_stage(stages: Sequence[PreparedStage]) -> LastStage | None:
    """Return the last of ``stages``; None where there are none and all outcomes count."""
    if not stages:
        return None
    last = stages[-1]
    return LastStage(last.name, last.spec.kind == "sql")


def expanding_stages(stages: Sequence[PreparedStage]) -> dict[str, bool]:
    """Return the names of all stages in results, and whether one row becomes several there."""
    expands = {stage.name for stage in stages if stage.spec.kind == "expand"}
    return {name: name in expands for name in stage_names(stages)}


def stage_names(stages: Sequence[PreparedStage]) -> list[str]:
    """Return the names of all stages in results; sections of a loop come before the loop."""
    names = []
    for stage in stages:
        if stage.spec.kind == "loop":
            names += [section_stage(stage.name, request.name) for request in stage.requests]
        names.append(stage.name)
    return names
