"""What people see of a run while it goes on: its progress, its endpoints, and ``bagent status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bagent.observe import Live, Snapshot
from bagent.observe.progress import NoProgress
from bagent.runs.run_state import describe
from bagent.store.results import ResultQuery, iter_results
from bagent.store.run_dir import RunDir

MOST = 2
"""Updates of the progress of a start that are compared; to read the journal takes time."""


@dataclass
class Moment:
    """One look at a run."""

    at: float
    by_status: dict[str, int]
    """The results in the journal, counted."""
    snapshot: Snapshot | None = None
    """What the progress shows then."""
    status: dict[str, Any] = field(default_factory=dict)
    """What ``bagent status`` says then."""

    @property
    def results(self) -> int:
        """Return how many results the journal has."""
        return sum(self.by_status.values())


class Watcher(NoProgress):
    """Shows nothing, and notes what it would show."""

    def __init__(self, run: RunDir, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock
        self._live: Live | None = None
        self.moments: list[Moment] = []

    def attach(self, live: Live) -> None:
        """Keep what the run shows."""
        self._live = live

    def update(self, snapshot: Snapshot) -> None:
        """Note a snapshot, and what the journal has."""
        if sum(moment.snapshot is not None for moment in self.moments) < MOST:
            moment = self._moment()
            moment.snapshot = snapshot
            self.moments.append(moment)

    def look(self) -> None:
        """Note what ``bagent status`` says."""
        moment = self._moment()
        moment.status = describe(self._run, lambda _: None)
        self.moments.append(moment)

    def endpoints(self) -> dict[str, tuple[int, int]]:
        """Return how many attempts each endpoint had, and how many of them failed."""
        lines = [] if self._live is None else self._live.endpoints()
        return {line.name: (line.tries, line.failed) for line in lines}

    def _moment(self) -> Moment:
        results = iter_results(self._run.path, ResultQuery(), report=lambda _: None)
        return Moment(self._clock(), dict(Counter(result["status"] for result in results)))
