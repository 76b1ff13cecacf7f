"""A clock that tests move by hand, and records with the parts that matter to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from bagent.observe.counters import RunCounters
from bagent.observe.snapshot import RunTotals, Snapshot
from bagent.store.totals import Totals
from bagent.types import Attempt, FeedStats, FleetStats, Outcome
from support.stored_runs import attempt_of


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


IDLE_FLEET = FleetStats(
    in_flight=0, limit=64, ready=0, retrying=0, throttled_s=0.0, endpoints_up=1, endpoints=1
)
WHOLE_FEED = FeedStats(read=0, skipped=0, position=0, size=0, ended=True)


class Maker:
    """Makes records and snapshots."""

    def outcome(self, row: int = 0, status: str = "ok", **parts: object) -> Outcome:
        fields = {
            "key": f"{row:016x}",
            "row": row,
            "id": f"r{row}",
            "source": "genes.jsonl",
            "line": row + 1,
            "stage": "main",
            "status": status,
            "endpoint": "http://127.0.0.1:8000",
            "attempts": 1,
        }
        return Outcome(**{**fields, **parts})

    def attempt(self, group: str = "g1", **parts: object) -> Attempt:
        usual = {"group": group, "endpoint": "http://127.0.0.1:8000", "sent": 0.0, "done": None}
        return msgspec.structs.replace(attempt_of(self.outcome()), **{**usual, **parts})

    def fleet(self, **parts: object) -> FleetStats:
        return msgspec.structs.replace(IDLE_FLEET, **parts)

    def feed(self, **parts: object) -> FeedStats:
        return msgspec.structs.replace(WHOLE_FEED, **parts)

    def snapshot(
        self,
        tally: RunCounters,
        fleet: FleetStats = IDLE_FLEET,
        feed: FeedStats = WHOLE_FEED,
        earlier: dict[str, int] | None = None,
    ) -> Snapshot:
        """``earlier`` are the results of earlier starts: ok, or failed with that kind."""
        now = tally.snapshot(fleet, feed)
        if earlier is None:
            return now
        ok = now.ok + earlier.pop("ok", 0)
        kinds = Counter(now.by_kind) + Counter(earlier)
        statuses = Counter(now.by_status) + Counter({"failed": sum(earlier.values())})
        totals = Totals(ok, now.accepted, kinds.total(), {**statuses, "ok": ok}, dict(kinds))
        return tally.snapshot(fleet, feed, RunTotals(totals))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make() -> Maker:
    return Maker()


@pytest.fixture
def tally(clock: Clock) -> RunCounters:
    return RunCounters(clock)


@pytest.fixture
def busy(clock: Clock, make: Maker, tally: RunCounters) -> Callable[..., Snapshot]:
    """Snapshots of a run in its middle: 1,200 ok and 9 failed in this start, 300 ok earlier."""

    def at(**fleet: object) -> Snapshot:
        parts = {"in_flight": 64, "ready": 100, "retrying": 2, "endpoints_up": 3, "endpoints": 4}
        return make.snapshot(
            tally,
            make.fleet(**{**parts, **fleet}),
            make.feed(read=1675, skipped=300, position=4000, size=16000, ended=False),
            {"ok": 300},
        )

    for row in range(1200):
        clock.now += 0.01
        tally.outcomes(
            [make.outcome(row, prompt_tokens=100, completion_tokens=20, cost_usd=0.0001)]
        )
    for row in range(9):
        kind = ("timeout", "rejected", "schema")[(row > 4) + (row > 7)]
        tally.outcomes([make.outcome(row, "failed", error_kind=kind, error=f"{kind} text")])
    return at
