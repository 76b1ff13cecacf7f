"""The journal: append-only JSON lines, the source of truth of a run.

- ``journal``: the writer of one part
- ``journal_files``: its open segments
- ``segments``: file names, order and torn ends
- ``codec``: records to lines and back, outcome codes
- ``segment_index``: the index file beside a segment
- ``supersession``: which lines no longer count
- ``done_index``: which units are finished
- ``reader``: the current outcomes in order
- ``edited_rows``: outcomes of rows whose input was edited
- ``removed_rows``: finished rows that the input no longer holds
- ``turns``: turns of unfinished conversations
"""
