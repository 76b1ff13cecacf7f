"""Agents: the conversation of one row, from its prompt to its outcome.

plan             what all conversations of a stage share
conversation     request, evaluation, retries
agent_loop       conversations with tools
tool_turn        the tool calls of a turn
text_tool_calls  tool calls that a server returns as text
compaction       shortening of long conversations
streaming        which turns are streamed
token_budget     tokens of answers where the job sets none
external_agent   rows answered by a program
"""
