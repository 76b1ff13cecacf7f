"""The run directory: a journal of outcomes, and the tables made from it.

- ``run_dir``: ``run.json`` and finding runs
- ``lock``: one owner per part of a run
- ``journal``: append-only JSON lines and their indexes
- ``results``: reading the journal without DuckDB
- ``totals``: counting the journal without DuckDB; progress files
- ``query``: SQL over the tables, which are renewed when they are stale
- ``run_input``: the input rows of a stored run
- ``tables``: Parquet and DuckDB files
- ``export_batch``: OpenAI batch output lines
- ``publish``: copies of the tables in a bucket or a folder
"""
