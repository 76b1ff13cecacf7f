"""Stages: the order in which rows meet prompts.

topologies      short names for stages, and their expansion
prepare         stages with their templates and schemas loaded
validate        checks of stages before any request
pipeline        input and stages, connected by streams and joins
slots, row      rows on their way between stages
feeder          queues and backpressure
base            what all stages share
row_runner      conversations, calls and outcomes of one stage
results         outcomes of this start and earlier ones
dedupe          equal requests
stop_rules      reasons to stop early
map, expand, embed, loop                  kinds of stages
reduce, reduction_tree                    reductions
sql, query, sql_recipes, uncertainty      queries and measures

To add a topology: its name in ``Topology`` of :mod:`bagent.job.spec.stages` and a function in
``topologies``. To add a kind of stage: its name in ``StageKind`` there, a module here, its place in
``ASKING_KINDS`` of ``prepare`` if it sends requests, and a case in ``runs/build.py``, which makes
the stages of a run.

How a row runs
--------------
`row_runner.py:RowRunner.run` takes the next row once the fleet has room for its call.
`row_runner.py:RowRunner._begin` opens a conversation; `agents/conversation.py:Conversation.open`
renders the prompt and returns the first call. An equal request answers the row if there is one
(`dedupe.py:RequestDedupe.finished_answer`, `dedupe.py:RequestDedupe.follow`).
`row_runner.py:RowRunner._send` queues the calls of several rows by `fleet/fleet.py:Fleet.submit`.
Rows with tools or a program have a task each (`row_runner.py:RowRunner._run_row`), in which
`agents/conversation.py:converse` awaits `fleet/fleet.py:Fleet.request`.
`fleet/fleet.py:Fleet._pump` gives the call to an endpoint with room
(`fleet/scheduler.py:BatchScheduler.next`), and `fleet/exchanges.py:RequestSender.start` sends the
request: the usual one over an open connection without a task
(`backends/openai/backend.py:OpenAIBackend.send_now`), others by `Backend.send`.
In the next turn of the event loop `fleet/fleet.py:Fleet._hand_over` takes all that have ended.
`fleet/exchanges.py:ResultHandler.handle` has `agents/conversation.py:Conversation.evaluate` look at
each reply: a passing failure is retried like one of the server's. Otherwise
`fleet/fleet.py:Fleet._apply` ends the call.
Those that have ended go together to `row_runner.py:RowRunner._on_ended`.
`agents/conversation.py:Conversation.handle` returns another call, which goes before new rows, or
the outcome; `row_runner.py:RowRunner._finish` writes the outcomes
(`store/journal/journal.py:Journal.write_all`), passes them to the next stage and copies them to
equal rows. Only then are the slots given away.
When the fleet closes, calls that are not in flight are dropped, and their rows stay unfinished.
"""
