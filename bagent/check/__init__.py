"""Checks of a job without generation: what it would send, share and cost.

check           from options to a report
probe           which endpoints would answer, and their properties
sample          the first rows as the requests that a run would send
estimate        tokens by the server's tokenizer or by characters; from the sample to all rows
prefix_sharing  what a prefix cache can reuse, and whether warming it pays
prompt_reorder  the prompt with its fixed text first
facts           single facts of the report
report          the report as records
text            the report as text
"""
