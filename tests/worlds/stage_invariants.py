"""Invariants of jobs with several stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import msgspec

from bagent.types import PASSING_KINDS
from worlds.evidence import (
    ORDERLY,
    Problems,
    invariant_for,
    is_answer,
    is_failed,
    may_lose_answers,
    recovered_soon,
    sent_in,
)
from worlds.history import History, Start
from worlds.network import Sent
from worlds.replies import LASTING, base_kind
from worlds.stages import (
    ANSWERS,
    LAST,
    LEAF,
    ROUNDS,
    TOPOLOGIES,
    digest_of,
    items_of,
    label_of,
    leaves,
    vector_of,
)

Result = dict[str, Any]
Key = tuple[str, Any, Any, int]


@invariant_for("stages")
def each_result_is_there_once(history: History) -> Problems:
    """No stage has two results for one row and answer."""
    for start in history.starts:
        counts = Counter(_key(result) for result in start.results)
        for key, count in counts.items():
            if count > 1:
                yield f"start {start.number}: {key} is there {count} times"


@invariant_for("stages")
def an_answered_request_is_not_sent_again(history: History) -> Problems:
    """What was answered well is on disk, whatever kills the process, and is not asked again, unless
    its row had another text meanwhile."""
    if any(s.killed_by_power or may_lose_answers(history, s) for s in history.starts):
        return
    answered: dict[str, Sent] = {}
    for start in history.starts:
        answered = {key: sent for key, sent in answered.items() if not _is_edited(start, sent)}
        for sent in sent_in(history, start.number):
            for key in sent.keys:
                first = answered.get(key)
                if first is not None and sent.at > (first.done or 0.0):
                    done = f"answered at {first.done}, sent at {sent.at}"
                    yield f"{sent.stage} of row {sent.rows} {done}"
            if is_answer(sent) and sent.done is not None and sent.done < start.ended:
                answered |= dict.fromkeys(sent.keys, sent)


def _is_edited(start: Start, sent: Sent) -> bool:
    """Return whether a row of a request has another version in a start."""
    marks = LEAF.findall(sent.prompt) or zip(sent.rows, sent.versions, strict=True)
    return any(start.versions.get(int(mark[0]), 0) != int(mark[1]) for mark in marks)


@invariant_for("stages")
def finished_results_stay(history: History) -> Problems:
    """A good result stays as it is, unless rows were edited, or an earlier stage had failures, then
    or when the result was made."""
    edited = any(start.versions != history.starts[0].versions for start in history.starts)
    for earlier, later in pairwise(history.starts):
        if later.killed_by_power or edited:
            continue
        failed = {
            result["stage"]
            for result in earlier.results
            if result["status"] != "ok" or result["parents_failed"]
        }
        order = _stages(history)
        after = {_key(result): result for result in later.results}
        for result in earlier.results:
            stage = result["stage"]
            if result["status"] != "ok" or failed & set(order[: order.index(stage)]):
                continue
            if result["parents_failed"]:
                continue  # it was made with failures before it, which may be over
            if stage in failed and stage in ("reduce", "blackboard", "alpha", "beta"):
                continue
            new = after.get(_key(result))
            if new is None or _content(new) != _content(result):
                yield f"after start {earlier.number}: {result}, now {new}"


@invariant_for("stages")
def answers_are_made_of_the_present_ones(history: History) -> Problems:
    """At the end each answer was given to a prompt with the present answers before it."""
    start = history.starts[-1]
    if start.code not in (0, 1):
        return
    prompts = {sent.keys[0]: sent for sent in history.network.sent}
    by_ref = {f"{r['stage']}:{r['id']}:{r['answer']}": r for r in start.results}
    ambiguous = _ambiguous_ids(history)
    for result in start.results:
        digest = digest_of(result)
        if result["status"] != "ok" or digest is None or result["stage"] == "item":
            continue
        sent = prompts.get(digest)
        if sent is None or sent.stage not in result["stage"]:
            yield f"{_key(result)}: no request for {result['text']}"
            continue
        row = result["row"]
        if row is not None and sent.stage != "reduce":
            version = start.versions.get(row, 0)
            if f"<<{row}v{version}>>" not in sent.prompt:
                yield f"{_key(result)} is of row {row} in version {version}: {sent.prompt}"
        for ref in result["parents"] or ():
            parent = by_ref.get(ref)
            if parent is None:
                yield f"{_key(result)}: no parent {ref}"
            elif parent["status"] == "ok" and not ambiguous and result["stage"] in _READERS:
                shown = digest_of(parent)
                if shown is not None and shown not in sent.prompt:
                    yield f"{_key(result)} was made of another {ref} than {parent['text']}"


_READERS = ("step2", "judge", "reduce")
"""Stages whose prompts show the answers of all their parents."""


@invariant_for("stages")
def a_reduction_has_each_row_once(history: History) -> Problems:
    """What remains of a reduction is made of each good row before it, once."""
    start, topology = history.starts[-1], history.world.job.topology
    source = {
        "map_reduce": "map", "tree_reduce": "map", "plan": "work", "broadcast": "broadcast",
        "split": "read", "grouped": "map",
    }  # fmt: skip
    if start.code not in (0, 1) or topology not in source or _ambiguous_ids(history):
        return
    results = [result for result in start.results if result["stage"] == "reduce"]
    used = Counter(ref for result in results for ref in result["parents"] or ())
    for ref, count in used.items():
        if count > 1:
            yield f"{ref} is in {count} groups"
    good = [
        r for r in start.results if r["stage"] == source[topology] and not is_failed(history, r)
    ]
    for rows in _groups(history):
        top = [r for r in _remaining(start) if _is_of(r, rows)]
        expected = leaves(" ".join(r["text"] for r in good if r["row"] in rows))
        top = [r for r in top if r["status"] == "ok"] or top  # a failed group is dropped
        if len(top) != 1 and (not top or top[0]["status"] == "ok"):
            yield f"{len(top)} rows remain: {[r['id'] for r in top]}"
            continue
        made = leaves(top[0]["text"] or "")
        good_nodes = all(r["status"] == "ok" for r in results if _is_of(r, rows))
        if good_nodes and made != expected:
            yield f"made of {made}, expected {expected}"


def _groups(history: History) -> list[set[int]]:
    """Return the rows of which a reduction makes one."""
    rows, topology = history.world.rows, history.world.job.topology
    if topology in ("map_reduce", "tree_reduce", "split"):
        return [set(range(len(rows)))]
    if topology == "grouped":
        texts = sorted({row.text for row in rows})
        return [{n for n, row in enumerate(rows) if row.text == text} for text in texts]
    return [{number} for number in range(len(rows))]


def _is_of(result: Result, rows: set[int]) -> bool:
    """Return whether a result of a reduction is of a group; one of several rows names them in its
    answer."""
    named = {int(mark[0]) for mark in LEAF.findall(result["text"] or "")}
    return result["row"] in rows or (result["row"] is None and named <= rows)


def _remaining(start: Start) -> list[Result]:
    """Return the results of a reduction that no other one was made of."""
    results = [result for result in start.results if result["stage"] == "reduce"]
    used = {ref for result in results for ref in result["parents"] or ()}
    return [result for result in results if f"reduce:{result['id']}:0" not in used]


@invariant_for("stages")
def each_stage_has_its_results(history: History) -> Problems:
    """At the end no row is missing in a stage, and none is too many."""
    start, world = history.starts[-1], history.world
    if start.code not in (0, 1):
        return
    rows = len(world.rows)
    counts = Counter(result["stage"] for result in start.results)
    good = Counter(r["stage"] for r in start.results if not is_failed(history, r))
    by_topology = {
        "pipeline": dict.fromkeys(("step1", "step2", "step3"), rows),
        "judge": {"answer": rows * ANSWERS["judge"], "judge": good["answer"]},
        "vote": {"sample": rows * ANSWERS["vote"]},
        "map_reduce": {"map": rows},
        "tree_reduce": {"map": rows},
        "grouped": {"map": rows},
        "broadcast": {"broadcast": rows * len(world.endpoints)},
        "split": {"read": counts["piece"]},
        "embed": {"note": rows, "vector": rows},
    }
    expected = by_topology.get(world.job.topology, {})
    if world.job.topology == "pipeline" and world.job.on_failure == "drop":
        expected |= {"step2": good["step1"], "step3": good["step2"]}
    match world.job.topology:
        case "plan":
            parts = sum(
                items_of(f"<<{result['row']}v0>>") if result["status"] == "ok" else 1
                for result in start.results
                if result["stage"] == "plan"
            )
            expected = {"plan": rows, "item": parts, "work": parts}
        case "blackboard":
            expected = {"blackboard": rows}
            if good["blackboard"] == rows:
                expected |= dict.fromkeys(("blackboard.alpha", "blackboard.beta"), rows * ROUNDS)
    for stage, number in expected.items():
        if counts[stage] != number:
            yield f"stage {stage} has {counts[stage]} results, expected {number}: {dict(counts)}"


@invariant_for("stages")
def each_word_is_in_a_piece(history: History) -> Problems:
    """The pieces of a text have all its words."""
    start = history.starts[-1]
    if start.code not in (0, 1) or history.world.job.topology != "split":
        return
    pieces = defaultdict[int, list[Result]](list)
    for result in start.results:
        if result["stage"] == "read":
            pieces[result["row"]].append(result)
    for number, row in enumerate(history.world.rows):
        parts = pieces[number]
        if not parts:
            yield f"row {number} has no pieces"
        elif all(part["status"] == "ok" for part in parts):
            read = set(leaves(" ".join(part["text"] for part in parts)))
            if missing := set(leaves(row.text)) - read:
                yield f"row {number}: {missing} are in no piece"


@invariant_for("stages")
def vectors_are_of_their_rows(history: History) -> Problems:
    """Each row has the vector of its own text, in whatever batches it was requested."""
    start = history.starts[-1]
    if start.code not in (0, 1) or history.world.job.topology != "embed":
        return
    notes = {r["row"]: r for r in start.results if r["stage"] == "note"}
    for result in start.results:
        if result["stage"] == "vector" and result["status"] == "ok":
            vector = msgspec.json.decode(result["output"])
            if vector != vector_of(notes[result["row"]]["text"]):
                yield f"row {result['row']}: {vector} for {notes[result['row']]['text']}"


@invariant_for("stages")
def votes_are_counted_right(history: History) -> Problems:
    """The winner of a vote has the most good answers of its row."""
    start = history.starts[-1]
    if start.code not in (0, 1) or history.world.job.topology != "vote":
        return
    votes = defaultdict[int, Counter[str]](Counter)
    for result in start.results:
        if result["stage"] == "sample" and result["status"] == "ok":
            votes[result["row"]][label_of(digest_of(result) or "0")] += 1
    winners = {
        result["row"]: msgspec.json.decode(result["output"])
        for result in start.results
        if result["stage"] == "vote" and result["status"] == "ok"
    }
    for row, counts in votes.items():
        output = winners.get(row)
        most = max(counts.values())
        if output is None or (counts[output["winner"]], output["votes"]) != (most, most):
            yield f"row {row}: {dict(counts)}, {output}"


@invariant_for("stages")
def stages_fail_for_a_reason(history: History) -> Problems:
    """A result fails for what servers answered to it, never for an endpoint's sake."""
    single = history.world.job.retries == 0
    for start in history.starts:
        for result in start.results:
            kind, stage, row = result["error_kind"], result["stage"], result["row"]
            if not is_failed(history, result) or kind == "bad_input" or row is None:
                continue
            if kind == "template" and _is_plan_cut_off(history, row):
                continue
            name = stage.rpartition(".")[2]
            requests = [
                sent
                for sent in history.network.sent
                if sent.stage == name and (row in sent.rows or name == "reduce")
            ]
            replies = [sent.reply for sent in requests]
            where = f"start {start.number} {_key(result)}: {kind} {result['error']!r} {replies}"
            if kind in PASSING_KINDS:
                if single and kind == "timeout" and "hang" in replies:
                    continue
                if single and any(recovered_soon(history, sent) for sent in requests):
                    continue
                if all(sent.by_endpoint for sent in requests):
                    yield where
            elif kind not in (LASTING.get(base_kind(reply)) for reply in replies):
                yield where


