"""The open run directory of a running session: lock, journal, finished rows, totals."""

from __future__ import annotations

import os
import platform
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from bagent import __version__
from bagent.backends.request import EMBEDDINGS
from bagent.clocks import unix
from bagent.errors import EXIT_OK, EXIT_ROWS_FAILED, OwnedError, UsageError, WriteError
from bagent.files import link_error
from bagent.redaction import Redactor
from bagent.runs.context import STAGE, WORKER, RunContext, make_redactor
from bagent.runs.ending import TablesChild
from bagent.runs.live_totals import LiveTotals
from bagent.runs.resume import (
    expanding_stages,
    find_unseen_failures,
    last_stage,
    make_retry_policy,
    notes_of_earlier_starts,
    reads_all_rows,
    resent_kinds,
    stage_names,
)
from bagent.stages.dedupe import RECENT_ANSWERS
from bagent.store.journal.codec import unit_of
from bagent.store.journal.done_index import DoneIndex, ResumePolicy, load_index, units_of
from bagent.store.journal.edited_rows import EditedRows, UnseenRows
from bagent.store.journal.journal import Journal, Syncer
from bagent.store.journal.journal_files import JournalFiles
from bagent.store.journal.removed_rows import located, replaced_units
from bagent.store.journal.segments import part_order
from bagent.store.lock import LockRenewer, Process, RunLock, is_live, owners, wait_for_orphans
from bagent.store.results import AnswerStore, ResultQuery, encode_result, iter_results
from bagent.store.run_dir import (
    JobChange,
    OnChange,
    RunDir,
    RunInfo,
    Start,
    find_run,
    with_ends,
)
from bagent.store.run_input import input_reader
from bagent.store.tables.row_feed import InputRows
from bagent.store.totals import (
    LastStage,
    ProgressFile,
    ToolCount,
    count_tools,
    run_codes,
    stage_causes,
)
from bagent.types import Json, Outcome, Row


