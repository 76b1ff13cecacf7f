"""Raw rows on their way to the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagent.bench.records import ClientRow, RowFile
from bagent.errors import WriteError

ROW = ClientRow(0, 0, 1.0, 0.5, [1, 2])


def test_a_full_disk_is_said_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.symlink_to("/dev/full")
    file = RowFile(path)
    file.write(ROW)
    for step in (file.flush, file.close):
        with pytest.raises(WriteError, match=r"cannot write .*rows.jsonl: No space left on device"):
            step()


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="No such file or directory"):
        RowFile(tmp_path / "gone" / "rows.jsonl")
