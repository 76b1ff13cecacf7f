"""Which rows of earlier starts a start takes up again."""

from __future__ import annotations

from collections.abc import Iterable

from bagent.errors import EXIT_NEEDS_PERSON, EXIT_OK, EXIT_ROWS_FAILED
from bagent.runs.options import RunOptions
from bagent.runs.prepare import STAGE, Prepared
from bagent.store.codec import salt_of
from bagent.store.edited import Missing
from bagent.store.index import Policy
from bagent.store.rundir import RunInfo
from bagent.types import PASSING_KINDS


def policy_for(options: RunOptions, info: RunInfo | None) -> Policy:
    """Which outcomes of earlier starts are left as they are."""
    return Policy.parse(
        options.retry or _mended(info, skip_failed=options.skip_failed),
        skip_failed=options.skip_failed,
        ended=_ended_once(info),
    )


def _ended_once(info: RunInfo | None) -> bool:
    """Whether some start got to its end: from then on every row that is not ok is taken up."""
    return info is not None and any(
        start.exit_code in (EXIT_OK, EXIT_ROWS_FAILED) for start in info.starts
    )


def _mended(info: RunInfo | None, *, skip_failed: bool) -> str | None:
    """The kinds to take up again, as ``--retry`` has them, after a stop that asked for a person.

    A person has acted since: what a key or an account refused then may go through now.
    """
    if info is None or skip_failed or _ended_once(info):
        return None
    if all(start.exit_code != EXIT_NEEDS_PERSON for start in info.starts):
        return None
    return ",".join(sorted(PASSING_KINDS | {"auth", "budget"}))


def missing_of(prepared: Prepared, taken_up: Iterable[int]) -> Missing | None:
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
    return Missing(units) if units else None
