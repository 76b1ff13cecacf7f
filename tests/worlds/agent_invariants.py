"""Invariants of agents, their turns and their tools."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from bagent.agents.tool_turn import MAY_HAVE_RUN
from bagent.types import PASSING_KINDS
from worlds.agents import MAX_TURNS, ToolRun, answers_right, expected_end
from worlds.evidence import ORDERLY, Problems, events_of, invariant, results_of, sent_in
from worlds.history import History
from worlds.network import Sent
from worlds.replies import is_good


@invariant
def a_model_sees_what_its_tools_answered(history: History) -> Problems:
    """Each request of an agent holds its earlier turns: all calls in order, each with the answer of
    its tool. Only a call that an earlier start began may have the answer that it may have run, and
    only one whose arguments are no JSON may be missing, in a turn that a stop interrupted: it is
    never begun before its turn is complete."""
    for sent in _agent_requests(history):
        row, version = sent.rows[0], sent.versions[0]
        calls, where = history.world.units[row].calls, f"row {row} at {sent.at}"
        if sent.wrong:
            yield f"{where}: {sent.wrong}"
        unsure = {answer.turn for answer in sent.answers if answer.text == MAY_HAVE_RUN}
        if unsure and not sent.start:
            yield f"{where}: calls of {unsure} may have run in the first start"
        expected = [
            (turn, number)
            for turn in range(sent.turns)
            for number in range(len(calls[turn]))
            if turn not in unsure
        ]
        answers = [answer for answer in sent.answers if answer.turn not in unsure]
        answered = [(answer.turn, answer.call) for answer in answers]
        if sent.start:
            expected = [
                (turn, number)
                for turn, number in expected
                if (turn, number) in answered or not _may_be_missing(calls[turn][number])
            ]
        if answered != expected:
            yield f"{where}: answers {answers}, expected those to {expected}"
            continue
        for answer in answers:
            if not answers_right(answer, calls[answer.turn][answer.call], row, version):
                yield f"{where}: {answer}, which does {calls[answer.turn][answer.call]}"


def _may_be_missing(call: str) -> bool:
    tool, _, does = call.partition(":")
    return tool != "act" or does == "junk"


@invariant
def a_call_runs_once(history: History) -> Problems:
    """A call that may have side effects is never run twice, whatever kills the process; after a
    loss of power, a call of the last second may be."""
    if any(start.killed_by_power for start in history.starts):
        return
    runs = defaultdict[bytes, list[ToolRun]](list)
    for run in history.tool_runs:
        if run.tool == "act":
            runs[msgspec.json.encode(run.arguments)].append(run)
    for same in runs.values():
        first, last, row = same[0], same[-1], same[0].arguments["row"]
        if len(same) > 1 and not _starts_over(history, row, first.start, last.start):
            yield f"{first.arguments} ran at {[run.began for run in same]}"


def _starts_over(history: History, row: int, first: int, last: int) -> bool:
    """Return whether a row ended between two starts for a reason that makes it begin anew."""
    for start in history.starts[first:last]:
        kind = results_of(start).get(row, {}).get("error_kind")
        if kind is not None and kind not in PASSING_KINDS:
            return True
    return False


@invariant
def no_turn_is_lost(history: History) -> Problems:
    """Whole turns are in the journal before the next request: no kill makes a model repeat one; a
    loss of power may take those of the last second."""
    if any("sync-fails" in events_of(history, start.number) for start in history.starts):
        return
    latest: dict[tuple[int, int], Sent] = {}
    for sent in _agent_requests(history):
        row = sent.rows[0]
        before = latest.get((row, sent.versions[0]))
        if before is None or before.turns <= sent.turns:
            latest[row, sent.versions[0]] = sent
        elif not (
            _starts_over(history, row, before.start, sent.start)
            or _is_unsynced(history, before, sent)
        ):
            yield f"row {row}: turn {before.turns} at {before.at}, turn {sent.turns} at {sent.at}"


def _is_unsynced(history: History, before: Sent, sent: Sent) -> bool:
    """Return whether a loss of power between two requests may have taken the turns of the first."""
    lost = any(start.killed_by_power for start in history.starts[before.start : sent.start])
    return lost and before.at >= history.starts[before.start].ended - 1.0


@invariant
def each_tool_call_is_recorded(history: History) -> Problems:
    """After an orderly end the table of tool calls has each run of a tool once, with its error."""
    counted = 0
    for start in history.starts:
        records = start.tool_records[counted:]
        counted = len(start.tool_records)
        if start.code not in ORDERLY or start.killed_by_power:
            continue
        recorded = Counter[bytes]()
        for record in records:
            if record["name"] == "act" and record.get("error") != "may_have_run":
                recorded[_canonical(record["arguments"])] += 1
        for run in history.tool_runs:
            if run.tool != "act" or run.start != start.number:
                continue
            number = recorded[msgspec.json.encode(run.arguments, order="sorted")]
            if number > 1 or (not number and run.ended is not None):
                yield f"start {start.number}: {run} is recorded {number} times"


def _canonical(arguments: str) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted")
    except msgspec.DecodeError:
        return arguments.encode()


@invariant
def agents_end_as_their_turns_say(history: History) -> Problems:
    """An answer counts its turns; ``agent.max_turns`` and five turns of failures end a row."""
    if history.world.job.kind != "agents":
        return
    resumed = len(history.starts) > 1
    for start in history.starts:
        for row, result in results_of(start).items():
            spec = history.world.units[row]
            end = expected_end(spec)
            where = f"row {row} with {spec.calls}: {result['error_kind']} {result['error']}"
            if result["status"] == "ok":
                if end and not (resumed and end == "tool"):
                    yield f"{where}, expected {end}"
                if result["turns"] != len(spec.calls) + 1:
                    yield f"{where}, {result['turns']} turns"
            elif result["error_kind"] in {"max_turns", "tool"} - {end} and not resumed:
                yield f"{where}, expected {end}"
            if result["turns"] is not None and result["turns"] > MAX_TURNS:
                yield f"{where}, {result['turns']} turns"


@invariant
def equal_lookups_are_shared(history: History) -> Problems:
    """Equal calls of a tool that shares them never run at the same time."""
    busy: dict[tuple[int, bytes], float] = {}
    for run in history.tool_runs:
        if run.tool != "look" or run.ended is None:
            continue
        key = run.start, msgspec.json.encode(run.arguments)
        if run.began < busy.get(key, -1.0):
            yield f"{run} began before {busy[key]}"
        busy[key] = run.ended


@invariant
def waiting_for_tools_takes_no_slot(history: History) -> Problems:
    """Agents take no longer than their requests need in the slots, and the longest conversation."""
    world, start = history.world, history.starts[0]
    if world.job.kind != "agents" or world.events or start.code not in (0, 1):
        return
    if any(endpoint.windows or endpoint.capacity for endpoint in world.endpoints):
        return
    if not all(is_good(reply) for row in world.units for reply in row.replies):
        return
    slots = 8 if world.job.concurrency == "auto" else int(world.job.concurrency)
    if world.job.per_endpoint != "auto":
        slots = min(slots, int(world.job.per_endpoint) * len(world.endpoints))
    times = [4.0 if "slow:4" in row.replies else row.seconds for row in world.units]
    work = sum(time * (len(row.calls) + 1) for time, row in zip(times, world.units, strict=True))
    longest = max(
        (time + 6.0) * (len(row.calls) + 1) for time, row in zip(times, world.units, strict=True)
    )
    if start.ended - start.began > 1.2 * work / slots + longest + 5.0:
        yield f"{start.ended - start.began:.1f} s for {work:.1f} s of requests in {slots} slots"


def _agent_requests(history: History) -> Iterator[Sent]:
    """Yield the requests of agents in order."""
    if history.world.job.kind == "agents":
        for start in history.starts:
            yield from sent_in(history, start.number)
