"""What invariants ask of a history, and the list of all invariants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from worlds.network import LASTING, Sent, base_kind
from worlds.play import History, Start
from worlds.spec import RowSpec

Problems = Iterator[str]
Invariant = Callable[[History], Problems]

INVARIANTS: list[Invariant] = []

DISK = frozenset({"full", "short", "sync-fails"})
ORDERLY = (0, 1, 75, 76)
"""Exit codes after which all is written."""


def invariant(check: Invariant) -> Invariant:
    """Check this of every world."""
    INVARIANTS.append(check)
    return check


def terminal(row: RowSpec) -> tuple[int, str]:
    """Return how many replies of a row ask for another try, and the first that does not."""
    for number, reply in enumerate(row.replies):
        kind = base_kind(reply)
        if kind in ("ok", "slow", "usage", "unreadable", *LASTING):
            return number, kind
    return len(row.replies), ""


def events_of(history: History, start: int) -> set[str]:
    """Return the kinds of events of a start."""
    return {event.kind for event in history.world.events if event.start == start}


def sent_in(history: History, start: int) -> list[Sent]:
    """Return the requests of one start."""
    return [sent for sent in history.network.sent if sent.start == start]


def by_row(requests: Sequence[Sent]) -> dict[int, list[Sent]]:
    """Return requests by row."""
    grouped: dict[int, list[Sent]] = defaultdict(list)
    for sent in requests:
        for row in sent.rows:
            grouped[row].append(sent)
    return grouped


def results_of(start: Start) -> dict[int, dict[str, Any]]:
    """Return the results after a start by row."""
    return {result["row"]: result for result in start.results}


def before(history: History, start: Start) -> Start | None:
    """Return the start before this one."""
    return history.starts[start.number - 1] if start.number else None


def new_results(history: History, start: Start) -> dict[int, dict[str, Any]]:
    """Return the results that this start made."""
    previous = before(history, start)
    old = {} if previous is None else results_of(previous)
    return {
        row: result
        for row, result in results_of(start).items()
        if row not in old or old[row]["finished_at"] != result["finished_at"]
    }


def is_simple(history: History) -> bool:
    """Return whether servers and processes of a world have no fault of their own."""
    world = history.world
    return (
        world.job.kind == "single"
        and not world.events
        and not any(endpoint.windows or endpoint.capacity for endpoint in world.endpoints)
    )


def is_answer(sent: Sent) -> bool:
    """Return whether a request was answered well, for all its rows."""
    replies = sent.replies or (sent.reply,)
    return all(base_kind(reply) in ("ok", "usage", "slow") for reply in replies)


def has_dead_servers(history: History) -> bool:
    """Return whether connections may fail."""
    return any(
        window.kind in ("down", "silent")
        for endpoint in history.world.endpoints
        for window in endpoint.windows
    )


def work_seconds(history: History) -> float:
    """Return the seconds in which the rows of a world are done one after the other, in slots."""
    world = history.world
    slots = min(
        len(world.endpoints) * (8 if world.job.per_endpoint == "auto" else world.job.per_endpoint),
        8 if world.job.concurrency == "auto" else world.job.concurrency,
    )  # type: ignore[type-var, operator]
    seconds = sum(row.seconds * 2 * len(row.replies) + 4 for row in world.rows)
    return seconds / float(slots)
