"""What happened in a world: its starts, and what they left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bagent.runs.ending import RunEnding
from worlds import agents, provider, watch
from worlds.network import Network, Sent
from worlds.spec import World

Json = Any


@dataclass
class Start:
    """One start of the program, and the state of the run after it."""

    number: int
    began: float
    ended: float = 0.0
    code: int | None = None
    """None: it was killed."""
    killed_by_power: bool = False
    versions: dict[int, int] = field(default_factory=dict)
    """How often each row was edited before it."""
    error: str = ""
    refused: bool = False
    """Another process owned the run."""
    ending: RunEnding | None = None
    lines: list[str] = field(default_factory=list)
    """The summary."""
    stuck: str = ""
    suspended: bool = False
    """It was suspended; what it did once it woke up is another start."""
    woken: bool = False
    """It goes on with what a suspended start had begun."""
    lost: bool = False
    """While it was suspended another process took the run over."""
    answers: int = 1
    """Answers of each row."""
    limited: bool = False
    """It was given ``--limit``, or woke up from a start that was."""
    options: dict[str, Json] = field(default_factory=dict)
    """Options that the command had besides those of the job."""
    loop_errors: list[str] = field(default_factory=list)
    results: list[dict[str, Json]] = field(default_factory=list)
    attempts: list[dict[str, Json]] = field(default_factory=list)
    """Those of all starts so far."""
    row_records: list[dict[str, Json]] = field(default_factory=list)
    """Lines of rows in the journal, of all starts so far."""
    tool_records: list[dict[str, Json]] = field(default_factory=list)
    """Tool calls in the journal, of all starts so far."""
    moments: list[watch.Moment] = field(default_factory=list)
    """What people saw while it went on."""
    endpoints: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Attempts of each endpoint at the end, and how many of them failed."""
    printed: list[dict[str, Json]] = field(default_factory=list)
    """Lines on standard output, of a start that ended in order."""
    reports: list[str] = field(default_factory=list)
    """What readers of the journal complained about."""
    info: dict[str, Json] = field(default_factory=dict)
    status: dict[str, Json] = field(default_factory=dict)
    """What ``bagent status`` says after it."""
    unsynced: list[str] = field(default_factory=list)
    """Segments of rows and turns that a loss of power after its end would cut."""
    two_owners: bool = False
    traceback: str = ""
    calls: int = 0
    """System calls that change files."""

    @cached_property
    def result_of(self) -> dict[int, dict[str, Json]]:
        """The results after it, by row, or by answer where rows have several."""
        return {
            result["row"] * self.answers + result["answer"]: result
            for result in self.results
            if result["row"] is not None
        }


@dataclass
class History:
    """Everything that happened in a world."""

    world: World
    starts: list[Start]
    network: Network
    files: dict[str, bytes]
    """The files of the run at the end."""
    tool_runs: list[agents.ToolRun]
    provider: provider.Provider
    tables: dict[str, list[dict[str, Json]]] | None = None
    """The rows of the tables at the end; None: they were not made in this world."""

    @property
    def priced(self) -> bool:
        """Whether tokens have a price."""
        return is_priced(self.world)

    @cached_property
    def sent(self) -> dict[int, list[Sent]]:
        """The requests of each start."""
        requests: dict[int, list[Sent]] = {start.number: [] for start in self.starts}
        for sent in self.network.sent:
            requests[sent.start].append(sent)
        return requests

    @cached_property
    def sent_by_row(self) -> dict[int, dict[Any, list[Sent]]]:
        """The requests of each start, by row."""
        return {number: _by_row(requests) for number, requests in self.sent.items()}


def is_priced(world: World) -> bool:
    """Return whether the job of a world says what tokens cost."""
    return world.job.priced or world.job.budget is not None


def _by_row(requests: Sequence[Sent]) -> dict[Any, list[Sent]]:
    grouped: dict[Any, list[Sent]] = {}
    for sent in requests:
        for row in sent.keys or sent.rows:
            grouped.setdefault(row, []).append(sent)
    return grouped
