"""The command line.

app             the ``bagent`` command, which finds the subcommand
process         standard files, signals, unhandled errors
options         options that commands share, and names that the shell completes
help            help texts
commands        the commands, one file each
render          what they print
results_export  results as CSV, Parquet or a table
"""
