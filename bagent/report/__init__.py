"""HTML pages that load nothing from elsewhere.

- ``html``, ``svg``: the toolkit, shared with ``bagent view``: escaping, tables, sections, the page
  skeleton, templates; charts
- ``overview``, ``answer_fields``, ``suspects``: totals, throughput, answers, doubtful ones
- ``run``: the page of a run, made by SQL from its tables
- ``endpoints``, ``failures``, ``fields``, ``rows``: its sections; ``sections``: the short ones
- ``field_stats``: the statistics of input fields that ``fields`` describes
- ``queries``: SQL that several sections share
- ``load_test``: the page of a load test

How a report is made
--------------------
`cli/commands/report.py:report` opens the tables of a run, of which it renews those that are older
than the journal (`store/query.py:open_tables`). `cli/commands/report.py:_about` collects what is
not in the tables: state, model, prompts and settings, without secrets.
`run.py:make_page` queries the totals (`run.py:totals`); each section queries its own rows, such as
`endpoints.py:endpoint_rows` and `failures.py:causes`, by SQL through `queries.py:ReportDb`.
Sections return findings as sentences (`endpoints.py:findings`) and themselves as `Html`
(`endpoints.py:endpoints`). `html.py:Html` is text that is escaped already; all other text is
escaped where it enters a page. `run.py:_page` puts the parts into a page with its style and script.
"""

from bagent.report.run import EarlierJob, ReportInfo, make_page

__all__ = ["EarlierJob", "ReportInfo", "make_page"]
