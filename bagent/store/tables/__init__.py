"""The tables of a run.

- ``schema``: columns, types and descriptions; views over the tables
- ``row_feed``: journal and input to JSON lines in input order
- ``parquet``, ``parquet_concat``: parts made on threads, and joined
- ``outputs``: the Parquet files and the database of a build, put together
- ``build``: one complete build, run in a child process
- ``freshness``: which tables are up to date
- ``masking``: redaction of fields as SQL
- ``conditions``: conditions in which fields of answers are columns
- ``csv_columns``: the columns of results as CSV
"""
