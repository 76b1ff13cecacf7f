"""Input rows.

A stream of :class:`bagent.types.Row` from JSON Lines, JSON, CSV, Parquet, text files, DuckDB
queries, OpenAI batch files and pipes. The input is never held in memory.

- ``config``: :class:`RowsConfig`, what to read
- ``discovery``: files, globs and queries, checked before reading
- ``formats``: a reader for each format
- ``decode``: JSON text to row data
- ``row_keys``, ``hash_set``: numbers, ids and keys of rows
- ``filter``: ``where``, sample, limit and shard
- ``stdin``: rows from a pipe, and the file that keeps them
- ``plain_jsonl``, ``resume_cache``: skipping rows that an earlier start finished
- ``reader``: :class:`RowReader`, which combines these
- ``warnings``: warnings about rows
"""

from bagent.rows.config import Input, RowsConfig
from bagent.rows.decode import is_batch_row
from bagent.rows.hash_set import CompactHashSet
from bagent.rows.reader import RowReader, open_rows, read_again

__all__ = [
    "CompactHashSet",
    "Input",
    "RowReader",
    "RowsConfig",
    "is_batch_row",
    "open_rows",
    "read_again",
]