@dataclass
class RunStore:
    """The run directory of a running session; made by :func:`open_run`."""

    directory: RunDir
    part: str
    owner: RunLock
    journal: Journal
    syncer: Syncer
    renewer: LockRenewer
    done: DoneIndex
    info: RunInfo
    """The content of ``run.json``; its SQL may be masked."""
    rows: str
    """How the input is read, as JSON."""
    live_totals: LiveTotals
    keep_input: bool
    on_change: OnChange
    earlier: AnswerStore | None = None
    tables: TablesChild | None = None
    """Makes the tables at the end; None where the job wants none."""
    notes: list[str] = field(default_factory=list)
    """Messages for people about earlier starts."""
    last: LastStage | None = None
    progress: ProgressFile = field(init=False)
    tool_names: set[str] = field(default_factory=set)
    missing: UnseenRows | None = None
    """Failures of earlier starts; None where rows that left the input cannot be told."""
    compared: bool = False
    """Edited rows were looked for in all lines of earlier starts."""
    seen: array[int] | None = None
    """Finished units that the input holds; None where those that it does not cannot be told."""
    expands: Mapping[str, bool] = field(default_factory=dict)
    """The stages in their order, and whether one row becomes several there."""
    absent: int = 0
    """Good results of the last stage whose rows left the input; known once they were looked for."""
    threaded: bool = True
    """Threads sync the journal and renew the lock; else :meth:`tick` does."""
    _closed: bool = False

    def __post_init__(self) -> None:
        self.progress = ProgressFile(self.path, self.part)
        self._opened = self.journal.end
        self._earlier = {(i.segment.part, i.segment.number): len(i) for i in self.done.indexes}
        self.watched: list[UnseenRows] = [self.missing] if self.missing else []
        """Units that are marked while the input is read."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    @property
    def pieces(self) -> Path:
        """The index of the input: which rows are in which piece of it."""
        return self.directory.journal / f"input-{self.part}.pieces"

    @property
    def finished(self) -> int:
        """Units that stay as they are."""
        return len(self.done)

    @property
    def unmatched(self) -> int:
        """Finished units that the input, as far as it was read, does not hold."""
        return 0 if self.seen is None else max(0, len(self.done) - len(self.seen))

    @property
    def recorded(self) -> int:
        """Units with an outcome of an earlier start, good or bad."""
        return sum(self.done.codes.values())

    @property
    def reuse(self) -> Callable[[int], Outcome | None] | None:
        """Finds the ok outcome of an equal request in the reused run."""
        return self.earlier.find if self.earlier is not None else None

    def recorded_answers(self) -> Iterator[tuple[int, int]]:
        """Yield request hash and location of the newest answers of earlier starts."""
        return self.done.answered_requests(self.part, RECENT_ANSWERS)

    def pending(self, rows: Sequence[Row], answers: int) -> list[list[int]]:
        """Return the answers of each row that are still to do."""
        if not (self.recorded or self.watched):
            return [list(range(answers))] * len(rows)
        return [self._pending(row, answers) for row in rows]

    def _pending(self, row: Row, answers: int) -> list[int]:
        has = self.done.has
        units = [unit_of(row.key, STAGE, answer) for answer in range(answers)]
        pending = [answer for answer, unit in enumerate(units) if not has(unit)]
        for answer in pending:
            self.live_totals.read(units[answer])
        if self.seen is not None and len(pending) < answers:
            self.seen.extend(unit for n, unit in enumerate(units) if n not in pending)
        self._mark_seen(units)
        return pending

    def repeats(self, row: Row, answers: int) -> list[int]:
        """Return the answers of ``row`` that are still to do if one of them failed earlier."""
        units = [unit_of(row.key, STAGE, answer) for answer in range(answers)]
        pending = [answer for answer, unit in enumerate(units) if not self.done.has(unit)]
        failed = self.live_totals.failed_earlier
        return pending if any(failed(units[answer]) for answer in pending) else []

    def _mark_seen(self, units: Iterable[int]) -> None:
        for watched in self.watched:
            for unit in units:
                watched.mark_seen(unit)

    def forget_missing(self) -> None:
        """Take back the failures of rows that the completely read input no longer holds."""
        missing, self.missing = self.missing, None
        self._take_back(set(missing.unseen()) if missing is not None else set())

    def _take_back(self, units: Set[int]) -> None:
        for unit, (stage, answer) in located(self.done.indexes, units).items():
            self.journal.write_tombstone(unit, stage, answer)

    def note_current(self, unit: int, *, earlier: bool) -> None:
        """Note that a stage has an outcome of a row, of this start or of an earlier one."""
        if earlier and self.seen is not None:
            self.seen.append(unit)
        self._mark_seen((unit,))

    def all_finished(self, keys: Sequence[int], answers: int) -> bool:
        """Return whether all of these rows are finished."""
        for answer in range(answers):
            if not self.done.has_all(units_of(keys, STAGE, answer)):
                return False
        if self.seen is not None or self.watched:
            for answer in range(answers):
                units = units_of(keys, STAGE, answer)
                if self.seen is not None:
                    self.seen.extend(units)
                self._mark_seen(units)
        return True

    def forget_edited(self) -> None:
        """Take back finished rows that were edited and have moved.

        Call it once all of the input was read, and all its rows have ended.
        """
        seen, self.seen = self.seen, None
        if seen is None:
            return
        self.info.starts[-1].compared = True
        replaced = self.live_totals.is_replaced
        removed = self.done.not_among(seen)
        folder, indexes = self.directory.journal, self.done.indexes
        since = self._opened if self.compared else None
        units = replaced_units(folder, indexes, removed, since, self.expands) if removed else set()
        self._take_back({unit for unit in units if not replaced(unit)})
        if self.last is not None:
            places = located(indexes, {unit for unit in removed if not replaced(unit)})
            self.absent = sum(stage == self.last.name for stage, _ in places.values())

    def begin(
        self,
        model: str | None,
        endpoints: list[dict[str, Json]],
        simulated: bool,
        prices: Sequence[Json] = (),
    ) -> None:
        """Write the model, the endpoints and the prices of each stage before anything is sent.

        Raises:
            ChangedError: the run began with another model.
        """
        fingerprints = self.info.fingerprints
        if model is not None:
            now = {**fingerprints, "model": model}
            self.directory.check_fingerprint(now, self.on_change, self.part)
            fingerprints["model"] = model
        self.info.endpoints = self.journal.redact.values(endpoints)
        self.info.prices = list(prices)
        self.info.job.pop("simulated", None)
        if simulated:
            self.info.job["simulated"] = True
        self.directory.save(self.info, self.part)

    def tick(self) -> None:
        """Write buffered records and check the lock. Call it a few times a second.

        Raises:
            StoppedEarly: another process has taken over the run.
            WriteError: the disk refuses.
        """
        self.journal.tick()
        if not self.threaded:
            self.syncer.step()
            self.renewer.step()
        if self.renewer.lost is not None:
            raise self.renewer.lost

    def input_ended(self) -> None:
        """Start the tables process once all rows are read."""
        if self.tables is not None:
            self.tables.start()

    def stop_requested(self) -> bool:
        """Return whether the file ``stop`` exists."""
        return self.directory.stop_requested()

    def codes(self) -> Counter[int]:
        """Count the rows of this part over all its starts by outcome code."""
        self.journal.save_index()
        part = None if self.part == "all" else self.part
        return run_codes(self.path, part, self.last, accept=self.live_totals.accept)

    def tools(self) -> dict[str, ToolCount]:
        """Count the calls of each tool over all starts of this part."""
        if not self.tool_names:
            return {}
        with suppress(WriteError):
            self.journal.flush()
        counts = count_tools(self.path, None if self.part == "all" else self.part)
        return {name: ToolCount() for name in sorted(self.tool_names)} | counts

    def causes(self) -> dict[str, int]:
        """Count the failures of all stages by kind."""
        return stage_causes(self.path, None if self.part == "all" else self.part)

    def earlier_lines(self) -> Iterator[bytes]:
        """Yield the current results that earlier starts wrote, in the order of writing."""
        return self._lines(ResultQuery(first=self._earlier))

    def ordered_lines(self) -> Iterator[bytes]:
        """Yield the result lines of every row, in input order."""
        return self._lines(ResultQuery(ordered=True))

    def _lines(self, query: ResultQuery) -> Iterator[bytes]:
        self.journal.save_index()
        find = partial(InputRows, input_reader(self.rows.encode())) if self.keep_input else None
        for result in iter_results(self.path, query, report=self.notes.append, find_input=find):
            yield encode_result(result).rstrip(b"\n")

    def record_end(self, code: int, reason: str, action: str) -> None:
        """Write into run.json how this start ended; for the arguments see :meth:`close`."""
        start = self.info.starts[-1]
        start.ended_at, start.exit_code = unix(), code
        start.reason, start.action = reason, action
        self.directory.save(self.info, self.part)

    def close(
        self,
        code: int,
        reason: str = "",
        action: str = "",
        dropped: Mapping[str, int] | None = None,
        copied: int = 0,
        absent: int = 0,
        cut_at: tuple[int, int] | None = None,
    ) -> None:
        """Sync and close the journal, write the end into run.json, release the lock.

        Args:
            code: the exit code.
            reason: why the run stopped early.
            action: what a person must do first.
            dropped, copied, absent, cut_at: as in :class:`~bagent.store.run_dir.Start`.

        Raises:
            WriteError: something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        if self.tables is not None and code not in (EXIT_OK, EXIT_ROWS_FAILED):
            self.tables.close()
        try:
            self.syncer.stop()
            self.journal.close()
            self.renewer.stop()
            self.info.starts[-1].dropped = dict(dropped or {})
            self.info.starts[-1].copied = copied
            self.info.starts[-1].absent = absent
            self.info.starts[-1].cut_at = cut_at
            self.info.starts[-1].idle = self.journal.end == self._opened
            if self.owner.is_held():  # else it would overwrite what the new owner has written
                self.record_end(code, reason, action)
        finally:
            self.owner.release()


