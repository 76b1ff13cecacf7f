"""Where the batches of a run are noted: one line for every change, on disk before the next step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bagent.batches.record import LIVE, BatchRecord
from bagent.store.inside import read_inside
from bagent.store.segments import Report, mend_tail, write_error

_NAME = re.compile(r"batches-(all|\d+-of-\d+)\.jsonl")
_decode = msgspec.json.Decoder(BatchRecord).decode
_encode = msgspec.json.Encoder().encode


def ledger_path(run_dir: Path, part: str) -> Path:
    """Where the ledger of a part is."""
    return run_dir / "journal" / f"batches-{part}.jsonl"


def parts_of(run_dir: Path) -> list[str]:
    """The parts of a run that have a ledger."""
    found = (_NAME.fullmatch(path.name) for path in (run_dir / "journal").glob("batches-*.jsonl"))
    return sorted(match[1] for match in found if match)


def read_ledger(path: Path, report: Report) -> dict[int, BatchRecord]:
    """The batches of one ledger as they stand, by number; a torn last line is left out."""
    found: dict[int, BatchRecord] = {}
    try:
        lines = read_inside(path).split(b"\n")
    except FileNotFoundError:
        return found
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = _decode(line)
        except msgspec.DecodeError:
            report(f"{path}:{number}: a broken line, left out")
            continue
        found[record.number] = record
    return found


class Ledger:
    """The ledger of one part, for its one owner.

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
        """Note ``record`` as it is now; with ``sync`` it is on disk when this returns.

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
        """The batches that are not done, by number."""
        return [self.records[n] for n in sorted(self.records) if self.records[n].state in LIVE]

    def next_number(self) -> int:
        """A number that no batch of this part had yet."""
        return max(self.records, default=0) + 1


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def sync_folder(folder: Path) -> None:
    """Bring a folder's new names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def all_records(run_dir: Path, report: Report) -> Iterator[BatchRecord]:
    """The batches of all parts of a run, by part and number."""
    for part in parts_of(run_dir):
        records = read_ledger(ledger_path(run_dir, part), report)
        for number in sorted(records):
            yield records[number]
