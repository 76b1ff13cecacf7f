"""What invariants ask of a history, and the list of all invariants."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bagent.types import EXTERNAL_KINDS, PASSING_KINDS
from worlds.history import History, Start
from worlds.network import Sent
from worlds.replies import GOOD, LASTING, MAX_TOKENS, base_kind, is_good
from worlds.spec import EndpointSpec

Problems = Iterator[str]
Invariant = Callable[[History], Problems]

INVARIANTS: list[Invariant] = []

DISK = frozenset({"full", "short", "tight", "sync-fails"})
ORDERLY = (0, 1, 75, 76)
"""Exit codes after which all is written."""


def invariant(check: Invariant) -> Invariant:
    """Check this of every world."""
    INVARIANTS.append(check)
    return check


def invariant_for(*kinds: str) -> Callable[[Invariant], Invariant]:
    """Check this of the worlds with one of these kinds of jobs."""

    def add(check: Invariant) -> Invariant:
        @functools.wraps(check)
        def checked(history: History) -> Problems:
            return check(history) if history.world.job.kind in kinds else iter(())

        return invariant(checked)

    return add


row_invariant = invariant_for("single", "schema", "lists", "agents")
"""Check this of the worlds in which each row has one result, and requests of its own."""
outcome_invariant = invariant_for("single", "schema", "lists", "agents", "batches", "copies")
kept_invariant = invariant_for("single", "schema", "lists", "agents", "batches", "shards")
"""Check this of the worlds in which each row has one result; ``kept_invariant`` also where shards
have a part of them."""


def terminal(replies: Sequence[str]) -> tuple[int, str]:
    """Return how many replies of a row ask for another try, and the first that does not."""
    for number, reply in enumerate(replies):
        kind = base_kind(reply)
        if kind in ("ok", "slow", "usage", "unreadable", *LASTING):
            return number, kind
    return len(replies), ""


def events_of(history: History, start: int) -> set[str]:
    """Return the kinds of events of a start."""
    return {event.kind for event in history.world.events if event.start == start}


def sent_in(history: History, start: int) -> list[Sent]:
    """Return the requests of one start."""
    return history.sent[start]


def sent_by_row(history: History, start: int) -> dict[Any, list[Sent]]:
    """Return the requests of one start by row, or by what else tells those of stages apart."""
    return history.sent_by_row[start]


def units_read(history: History, start: Start) -> int:
    """Return how many answers of rows a start has to read."""
    world = history.world
    if world.limit is None or not start.limited:
        return len(world.units)
    return min(world.limit, len(world.rows)) * world.job.answers


def unit_of(history: History, record: dict[str, Any]) -> int:
    """Return the number of the answer of a row that a result or an attempt is about."""
    return history.world.unit(record["row"], record.get("answer") or 0)


def results_of(start: Start) -> dict[int, dict[str, Any]]:
    """Return the results after a start by row, or by answer where rows have several."""
    return start.result_of


def is_failed(history: History, result: dict[str, Any]) -> bool:
    """Return whether a row has failed."""
    accepted = result["status"] == "truncated" and history.world.job.truncated == "accept"
    return result["status"] != "ok" and not accepted


def is_due(history: History, start: Start, row: int, result: dict[str, Any]) -> bool:
    """Return whether a start has to send a row again that had this result before it."""
    if version_of(history, row, result) != start.versions.get(row, 0):
        return True
    kind, failed = result["error_kind"], is_failed(history, result)
    if "retry" in start.options and result["status"] != "ok":
        names = set(start.options["retry"].split(","))
        return ("all" in names and failed) or bool({kind, result["status"]} & names)
    if not failed or start.options.get("skip_failed"):
        return False
    codes = set(map(recorded_code, history.starts[: start.number]))
    if codes & {0, 1}:
        varies = kind == "schema" and history.world.job.temperature > 0
        return varies or kind in PASSING_KINDS | EXTERNAL_KINDS
    return kind in PASSING_KINDS or (76 in codes and kind == "auth")


def recorded_code(start: Start) -> int | None:
    """Return the exit code of a start; of one that was killed at its very end, that in run.json."""
    if start.code is not None:
        return start.code
    code: int | None = start.info.get("starts", [{}])[-1].get("exit_code")
    return code


def version_of(history: History, row: int, result: dict[str, Any]) -> int:
    """Return the version of the text for which a row got a result."""
    for start in history.starts:
        made = results_of(start).get(row)
        if made is not None and made["finished_at"] == result["finished_at"]:
            return start.versions.get(row, 0)
    return 0


def before(history: History, start: Start) -> Start | None:
    """Return the start before this one."""
    return history.starts[start.number - 1] if start.number else None


def has_opened(history: History, start: Start) -> bool:
    """Return whether a start came so far that it opened the journal."""
    previous = before(history, start)
    starts = 0 if previous is None else len(previous.info.get("starts", ()))
    return len(start.info.get("starts", ())) > starts


def new_results(history: History, start: Start) -> dict[int, dict[str, Any]]:
    """Return the results that this start made."""
    previous = before(history, start)
    old = {} if previous is None else results_of(previous)
    return {
        row: result
        for row, result in results_of(start).items()
        if row not in old or old[row]["finished_at"] != result["finished_at"]
    }


def made_results(history: History, start: Start) -> list[dict[str, Any]]:
    """Return the results whose lines this start wrote, of all stages. It writes a line once more
    where it reads a batch again of which a killed start has not noted that it was read."""
    previous = before(history, start)
    lines = Counter(map(_line, start.row_records))
    if previous is not None:
        lines -= Counter(map(_line, previous.row_records))
    return [result for result in start.results if _line(result) in lines]


def _line(result: dict[str, Any]) -> tuple[Any, ...]:
    names = ("stage", "row", "id", "finished_at", "status")
    return (*(str(result.get(name)) for name in names), result.get("answer") or 0)


def attempts_of(history: History, start: Start) -> list[dict[str, Any]]:
    """Return the attempts that this start recorded."""
    previous = before(history, start)
    return start.attempts[0 if previous is None else len(previous.attempts) :]


def is_cut_short(attempt: dict[str, Any]) -> bool:
    """Return whether an answer began in an attempt, and did not end in time."""
    return attempt["status_code"] == 200 and attempt.get("error_kind") == "timeout"


def may_lose_answers(history: History, start: Start) -> bool:
    """Return whether answers that came may be missing after a start: the disk took no more, and it
    said so with 74, or it was killed before it could."""
    disk = events_of(history, start.number) & DISK
    return bool(disk) and (start.code not in ORDERLY or start.suspended)


def is_simple(history: History) -> bool:
    """Return whether servers and processes of a world have no fault of their own."""
    world = history.world
    return (
        world.job.kind == "single"
        and world.job.hedge == "off"
        and not world.events
        and (world.job.row_seconds, world.job.rpm, world.job.stop_after) == (None, None, None)
        and (world.job.tpm, world.job.first_token, world.job.idle) == (None, None, None)
        and not world.job.hosted
        and not any(map(_has_fault, world.endpoints))
        and not any(history.network.crashes)
    )


def _has_fault(endpoint: EndpointSpec) -> bool:
    """Return whether a server may refuse what another one takes."""
    limited = endpoint.capacity or endpoint.pace or endpoint.refuses
    return bool(endpoint.windows or limited) or endpoint.context != EndpointSpec().context


def is_answer(sent: Sent) -> bool:
    """Return whether a request was answered well, for all its rows."""
    replies = sent.replies or (sent.reply,)
    return sent.arrived and sent.status == 200 and all(map(is_good, replies))


def answers_row(sent: Sent, row: int) -> bool:
    """Return whether a request was answered well for one of its rows."""
    replies = dict(zip(sent.rows, sent.replies or (sent.reply,) * len(sent.rows), strict=True))
    whole = sent.arrived and sent.status == 200 and base_kind(sent.reply) in GOOD
    return whole and is_good(replies[row])


def recovered_soon(history: History, sent: Sent) -> bool:
    """Return whether the server that failed a request was well within a second."""
    if not sent.by_endpoint or sent.done is None:
        return False
    windows = history.network.windows(sent.endpoint)
    return any(window.begin <= sent.at < window.end < sent.done + 1.0 for window in windows)


def is_too_long(history: History, row: int, index: int, stage: str = "") -> bool:
    """Return whether the prompt of a row is surely too long for a server. Such a row waits for the
    others, even for one that is down: its context may be longer. Agents shorten theirs."""
    world = history.world
    if world.job.kind == "agents":
        return False
    context = world.endpoints[index].context
    text = len(world.units[row].text.encode()) + world.job.system
    if world.job.kind in ("single", "schema") and text // 4 + MAX_TOKENS > context:
        return True
    return any(
        sent.tokens + MAX_TOKENS > context
        or (sent.reply == "overflow" and world.endpoints[sent.endpoint].context >= context)
        for sent in history.network.sent
        if row in sent.rows and sent.stage == stage and len(sent.keys or sent.rows) == 1
    )


def may_lose_requests(history: History) -> bool:
    """Return whether requests may end before a server has seen them: connections fail, or the copy
    of a row is cancelled."""
    return history.world.job.hedge != "off" or any(
        window.kind in ("down", "silent")
        for number in range(len(history.world.endpoints))
        for window in history.network.windows(number)
    )


def work_seconds(history: History) -> float:
    """Return the seconds in which the rows of a world are done one after the other, in slots."""
    world = history.world
    slots = min(
        len(world.endpoints) * (8 if world.job.per_endpoint == "auto" else world.job.per_endpoint),
        8 if world.job.concurrency == "auto" else world.job.concurrency,
    )  # type: ignore[type-var, operator]
    seconds = sum(row.seconds * 2 * len(row.replies) + 4 for row in world.units)
    return seconds / float(slots)
