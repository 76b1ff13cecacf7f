"""The Python API, which :mod:`bagent` exports.

run          `run` and `load_job`: run a job from another program
arguments    checks of arguments, jobs that are dicts, messages in terms of arguments
engines      a run in a thread of this process, or in a process of its own
open_run     `open_run`: read a run during its work or afterwards
row_values   rows of other programs, pandas, polars and Arrow as JSON lines
progress     progress in notebooks and on standard error
"""
