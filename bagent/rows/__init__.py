"""Input rows.

A stream of :class:`bagent.types.Row` from JSON Lines, JSON, CSV, Parquet, text files, DuckDB
queries, OpenAI batch files and pipes. The input is never held in memory.

- ``discovery``: :class:`RowsConfig`, what to read; its files, globs and queries
- ``formats``: a reader for each format
- ``row_keys``: numbers, ids and keys of rows
- ``filter``: ``where``, sample, limit and shard
- ``stdin``: rows from a pipe, and the file that keeps them
- ``plain_jsonl``, ``resume_cache``: skipping rows that an earlier start finished
- ``reader``: :class:`RowReader`, which combines these
- ``warnings``: warnings about rows
"""

from bagent.rows.discovery import Input, RowsConfig
from bagent.rows.formats.json import is_batch_row
from bagent.rows.reader import RowReader, open_rows, read_again
from bagent.rows.row_keys import CompactHashSet

__all__ = [
    "CompactHashSet",
    "Input",
    "RowReader",
    "RowsConfig",
    "is_batch_row",
    "open_rows",
    "read_again",
]
