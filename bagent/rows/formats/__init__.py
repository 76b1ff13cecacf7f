"""Readers for each input format.

chunks           chunks of rows from any format
json             JSON Lines, .json files
csv              text with columns
duckdb_source    Parquet files and queries
arrow_durations  units of durations in Parquet files
compression      .gz and .zst

To add a format: its endings in :mod:`bagent.rows.discovery`, a reader here, and a case in
``chunks``.
"""
