"""Where do rows come from?

A stream of :class:`bagent.types.Row` from JSON Lines, JSON, CSV, Parquet, text files, DuckDB
queries, OpenAI batch files and pipes, each row with a number, an id and a key; never the whole
input in memory.
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
