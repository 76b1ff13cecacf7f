"""Shared ways to write an input and read its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bagent.rows import RowReader, RowsConfig, open_rows
from bagent.types import Row


@pytest.fixture
def source_of(tmp_path: Path) -> Callable[..., RowReader]:
    """Write a file, open it; keywords go to RowsConfig."""

    def make(content: str | bytes, name: str = "in.jsonl", **settings) -> RowReader:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return open_rows(RowsConfig((str(path),), tmp_path, **settings))

    return make


@pytest.fixture
def rows_of(source_of: Callable[..., RowReader]) -> Callable[..., list[Row]]:
    """Write a file and read all its rows."""

    def read(content: str | bytes, name: str = "in.jsonl", **settings) -> list[Row]:
        return [row for batch in source_of(content, name, **settings).batches() for row in batch]

    return read
