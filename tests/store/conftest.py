from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bagent.store.journal.done_index import DoneIndex, ResumePolicy, load_index, open_indexes
from bagent.store.journal.journal import Journal
from bagent.store.journal.segment_index import SegmentIndex
from bagent.types import Outcome
from support.stored_runs import stored


def make_outcome(row: int = 0, **changes: Any) -> Outcome:
    """The outcome of one row whose key is far from that of its neighbours, without counts."""
    counts = {"prompt_tokens": None, "completion_tokens": None, "finished_at": None}
    key = f"{row * 0x9E3779B97F4A7C15 % 2**64:016x}"
    return stored(row, **{**counts, "key": key, **changes})


def failed(row: int, kind: str = "timeout", **changes: Any) -> Outcome:
    return make_outcome(row, status="failed", error_kind=kind, error="no answer", **changes)


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Store:
    """A run directory in a test: writes journals and remembers what was reported."""

    path: Path
    clock: Clock = field(default_factory=Clock)
    reports: list[str] = field(default_factory=list)

    def open(self, part: str = "all", **options: Any) -> Journal:
        return Journal.open(
            self.path, part, clock=self.clock, report=self.reports.append, **options
        )

    def write(self, *outcomes: Outcome, part: str = "all", **options: Any) -> list[int]:
        journal = self.open(part, **options)
        locations = [journal.write(outcome) for outcome in outcomes]
        journal.close()
        return locations

    def indexes(self) -> list[SegmentIndex]:
        return open_indexes(self.path, self.reports.append)

    def finished(self, policy: ResumePolicy | None = None) -> DoneIndex:
        """Read what is finished as the next start does."""
        return load_index(self.path, None, policy or ResumePolicy(), report=self.reports.append)

    def segment(self, number: int = 1, part: str = "all", stream: str = "rows") -> Path:
        return self.path / "journal" / f"{stream}-{part}-{number:06d}.jsonl"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run")


@pytest.fixture
def outcome() -> Callable[..., Outcome]:
    return make_outcome


@pytest.fixture
def failure() -> Callable[..., Outcome]:
    return failed


@pytest.fixture
def clock() -> Clock:
    return Clock()
