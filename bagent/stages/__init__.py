"""Stages: the order in which rows meet prompts.

topologies      short names for stages, and their expansion
prepare         stages with their templates and schemas loaded
validate        checks of stages before any request
sql_validation  checks of queries
pipeline        input and stages, connected by streams
slots, row      rows on their way between stages
feeder          queues and backpressure
base            what all stages share
row_runner      conversations, calls and outcomes of one stage
results         outcomes of this start and earlier ones
dedupe          equal requests
stop_rules      reasons to stop early
map, expand, embed, loop, join            kinds of stages
reduce, reduction_tree                    reductions
sql, query, sql_recipes, uncertainty      queries and measures
"""
