"""The command line.

app             the ``bagent`` command, which finds the subcommand
process         standard files, signals, unhandled errors
options         options that commands share
help            help texts
completion      names that the shell completes
commands        the commands, one file each
render          what they print
results_export  results as CSV, Parquet or a table
"""