def open_run(
    prepared: RunContext, tables: TablesChild | None = None, *, threaded: bool = True
) -> RunStore:
    """Lock the run directory, check that the job is unchanged, open the journal.

    Args:
        tables: makes the tables at the end, if they are wanted.
        threaded: start threads that sync the journal and renew the lock.

    Raises:
        OwnedError: another live process works on this part.
        ChangedError: the job changed since the run began.
        WriteError: the directory cannot be written.
    """
    options, notes = prepared.options, list[str]()
    on_change = cast("OnChange", options.on_change)
    fingerprints = prepared.fingerprints()
    earlier = _earlier(prepared)
    directory = open_run_dir(prepared, fingerprints, notes)
    # The default clock was bound at import, before a simulation replaces the time.
    process = Process.this(ends_with_parent=prepared.options.progress == WORKER)
    owner = RunLock.acquire(directory.path, prepared.part, clock=time.time, process=process)
    with ExitStack() as undo:
        undo.callback(owner.release)
        changed = check_unchanged(directory, fingerprints, on_change, prepared.part)
        info = directory.load(prepared.part)
        policy = make_retry_policy(prepared, info, changed=bool(changed))
        directory.clear_stop()
        journal, done, live_totals = _open_journal(
            prepared, directory, policy, notes, new_segment=owner.took_over
        )
        notes += notes_of_earlier_starts(prepared, changed, done)
        compared = _were_compared(info, prepared.part, done)
        info = _new_info(prepared, info, fingerprints, changed, done)
        directory.save(info, prepared.part)
        syncer, renewer = _start_threads(journal, owner, threaded)
        undo.pop_all()
    return RunStore(
        directory,
        prepared.part,
        owner,
        journal,
        syncer,
        renewer,
        done,
        info,
        prepared.rows_config.to_json(),
        live_totals,
        prepared.job.results.keep_input,
        on_change,
        earlier=earlier,
        tables=tables,
        notes=notes,
        last=last_stage(prepared.stages),
        missing=find_unseen_failures(prepared, done),
        compared=compared,
        seen=array("Q") if done.codes and reads_all_rows(prepared) else None,
        expands=expanding_stages(prepared.stages),
        threaded=threaded,
    )


