"""The ledger of batches, and their files."""

from __future__ import annotations

from pathlib import Path

from bagent.backends.profile import Form
from bagent.batches.record import BatchRecord, Ledger, all_records, ledger_path, status_lines


def record(number: int) -> BatchRecord:
    return BatchRecord(number, f"b-{number}", "all", "/v1/x m", 4, 100, 10, Form())


def test_the_last_line_of_a_number_counts_and_a_torn_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    ledger = Ledger(tmp_path, "all", print)
    one, two = record(1), record(2)
    ledger.save(one)
    ledger.save(two)
    one.state, one.batch_id = "waiting", "batch_7"
    ledger.save(one)
    with ledger_path(tmp_path, "all").open("ab") as handle:
        handle.write(b'{"number":2,"label":"b-2","st')
    assert [found.state for found in all_records(tmp_path, print)] == ["waiting", "sealed"]
    told: list[str] = []
    again = Ledger(tmp_path, "all", told.append)
    assert [found.batch_id for found in again.live] == ["batch_7", None]
    assert again.next_number() == 3
    assert "unfinished last line" in told[0]
    again.save(two)
    assert len(ledger_path(tmp_path, "all").read_bytes().splitlines()) == 4


def test_how_batches_stand_is_told_in_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    assert status_lines(tmp_path, print) == []
    ledger = Ledger(tmp_path, "all", print)
    one, two, three = record(1), record(2), record(3)
    one.state = "done"
    two.state, two.batch_id, two.word, two.ended, two.failed = "waiting", "b7", "in_progress", 3, 1
    for found in (one, two, three):
        ledger.save(found)
    lines = status_lines(tmp_path, print)
    assert lines == [
        "1 to be sent, 1 with the provider, 1 done",
        "batch 2, b7 in_progress, 3 of 4 rows, 1 of them failed",
        "batch 3, to be sent, 4 rows",
    ]
