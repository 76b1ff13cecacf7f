"""Execution of a run: ``bagent run`` from its options to its exit code.

execute             run a job in this process
ending              exit code, tables (made by a child process) and summary of a run
context             options and job -> a checked run, before anything is sent
environment         `BAGENT_*` variables
deadline            `--deadline`
session             one run in one process, from the first probe to the last sync
build               servers, models, tools and plans of a run and of its stages
plan                what each stage requests from its servers
provider_batches    runs through a provider's batch API
services            messages for people, callbacks and stores shared by the parts of a run
agents_setup        tools, turns and agent programs
hostfile_reload     reloads of the hostfile
load_polling        polling of the engines' load
run_state           the state of a run as its directory tells it, and what to do next
prompt_fields       input fields that prompts use: empty ones, and the longest one of failed rows
run_store           the locked run directory, its journal and totals
live_totals         current outcomes of all starts, counted while a run goes on
resume              which rows a start sends again
result_lines        results as lines on stdout
shutdown            early ends
parallel            `--workers` and `--executor parsl`

How a run starts
----------------
`cli/commands/run.py:make_options` turns the parameters of the command into `RunOptions`.
`execute.py:run_job` has `context.py:prepare` load and check all but the rows, without a request.
`execute.py:execute_run` opens the rows (`context.py:open_input` checks the prompt against the
first of them) and the run directory (`run_store.py:open_run`); piped rows are opened once that is
locked. `execute.py:_run_open` opens `run.log`, starts the display, and runs a session on a loop of
its own. `session.py:RunSession.run` sets the deadline and calls `build.py:build_run`, which
- opens the tools of each request of the job (`agents_setup.py:AgentSetup.open`),
- finds its servers and waits for them (`servers/server_pool.py:ServerResolver.find`),
- writes models, endpoints and prices into run.json (`run_store.py:RunStore.begin`),
- makes a fleet for each set of servers (`services.py:RunServices.open_pool`), and plans what is
  requested (`plan.py:make_plan`): by rows (`services.py:RunServices.row_runner`), by provider
  batches (`provider_batches.py:plan_provider_batches`), or by stages (`build.py:StagedRun`).
`session.py:RunSession._execute` starts the reader of the rows (`stages/feeder.py:Feeder.start`)
and waits for the first reason to end; `ending.py:finish_run` closes the journal, makes the tables
and returns the exit code. With `--workers`, `parallel/workers.py:run_parts` starts such runs as
processes, and ends in `ending.py:finish_run` too. The library calls `execute.py:execute_run` in a
thread, with a `RunHost` that says what of the process the run may use.

How a run resumes
-----------------
`run_store.py:open_run` takes the lock of the part (`store/lock.py:RunLock.acquire`), which replaces
an owner that is gone, and refuses a changed job (`store/run_dir.py:RunDir.check_fingerprint`).
`resume.py:make_retry_policy` says which outcomes stay: all good ones; after the end of a run also
failures that would only repeat. `store/journal/segments.py:mend_tail` cuts off a torn last line.
`store/journal/done_index.py:load_index` reads the journals of all parts, by their saved indexes,
into a `DoneIndex` of finished units; a unit is the hash of row key, stage and answer.
The reader of the rows leaves out whole blocks of finished rows
(`session.py:RunSession._all_finished`), and asks for each other row which answers are missing
(`run_store.py:RunStore.pending`). Until the run has ended, rows that failed come after all others,
by a second reading (`session.py:RunSession._repeats`). A job of several stages reads finished rows
again, and takes earlier outcomes from the journal (`store/journal/reader.py:OutcomeLookup`).
Rows that a program gives to the library replace those that earlier starts kept
(`rows/stdin.py:StdinReader`), and outcomes of finished ones are printed when they are read
(`session.py:RunSession._print_finished`).
Agents continue behind the turns that were written (`agents_setup.py:AgentSetup.equip`), provider
batches are waited for (`batches/builder.py:BatchBuilder.load`).
Rows that failed and are no longer in the input are taken back once all of it was read
(`run_store.py:RunStore.forget_missing`).
"""
