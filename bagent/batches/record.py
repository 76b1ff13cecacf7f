"""Ledger of batches and their status at the provider."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from bagent.backends.profile import Form
from bagent.files import read_regular
from bagent.store.journal.segments import Report, mend_tail, write_error

State = Literal["sealed", "sending", "waiting", "ended", "done"]
"""``sealed``: on disk, unsent. ``sending``: being created, or created without confirmation.
``waiting``: at the provider. ``ended``: ready to be read. ``done``: every row is finished or in a
later batch."""

LIVE: frozenset[str] = frozenset({"sealed", "sending", "waiting", "ended"})
OUT: frozenset[str] = frozenset({"sending", "waiting"})
"""States in which a batch may use the account's quota."""


class BatchError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a provider refused a batch; ``line`` counts from 1, None for the whole batch."""

    message: str
    code: str = ""
    line: int | None = None


class BatchRecord(msgspec.Struct, omit_defaults=True):
    """One batch, as a line of the ledger; a later line for the same number replaces it.

    Times are Unix seconds.
    """

    number: int
    label: str
    """Its name at the provider."""
    part: str
    group: str
    """Route and model of all its rows."""
    rows: int
    bytes: int
    tokens: int
    """Estimated prompt tokens."""
    form: Form
    state: State = "sealed"
    file_id: str | None = None
    batch_id: str | None = None
    sent_at: float | None = None
    polled_at: float | None = msgspec.field(default=None, name="looked_at")
    ended_at: float | None = None
    cancelled_at: float | None = None
    """When it was late and its cancellation was requested."""
    word: str = ""
    """The provider's status."""
    ended: int = 0
    """Finished rows at the provider."""
    failed: int = 0
    outputs: tuple[str, ...] = ()
    faults: tuple[BatchError, ...] = ()
    """Why it was refused as a whole."""
    unconfirmed: bool = msgspec.field(default=False, name="doubtful")
    """Identified by its size, not by its name."""
    rejected_ids: tuple[str, ...] = msgspec.field(default=(), name="not_ours")
    """Batches identified so that belong to others."""
    most_usd: float | None = None
    """Maximal cost."""
    cost_usd: float | None = None

    @property
    def route(self) -> str:
        """The route of all its requests, such as ``/v1/chat/completions``."""
        return self.group.partition(" ")[0]

    @property
    def model(self) -> str:
        """The model of all its requests; empty if they name none."""
        return self.group.partition(" ")[2]


class BatchStatus(msgspec.Struct, frozen=True):
    """A batch's status as its provider reports it."""

    word: str
    over: bool = False
    """Nothing more will come."""
    ended: int = 0
    failed: int = 0
    outputs: tuple[str, ...] = ()
    """The results to read."""
    faults: tuple[BatchError, ...] = ()
    """Why it was refused as a whole."""
    ended_at: float | None = None


class ServiceLimits(msgspec.Struct, frozen=True):
    """The limits of one batch."""

    rows: int
    bytes: int
    """Size of the file."""
    least: int = 1
    """Minimal number of rows."""


_NAME = re.compile(r"batches-(all|\d+-of-\d+)\.jsonl")
_decode = msgspec.json.Decoder(BatchRecord).decode
_encode = msgspec.json.Encoder().encode


def ledger_path(run_dir: Path, part: str) -> Path:
    """Return the path of a part's ledger."""
    return run_dir / "journal" / f"batches-{part}.jsonl"


def ledger_parts(run_dir: Path) -> list[str]:
    """Return the parts of a run that have a ledger."""
    matches = (_NAME.fullmatch(path.name) for path in (run_dir / "journal").glob("batches-*.jsonl"))
    return sorted(match[1] for match in matches if match)


def read_ledger(path: Path, report: Report) -> dict[int, BatchRecord]:
    """Return the current batches of a ledger by number; a torn last line is ignored."""
    records: dict[int, BatchRecord] = {}
    try:
        lines = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return records
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = _decode(line)
        except msgspec.DecodeError:
            report(f"{path}:{number}: a broken line, left out")
            continue
        records[record.number] = record
    return records


class Ledger:
    """The ledger of one part, written by its one owner.

    Raises:
        WriteError: it cannot be written.
    """

    def __init__(self, run_dir: Path, part: str, report: Report) -> None:
        self.part = part
        self.path = ledger_path(run_dir, part)
        if self.path.exists():
            mend_tail(self.path, report)
        self.records = read_ledger(self.path, report)

    def save(self, record: BatchRecord, *, sync: bool = True) -> None:
        """Append the state of ``record``; with ``sync`` it is on disk on return.

        Raises:
            WriteError: the disk refuses.
        """
        self.records[record.number] = record
        try:
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                _write(descriptor, _encode(record) + b"\n")
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new and sync:
                sync_folder(self.path.parent)
        except OSError as error:
            raise write_error(self.path, error) from error

    @property
    def live(self) -> list[BatchRecord]:
        """The unfinished batches, by number."""
        return [self.records[n] for n in sorted(self.records) if self.records[n].state in LIVE]

    def next_number(self) -> int:
        """Return the next unused number."""
        return max(self.records, default=0) + 1


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def all_records(run_dir: Path, report: Report) -> Iterator[BatchRecord]:
    """Yield the batches of all parts of a run, by part and number."""
    for part in ledger_parts(run_dir):
        records = read_ledger(ledger_path(run_dir, part), report)
        for number in sorted(records):
            yield records[number]


_WORDS = {
    "sealed": "to be sent",
    "sending": "being sent",
    "waiting": "with the provider",
    "ended": "to be read",
    "done": "done",
}


def status_lines(run_dir: Path, report: Report) -> list[str]:
    """Return a line of counts and a line for each unfinished batch; none without batches.

    Args:
        report: receives messages about broken lines.
    """
    counts: Counter[str] = Counter()
    lines = []
    for record in all_records(run_dir, report):
        counts[record.state] += 1
        if record.state in LIVE:
            lines.append(_line(record))
    if not counts:
        return []
    return [
        ", ".join(f"{counts[state]} {_WORDS[state]}" for state in _WORDS if counts[state]),
        *lines,
    ]


def outstanding_warning(run_dir: Path) -> str:
    """Return a warning about batches that the provider continues to process, empty if none."""
    batch_ids = [
        record.batch_id
        for record in all_records(run_dir, lambda _: None)
        if record.state == "waiting"
    ]
    if not batch_ids:
        return ""
    more = ", ..." if len(batch_ids) > 3 else ""
    listed = f"{', '.join(map(str, batch_ids[:3]))}{more}"
    return f"its batches are still with the provider, which will bill them: {listed}"


def _line(record: BatchRecord) -> str:
    parts = [f"batch {record.number}"]
    if record.batch_id is not None:
        parts.append(f"{record.batch_id} {record.word or 'made'}")
    else:
        parts.append(_WORDS[record.state])
    rows = f"{record.rows:,} rows"
    parts.append(f"{record.ended:,} of {rows}" if record.state == "waiting" else rows)
    if record.failed:
        parts.append(f"{record.failed:,} of them failed")
    if record.sent_at is not None:
        parts.append(f"sent {_when(record.sent_at)}")
    if record.cancelled_at is not None:
        parts.append(f"late, cancelled {_when(record.cancelled_at)}")
    if record.polled_at is not None:
        parts.append(f"looked at {_when(record.polled_at)}")
    return ", ".join(parts)


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
