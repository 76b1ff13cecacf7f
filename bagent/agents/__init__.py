"""Agents: the conversation of one row, from its prompt to its outcome.

plan             what all conversations of a stage share: streamed turns, tokens of answers
conversation     request, evaluation, retries: a state machine without I/O, and its driver
agent_loop       the driver of a conversation with tools
tool_turn        the tool calls of a turn
text_tool_calls  tool calls that a server returns as text
compaction       shortening of long conversations
external_agent   the driver of a row that a program answers

How an agent runs
-----------------
`conversation.py:converse` makes an `agent_loop.py:Agent` of the conversation and its first call.
`agent_loop.py:Agent.run` is the loop: a step is a call, a turn whose tools have to run, or the
outcome. `agent_loop.py:Agent._resume` returns the last turn that an earlier start wrote, if any.
A call goes to `fleet/fleet.py:Fleet.request`. While its reply is streamed, complete tool calls
start (`tool_turn.py:ToolTurnRunner.watch`). `agent_loop.py:Agent._evaluate` finds tool calls in the
reply, in text too (`text_tool_calls.py:parse_text_tool_calls`); a reply without any is evaluated as
the answer. `agent_loop.py:Agent._handle` returns the next step.
`agent_loop.py:Agent._run_tools` runs the calls (`tool_turn.py:ToolTurnRunner.answer`, one by one
`tools/executor.py:ToolExecutor.call`), and writes the turn before the next request. Calls with side
effects are written before they run, so that no later start runs them again.
`compaction.py:Compactor.too_long` decides whether `agent_loop.py:Agent._compact` shortens the
conversation first, by a request of its own where the job has a model for summaries.
`agent_loop.py:Agent._turn` returns the call of the next turn. It goes before new rows, and prefers
the endpoint whose cache holds the conversation. When the run ends early, a turn whose tools have
not run is written without their answers (`tool_turn.py:ToolTurnRunner.end_interrupted`).
"""
