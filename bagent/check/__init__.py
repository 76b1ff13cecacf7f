"""Checks of a job without generation: what it would send, share and cost.

check           from options to a report
probe           which endpoints would answer, and their properties
sample          the first rows as the requests that a run would send
tokens          tokens of prompts, by the server's tokenizer or by characters
estimate        from the sample to all rows: tokens, cost, rows that do not fit
prefix_sharing  what a prefix cache can reuse, and whether warming it pays
prompt_reorder  the prompt with its fixed text first
facts           single facts of the report
report          the report as records
text            the report as text
"""