def _is_plan_cut_off(history: History, row: int) -> bool:
    """Return whether the plan for a row may be cut off and accepted: it names nothing to do."""
    job = history.world.job
    cut = "length" in map(base_kind, history.world.units[row].replies)
    return (job.topology, job.truncated) == ("plan", "accept") and cut


@invariant_for("stages")
def nothing_fails_for_a_failure_that_is_over(history: History) -> Problems:
    """At the end a result that has nothing to ask about has a failure before it, in an earlier
    stage or a lower level of its own: once that came out well, what follows is made anew. A vote
    counts a property of the answers, which an accepted truncated one does not have."""
    start, order = history.starts[-1], _stages(history)
    if start.code not in (0, 1):
        return
    failed = Counter(
        (result["stage"], row)
        for result in start.results
        if is_failed(history, result) or (result["stage"] == "sample" and result["status"] != "ok")
        for row in (result["row"], None)
    )
    for result in start.results:
        stage, row = result["stage"], result["row"]
        earlier = order[: order.index(stage)] if stage in order else []
        if result["error_kind"] != "bad_input" or not earlier:
            continue
        if failed[stage, row] < 2 and not any(failed[name, row] for name in earlier):
            yield f"{_key(result)}: {result['error']}, and nothing before it failed"


@invariant_for("stages")
def stage_totals_agree(history: History) -> Problems:
    """Exit code and summary count the rows of the last stage, and those that were dropped; the
    summary counts the failures of all stages where no row reached the last one."""
    for start in history.starts:
        if start.code not in (0, 1) or start.ending is None:
            continue
        last = _last(history)
        reached = [result for result in start.results if result["stage"] == last]
        failures = [result for result in start.results if is_failed(history, result)]
        statuses = Counter(result["status"] for result in reached or failures)
        totals = start.ending.snapshot.totals
        if dict(statuses) != {k: v for k, v in totals.by_status.items() if v}:
            yield f"start {start.number}: results {dict(statuses)}, summary {totals.by_status}"
        dropped = sum(start.ending.snapshot.dropped.values())
        failed = dropped + sum(is_failed(history, result) for result in reached or failures)
        if (start.code == 1) != (failed > history.world.job.allow_failures):
            yield f"start {start.number}: {start.code}, {failed} failed: {dict(statuses)}"


