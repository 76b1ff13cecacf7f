"""Rows that were edited while an earlier start's batch held them."""

from __future__ import annotations

from bagent.batches.edited import EditedItems
from bagent.batches.files import BatchItem
from bagent.store.journal.edited_rows import UnseenRows
from bagent.types import Row

OLD, NEW = (BatchItem(Row(0, key, "a", {"x": key}, "rows.jsonl", 1), 0) for key in (5, 6))


def test_the_new_content_of_an_edited_row_in_a_batch_of_this_start_is_current():
    units = UnseenRows([OLD.unit("main")])
    edited = EditedItems("main", units, UnseenRows([0]), lambda outcome: True)
    edited.read(NEW.row)
    units.mark_seen(NEW.unit("main"))
    edited.end()
    assert edited.has(OLD)
    assert not edited.has(NEW)
