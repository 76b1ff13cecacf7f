"""Execution of a run: ``bagent run`` from its options to its exit code.

execute             run a job in this process
ending              exit code, tables and summary of a run
context             options and job -> a checked run, before anything is sent
batch_file_check    lines of a batch file that cannot be sent
environment         `BAGENT_*` variables
deadline            `--deadline`
session             one run in one process, from the first probe to the last sync
build               servers, models, tools and plans of a run
plan                what each stage requests from its servers
staged              jobs of several stages
provider_batches    runs through a provider's batch API
services            callbacks and stores shared by the parts of a run
agents_setup        tools, turns and agent programs
hostfile_reload     polling of engines' load, reloads of the hostfile
run_store           the locked run directory, its journal and totals
resume              which rows a start sends again
output              result lines on stdout
shutdown            early ends
tables_process      the child process that makes the tables
parallel            `--workers` and `--executor parsl`
"""
