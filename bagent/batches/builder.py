"""Construction of batches: open batches by route and model, and duplicate requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from bagent.backends.request import Request
from bagent.batches.files import (
    FOLDER,
    BatchFiles,
    BatchFileWriter,
    BatchItem,
    batch_items,
)
from bagent.batches.record import LIVE, BatchRecord, Ledger, ledger_parts, ledger_path, read_ledger
from bagent.batches.service import BatchService
from bagent.stages.dedupe import RecentAnswers
from bagent.store.journal.done_index import UnitSet
from bagent.store.journal.segments import Report, mend_tail, part_order

MAX_OPEN = 16
"""Open batches: rows of a batch file may name any number of models."""

_BITS = 24

OnItem = Callable[[str | None, int, BatchItem], None]
"""Takes an item of an earlier process: the label of its batch, the number of its line, and the item
itself. The label is None for what no later row may copy: a copy, or an item of another part."""


class BatchLimits(msgspec.Struct, frozen=True):
    """Limits of a batch besides the provider's: rows by ``batching.size`` (None: no limit), tokens
    of a model's quota, and dollars. The functions are called when a batch is filled."""

    rows: int | None
    tokens: Callable[[str], int | None]
    usd: Callable[[], float | None]


class RequestCost(msgspec.Struct, frozen=True):
    """The prompt tokens and the maximal price of a request."""

    tokens: int
    usd: float


class _LoadedBatch(NamedTuple):
    """A batch that an earlier process filled."""

    record: BatchRecord
    units: UnitSet
    finished: int  # its rows that an earlier start has finished, without copies


