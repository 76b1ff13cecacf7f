"""One HTML page about a run: what happened, what failed and why, what was slow and what it cost.

All numbers come by SQL from the tables; the page needs no network and no other file.
"""

from bagent.report.run import ReportInfo, make_page

__all__ = ["ReportInfo", "make_page"]