def _were_compared(info: RunInfo | None, part: str, done: DoneIndex) -> bool:
    """Return whether edited rows were looked for in all lines of earlier starts."""
    if info is None or not info.starts or not info.starts[-1].compared:
        return False
    return all(index.segment.part == part for index in done.indexes)


def _start_threads(journal: Journal, owner: RunLock, threaded: bool) -> tuple[Syncer, LockRenewer]:
    """Return what syncs the journal and renews the lock; started if ``threaded``."""
    syncer, renewer = Syncer(journal), LockRenewer(owner)
    if threaded:
        syncer.start()
        renewer.start()
    return syncer, renewer


def check_unchanged(
    directory: RunDir, fingerprints: dict[str, str], on_change: OnChange, part: str
) -> list[str]:
    """Return what changed of the job, where the options allow it.

    Raises:
        ChangedError: something changed and the options do not allow it.
    """
    refuse_or_keep = "refuse" if on_change == "fresh" else on_change
    return directory.check_fingerprint(fingerprints, refuse_or_keep, part)


def _open_journal(
    prepared: RunContext,
    directory: RunDir,
    policy: ResumePolicy,
    notes: list[str],
    *,
    new_segment: bool,
) -> tuple[Journal, DoneIndex, LiveTotals]:
    """Return the open journal, and what earlier starts finished."""
    part, report = prepared.part, notes.append
    files = JournalFiles.open(directory.path, part, report=report, new_segment=new_segment)
    # Rows that another division into parts finished count too.
    done = load_index(directory.path, None, policy, report=report, seen_by=part)
    live_totals = LiveTotals(done, accept=policy.accept_truncated)
    journal = Journal(
        files,
        time.monotonic,
        redact=make_redactor(prepared.job, prepared.options.env),
        edited=EditedRows(done.indexes) if done.codes else None,
        on_tombstone=live_totals.take_back_unit,
    )
    return journal, done, live_totals


def open_run_dir(prepared: RunContext, fingerprints: dict[str, str], notes: list[str]) -> RunDir:
    """Make the run directory; move an old run aside where the options say so.

    Raises:
        OwnedError: a live process works on it by another division into parts.
        WriteError: it cannot be made.
        UsageError: a file of it is a link.
    """
    directory = RunDir(prepared.run_dir)
    wait_for_orphans(directory.path)
    if directory.is_run() and _is_started_fresh(directory, prepared, fingerprints):
        from bagent.batches.record import outstanding_warning

        aside = directory.move_aside()
        notes.append(f"the old run is now {aside}")
        notes += filter(None, [outstanding_warning(aside)])
    RunDir.create(prepared.run_dir, prepared.job.results.mode)
    for path in (*directory.path.glob("*.log"), directory.path / "input.jsonl"):
        if path.is_symlink():  # writing would follow it
            raise link_error(path)
    _refuse_other_division(directory, prepared.part)
    return directory