@invariant_for("stages")
def each_stage_request_is_in_the_attempts(history: History) -> Problems:
    """The table of attempts has each request that was answered, with stage and status."""
    counted = 0
    for start in history.starts:
        attempts = start.attempts[counted:]
        counted = len(start.attempts)
        if start.code not in ORDERLY or start.killed_by_power:
            continue
        expected = Counter(
            (sent.stage, sent.status)
            for sent in sent_in(history, start.number)
            if sent.status is not None and sent.gone is None
        )
        recorded = Counter(
            (attempt["stage"].rpartition(".")[2], attempt["status_code"])
            for attempt in attempts
            if attempt.get("status_code") is not None
        )
        if expected != recorded:
            yield (
                f"start {start.number}: not recorded {expected - recorded},"
                f" not sent {recorded - expected}"
            )


def _content(result: Result) -> tuple[Any, bytes]:
    output = result["output"]
    return result["text"], b"" if output is None else bytes(output)


def _key(result: Result) -> Key:
    return result["stage"], result["row"], result["id"], result["answer"]


def _last(history: History) -> str:
    topology = history.world.job.topology
    return LAST.get(topology, "reduce")


def _stages(history: History) -> list[str]:
    """Return the stages of a world in order, as results name them."""
    match history.world.job.topology:
        case "blackboard":
            return ["blackboard.alpha", "blackboard.beta", "blackboard"]
        case "plan":
            return ["plan", "item", "work", "reduce"]
        case "vote":
            return ["sample", "vote"]
        case "split":
            return ["piece", "read", "reduce"]
        case topology:
            return list(TOPOLOGIES[topology])


def _ambiguous_ids(history: History) -> bool:
    """Return whether two rows have one id, so that parents do not tell them apart."""
    ids = [str(row.id) for row in history.world.rows]
    return len(set(ids)) < len(ids)
