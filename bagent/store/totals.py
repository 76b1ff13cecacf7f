"""The totals of a run: one definition for the summary, ``status``, progress and the exit code.

A row counts by its current outcome in the journal, whichever start wrote it. Of a job with several
stages the rows of the last one count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bagent.store.journal.codec import ACCEPTED_CODE, OK_CODE, code_of, kind_of, status_of
from bagent.store.journal.done_index import count_outcomes, open_indexes
from bagent.store.journal.reader import JournalReader, Selection
from bagent.store.run_dir import RunInfo

TRUNCATED_CODE = code_of("truncated", "truncated")


def accept_truncated(codes: Mapping[int, int]) -> Counter[int]:
    """Return the counts by outcome code of a job that accepts truncated answers by now."""
    counts = Counter(codes)
    counts[ACCEPTED_CODE] += counts.pop(TRUNCATED_CODE, 0)
    return counts


class Totals(msgspec.Struct, frozen=True):
    """How many rows have a result, and which.

    ``accepted`` rows are neither ok nor failed: their answers were cut off, and the job accepts
    that. ``by_status`` counts all rows, ``by_kind`` the failed ones.
    """

    ok: int = 0
    accepted: int = 0
    failed: int = 0
    by_status: dict[str, int] = {}
    by_kind: dict[str, int] = {}

    @property
    def rows(self) -> int:
        """How many rows have a result."""
        return self.ok + self.accepted + self.failed

    @classmethod
    def of(cls, codes: Mapping[int, int]) -> Totals:
        """The totals of outcomes counted by :func:`bagent.store.journal.codec.code_of`."""
        statuses: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        for code, number in codes.items():
            if number <= 0:
                continue
            statuses[status_of(code)] += number
            if code not in (OK_CODE, ACCEPTED_CODE):
                kinds[kind_of(code) or status_of(code)] += number
        ok, accepted = max(0, codes.get(OK_CODE, 0)), max(0, codes.get(ACCEPTED_CODE, 0))
        return cls(ok, accepted, kinds.total(), dict(statuses), dict(kinds))


class LastStage(msgspec.Struct, frozen=True):
    """The last stage of a job. ``may_be_empty``: it is a query, which may select no rows."""

    name: str
    may_be_empty: bool = False

    def codes(self, run_dir: Path, part: str | None) -> Counter[int]:
        """Count its current outcomes; those of all stages where all rows failed before it.

        Args:
            run_dir: the run directory.
            part: one part's journal, or None for those of all parts.
        """
        with JournalReader(run_dir, lambda _: None) as lines:
            counts = _count(lines, Selection(stages=frozenset({self.name})), part)
            if not counts and not self.may_be_empty:
                counts = _count(lines, Selection(), part)
                counts.pop(OK_CODE, None)
        return counts


def _count(lines: JournalReader, selection: Selection, part: str | None) -> Counter[int]:
    return Counter(
        ref.code
        for ref in lines.written(selection)
        if part is None or lines.indexes[ref.segment].segment.part == part
    )


def last_stage_of(info: RunInfo | None) -> LastStage | None:
    """Return the last stage of a run; None where it has one only."""
    if info is None or len(info.stages) < 2:
        return None
    return LastStage(info.stages[-1], info.query_last)


def run_codes(
    run_dir: Path, part: str | None, last: LastStage | None, *, accept: bool = False
) -> Counter[int]:
    """Count the rows of a run by the codes of their current outcomes.

    Args:
        run_dir: the run directory.
        part: one part's journal, or None for those of all parts.
        last: the last stage; None where the job has one stage.
        accept: the job accepts truncated answers.
    """
    if last is not None:
        counts = last.codes(run_dir, part)
    else:
        counts = count_outcomes(open_indexes(run_dir, lambda _: None, part=part))
    return accept_truncated(counts) if accept else counts


def stage_causes(run_dir: Path, part: str | None) -> dict[str, int]:
    """Count why rows failed in any stage, by kind.

    Rows that failed since what they are made of had failed are ``bad_input``: that is no cause
    where there is another one.
    """
    kinds = dict(Totals.of(run_codes(run_dir, part, None)).by_kind)
    if len(kinds) > 1:
        kinds.pop("bad_input", None)
    return kinds


def accepts_truncated(job: Mapping[str, Any]) -> bool:
    """Return whether a resolved job, as ``run.json`` has it, accepts truncated answers."""
    output = job.get("output")
    return isinstance(output, dict) and output.get("truncated") == "accept"
