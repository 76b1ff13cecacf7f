"""Counts of a run, and what shows them. Nothing here decides about the run.

- ``counters``: counts rows and requests; ``snapshot``: the state at one moment, and histograms
- ``error_groups``: failures that differ in numbers and ids only
- ``progress``: the displays and their phrases; ``terminal``, ``dashboard``: those of terminals
- ``live_state``: single endpoints, which of them are slow, and the last answers
- ``formatting``: numbers for people
- ``summary``: the lines at the end of a run; ``next_step``: what to type or call next
- ``run_log``: run.log; ``prometheus``: metrics
"""

from bagent.observe.counters import RunCounters
from bagent.observe.live_state import EndpointLine, Live
from bagent.observe.progress import Mode, Progress, make_progress
from bagent.observe.run_log import RunLog
from bagent.observe.snapshot import (
    Distribution,
    EndpointTrouble,
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
    "EndpointTrouble",
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