def _refuse_other_division(directory: RunDir, part: str) -> None:
    """Refuse while a live process works on the run as another number of parts."""
    for other, record in owners(directory.path).items():
        if part_order(other)[0] != part_order(part)[0] and is_live(record, time.time()):
            raise OwnedError(
                f"{record.process} is working on this run as {other}",
                hint="wait for it, stop it, or give another --name",
            )


def _is_started_fresh(
    directory: RunDir, prepared: RunContext, fingerprints: dict[str, str]
) -> bool:
    """Return whether to move the old run aside: --fresh, or a change with --on-change fresh."""
    options = prepared.options
    if options.fresh:
        return True
    if options.on_change != "fresh":
        return False
    return bool(directory.check_fingerprint(fingerprints, "continue", prepared.part))


def _new_info(
    prepared: RunContext,
    before: RunInfo | None,
    fingerprints: dict[str, str],
    changed: list[str],
    done: DoneIndex,
) -> RunInfo:
    """Return the new content of ``run.json``."""
    last_at = max((index.totals.last or 0.0 for index in done.indexes), default=0.0)
    job, masked = prepared.job, prepared.job.masked()
    if before is not None and "simulated" in before.job:
        masked["simulated"] = before.job["simulated"]
    changes = list(before.changes) if before else []
    if before is not None and changed:
        changes.append(JobChange(unix(), prepared.part, changed, before.job, len(done)))
    fingerprints = dict(fingerprints)
    if before is not None and "model" in before.fingerprints:
        fingerprints.setdefault("model", before.fingerprints["model"])
    start = Start(
        at=unix(),
        part=prepared.part,
        host=platform.node(),
        pid=os.getpid(),
        version=__version__,
        command=prepared.options.command,
        resent=sorted(resent_kinds(prepared)),
    )
    return RunInfo(
        name=job.name,
        job=masked,
        fingerprints=fingerprints,
        versions={"bagent": __version__, "python": platform.python_version()},
        endpoints=before.endpoints if before else [],
        prices=before.prices if before else [],
        rows=_mask_input_sql(prepared),
        stages=stage_names(prepared.stages) or [STAGE],
        query_last=bool(prepared.stages) and prepared.stages[-1].spec.kind == "sql",
        answer_columns=_all_columns(prepared),
        keep_input=job.results.keep_input,
        parquet=job.results.parquet,
        duckdb=job.results.duckdb,
        created_at=before.created_at if before else start.at,
        starts=[*(with_ends(before.starts, last_at) if before else []), start],
        changes=changes,
    )


def _mask_input_sql(prepared: RunContext) -> Json:
    """Return the rows configuration with the secrets in its SQL masked."""
    rows: Any = msgspec.json.decode(prepared.rows_config.to_json())
    redact = Redactor(prepared.job.source.secrets)
    rows["where"] = redact.values(rows["where"])
    rows["inputs"] = [
        redact.values(item) if isinstance(item, dict) and "sql" in item else item
        for item in rows["inputs"]
    ]
    return rows


def _all_columns(prepared: RunContext) -> list[tuple[str | None, str]]:
    """Return the typed columns of all stages; the first type of a name counts."""
    schemas = [prepared.schema]
    schemas += [request.schema for stage in prepared.stages for request in stage.requests]
    types: dict[str | None, str] = {}
    for schema in schemas:
        if schema is not None:
            for name, (_, kind) in zip(schema.column_properties, schema.columns, strict=True):
                types.setdefault(name, kind)
    if any(stage.spec.kind == "embed" for stage in prepared.stages):
        types.setdefault(None, "FLOAT[]")
    elif EMBEDDINGS in prepared.routes:
        types.setdefault(None, "FLOAT[][]")  # a line may ask for several vectors
    return list(types.items())


def _earlier(prepared: RunContext) -> AnswerStore | None:
    options = prepared.options
    if options.reuse is None:
        return None
    folder = prepared.job.results.dir.path if prepared.job.results.dir else options.cwd / "runs"
    directory = find_run(options.reuse, folder)
    if directory.path.resolve() == prepared.run_dir.resolve():
        raise UsageError("--reuse names this run itself", hint="name another run")
    return AnswerStore(directory.path, lambda _: None, by_request=True)
