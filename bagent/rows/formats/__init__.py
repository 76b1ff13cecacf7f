"""Readers for each input format.

chunks         chunks of rows from any format
jsonl          JSON Lines
json_array     .json files
csv            text with columns
duckdb_source  Parquet files and queries
compression    .gz and .zst
"""
