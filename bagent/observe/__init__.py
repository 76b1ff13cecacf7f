"""What is happening? Counts, progress displays, the closing summary and the run's log.

This room reads what the others report and decides nothing. Whoever wants to show a run in
another way (a full-screen view, a metrics endpoint, a report page) reads a :class:`Snapshot`,
or the live histograms of a :class:`RunCounters`.
"""

from bagent.observe.counters import RunCounters
from bagent.observe.live_state import EndpointLine, Live
from bagent.observe.progress import Mode, Progress, make_progress
from bagent.observe.run_log import RunLog
from bagent.observe.snapshot import (
    Distribution,
    ErrorGroup,
    LogHistogram,
    Rates,
    RunTotals,
    Snapshot,
    StageCount,
    StartCounts,
    TokenCount,
    TokenTotals,
)
from bagent.observe.summary import EndInfo, summary_lines

__all__ = [
    "Distribution",
    "EndInfo",
    "EndpointLine",
    "ErrorGroup",
    "Live",
    "LogHistogram",
    "Mode",
    "Progress",
    "Rates",
    "RunCounters",
    "RunLog",
    "RunTotals",
    "Snapshot",
    "StageCount",
    "StartCounts",
    "TokenCount",
    "TokenTotals",
    "make_progress",
    "summary_lines",
]
