"""Readers for each input format.

chunks           chunks of rows from any format
json             JSON Lines, .json files, and JSON text to the data of a row
csv              text with columns
duckdb_source    Parquet files and queries
compression      .gz and .zst

To add a format: its endings in :mod:`bagent.rows.discovery`, a reader here, and a case in
``chunks``.
"""
