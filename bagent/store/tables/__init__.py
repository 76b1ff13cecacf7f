"""Parquet and DuckDB tables, built from the journal."""