class BatchBuilder:
    """Fills batches and seals them into the ledger.

    Args:
        run_dir: the run directory.
        part: which part of the run this is.
        prefix: begins the labels of this run's batches.
        stage: names the units.

    ``seals`` counts the batches that were sealed.
    """

    def __init__(
        self,
        run_dir: Path,
        part: str,
        prefix: str,
        stage: str,
        service: BatchService,
        bounds: BatchLimits,
    ) -> None:
        self._run_dir = run_dir
        self._part = part
        self._prefix = prefix
        self._stage = stage
        self._service = service
        self._bounds = bounds
        self._open: dict[str, BatchFileWriter] = {}
        self._small: list[BatchFileWriter] = []
        self._recent = RecentAnswers()
        self._loaded: list[_LoadedBatch] = []
        self._closed: set[str] = set()
        self.ledgers: dict[str, Ledger] = {}
        self._next = 1
        self.seals = 0

    # --- what an earlier process left -------------------------------------------------------------

    def load(self, report: Report, on_item: OnItem, is_done: Callable[[int], bool]) -> None:
        """Read the ledgers, and which rows their batches hold; ``on_item`` takes each row.

        The first part takes over the batches of another division of the rows. ``is_done`` returns
        whether an earlier start has finished a unit.

        Raises:
            WriteError: a ledger cannot be mended.
        """
        self.ledgers = {self._part: Ledger(self._run_dir, self._part, report)}
        division, number = part_order(self._part)
        for part in ledger_parts(self._run_dir):
            if part_order(part)[0] == division:
                continue
            if number <= 1:
                self.ledgers[part] = Ledger(self._run_dir, part, report)
            else:
                for record in read_ledger(ledger_path(self._run_dir, part), report).values():
                    self._load_items(record, report, on_item, is_done)
        for ledger in self.ledgers.values():
            for record in ledger.live:
                self._load_items(record, report, on_item, is_done)
        self._next = self.ledgers[self._part].next_number()
        self._remove_strays()

    def _load_items(
        self,
        record: BatchRecord,
        report: Report,
        on_item: OnItem,
        is_done: Callable[[int], bool],
    ) -> None:
        if record.state not in LIVE:
            return
        files = self.files(record)
        if files.copies.exists():
            mend_tail(files.copies, report)
        units, finished = UnitSet(record.rows), 0
        own = record.part == self._part
        for number, item in batch_items(files):
            unit = item.unit(self._stage)
            units.add_all((unit,))
            finished += item.of is None and is_done(unit)
            on_item(record.label if own and item.of is None else None, number, item)
        units.settle()
        self._loaded.append(_LoadedBatch(record, units, finished))

    def _remove_strays(self) -> None:
        """Remove files of batches that were never sealed; their rows are read again."""
        own = f"{self._prefix}-{self._part}-"
        live = {record.label for record in self.records}
        for path in (self._run_dir / FOLDER).glob(f"{own}*"):
            label = path.name.partition(".")[0]
            if label not in live:
                BatchFiles(self._run_dir, label).remove()

    def is_loaded(self, record: BatchRecord) -> bool:
        """Return whether an earlier process filled the batch."""
        return any(loaded.record is record for loaded in self._loaded)

    def finished_rows(self, record: BatchRecord) -> int:
        """Return how many rows of a batch an earlier start has finished."""
        return next((loaded.finished for loaded in self._loaded if loaded.record is record), 0)

    def has(self, unit: int) -> bool:
        """Return whether a batch of an earlier process holds the unit."""
        return any(loaded.units.has(unit) for loaded in self._loaded)

    def has_later(self, record: BatchRecord, unit: int) -> bool:
        """Return whether a batch created after ``record`` holds the unit."""
        return any(
            later.part == record.part and later.number > record.number and units.has(unit)
            for later, units, _ in self._loaded
        )

    # --- filling ----------------------------------------------------------------------------------

    def put(
        self, request: Request, item: BatchItem, cost: RequestCost, *, again: bool
    ) -> tuple[str, int]:
        """Add a request to the open batch of its group; return the batch's label and the line
        number.

        Raises:
            ValueError: the service cannot be asked this.
            WriteError: the disk refuses.
        """
        group, form = self._service.group(request), self._service.form(request)
        writer = self._open.get(group)
        if writer is not None and (writer.form != form or self._is_full(writer, 0, cost, again)):
            self._seal(writer)
            writer = None
        number = writer.rows if writer is not None else 0
        label = self._label(writer.number if writer is not None else self._next)
        line = self._service.line(request, form, self._service.request_name(label, number))
        if len(line) >= self._service.limits.bytes:
            raise ValueError(f"the request has {len(line):,} bytes, more than a batch may have")
        if writer is not None and self._is_full(writer, len(line), cost, again):
            self._seal(writer)
            return self.put(request, item, cost, again=again)
        if writer is None:
            writer = self._new(group, request)
        writer.add(line, item)
        writer.tokens += cost.tokens
        writer.most_usd += cost.usd
        writer.again += again
        return label, number

    def _new(self, group: str, request: Request) -> BatchFileWriter:
        if len(self._open) >= MAX_OPEN:
            self._seal(max(self._open.values(), key=lambda writer: writer.rows))
        files = BatchFiles(self._run_dir, self._label(self._next))
        new_writer = BatchFileWriter(files, self._next, group, self._service.form(request))
        self._next += 1
        self._open[group] = new_writer
        return new_writer

    def _label(self, number: int) -> str:
        return f"{self._prefix}-{self._part}-{number}"

    def _is_full(self, writer: BatchFileWriter, size: int, cost: RequestCost, again: bool) -> bool:
        limits, bounds = self._service.limits, self._bounds
        if writer.rows >= min(limits.rows, bounds.rows or limits.rows):
            return True
        if writer.bytes + size + 1 > limits.bytes:
            return True
        tokens = bounds.tokens(writer.group)
        if tokens is not None and writer.tokens + cost.tokens > tokens:
            return True
        # Rows of an earlier batch are always taken, whatever budget is left.
        usd = None if again else bounds.usd()
        return usd is not None and writer.most_usd + cost.usd > usd

    # --- equal requests ---------------------------------------------------------------------------

    def remember(self, request_hash: int | None, label: str, number: int) -> None:
        """Offer the answer of this request to equal requests."""
        if request_hash is not None:
            batch = int(label.rpartition("-")[2])
            self._recent.put(request_hash, batch << _BITS | number)

    def close(self, record: BatchRecord) -> None:
        """Let no more equal requests join a batch: from now on its rows are taken from it."""
        self._closed.add(record.label)

    def leader(self, request_hash: int | None) -> tuple[str, int] | None:
        """Return the batch and line number of an equal request whose answer is not read yet."""
        packed = None if request_hash is None else self._recent.get(request_hash)
        if packed is None:
            return None
        batch, number = packed >> _BITS, packed & ((1 << _BITS) - 1)
        label = self._label(batch)
        record = self.ledgers[self._part].records.get(batch)
        is_open = any(writer.number == batch for writer in self._open.values())
        is_live = record is not None and record.state in LIVE and label not in self._closed
        return (label, number) if is_open or is_live else None

    def copy(self, label: str, item: BatchItem) -> None:
        """Add a row that takes the answer of line ``item.of`` of a batch.

        Raises:
            WriteError: the disk refuses.
        """
        BatchFiles(self._run_dir, label).append_copy(item)

    # --- sealing ----------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether unsealed batches hold rows."""
        return bool(self._open or self._small)

    @property
    def open_rows(self) -> int:
        """The rows in unsealed batches."""
        return sum(writer.rows for writer in self._open.values())

    @property
    def open_again(self) -> bool:
        """Whether unsealed batches hold rows of an earlier batch."""
        return any(writer.again for writer in (*self._open.values(), *self._small))

    def seal_all(self) -> None:
        """Seal every open batch."""
        for writer in list(self._open.values()):
            self._seal(writer)

    def _seal(self, writer: BatchFileWriter) -> None:
        del self._open[writer.group]
        writer.seal()
        self.seals += 1
        if writer.rows < self._service.limits.least:
            self._small.append(writer)
            return
        record = BatchRecord(
            number=writer.number,
            label=self._label(writer.number),
            part=self._part,
            group=writer.group,
            rows=writer.rows,
            bytes=writer.bytes,
            tokens=writer.tokens,
            form=writer.form,
            most_usd=writer.most_usd or None,
        )
        self.save(record)

    def small(self) -> Iterator[BatchFiles]:
        """Yield sealed files with too few rows for a batch; each is removed afterwards."""
        while self._small:
            yield self._small[0].files
            self._small.pop(0).drop()

    def drop_open(self) -> None:
        """Discard unsealed batches; their rows are read again."""
        for writer in (*self._open.values(), *self._small):
            writer.drop()
        self._open.clear()
        self._small.clear()

    # --- the ledger -------------------------------------------------------------------------------

    @property
    def records(self) -> list[BatchRecord]:
        """The unfinished batches: those taken over first, then by number."""
        own = self.ledgers[self._part]
        others = [ledger for ledger in self.ledgers.values() if ledger is not own]
        return [record for ledger in (*others, own) for record in ledger.live]

    @property
    def spent(self) -> float:
        """The dollars spent on finished batches, at most where the cost is unknown."""
        done = [
            record
            for ledger in self.ledgers.values()
            for record in ledger.records.values()
            if record.state == "done"
        ]
        return sum(r.cost_usd if r.cost_usd is not None else r.most_usd or 0.0 for r in done)

    def save(self, record: BatchRecord, *, sync: bool = True) -> None:
        """Record the state of a batch in its ledger. Raises WriteError."""
        self.ledgers[record.part].save(record, sync=sync)

    def files(self, record: BatchRecord) -> BatchFiles:
        """Return the files of a batch."""
        return BatchFiles(self._run_dir, record.label)
