"""The tables of a run.

- ``schema``: columns, types and descriptions; views over the tables
- ``row_feed``: journal and input to JSON lines in input order
- ``parquet``, ``parquet_concat``: parts made on threads, and joined
- ``outputs``: the Parquet files and the database of a build, put together
- ``build``: one complete build, run in a child process
- ``freshness``: which tables are up to date
- ``export_sql``: columns, ids, conditions on fields, and redaction, as SQL
"""
