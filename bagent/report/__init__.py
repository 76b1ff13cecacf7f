"""HTML pages that load nothing from elsewhere.

- ``html``, ``svg``: the toolkit: escaping, tables, sections, the page skeleton; charts
- ``run``: the page of a run, made by SQL from its tables
- ``endpoints``, ``failures``, ``fields``, ``stages``, ``agents``, ``cost``, ``rows``: its sections
- ``queries``: SQL that several sections share
- ``load_test``: the page of a load test
"""

from bagent.report.run import EarlierJob, ReportInfo, make_page

__all__ = ["EarlierJob", "ReportInfo", "make_page"]
