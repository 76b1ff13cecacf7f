"""Which rows of earlier starts a start takes up again."""

from __future__ import annotations

from bagent.errors import EXIT_NEEDS_PERSON, EXIT_OK, EXIT_ROWS_FAILED
from bagent.runs.options import RunOptions
from bagent.runs.prepare import Prepared
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


def reads_all(prepared: Prepared) -> bool:
    """Whether this start reads every row of the input, and each is one of its own stage."""
    picked = prepared.rows_config
    picks = (picked.where, picked.limit, picked.sample, picked.shard)
    return not prepared.stages and all(pick is None for pick in picks)
