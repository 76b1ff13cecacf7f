"""Invariants of servers that take so much, of contexts and of rates."""

from __future__ import annotations

from collections import Counter

from worlds.evidence import Problems, before, invariant, invariant_for, is_answer, sent_in
from worlds.history import History
from worlds.replies import ANSWER_TOKENS, PROMPT_TOKENS

STARTING = 12
"""Requests of a start that a server with limits refuses until its pace is found, at most."""


@invariant
def a_long_row_goes_where_it_fits(history: History) -> Problems:
    """A server whose context is too short for a row is not sent it again."""
    for start in history.starts:
        refused = Counter(
            (row, sent.endpoint)
            for sent in sent_in(history, start.number)
            if sent.reply == "overflow" and sent.by_endpoint
            for row in sent.rows
        )
        for (row, endpoint), count in refused.items():
            if count > 1:
                yield f"start {start.number}: row {row} was too long for {endpoint} {count} times"


@invariant_for("single")
def a_paced_server_is_used_well(history: History) -> Problems:
    """A server that takes so many requests a minute serves nearly as many while rows wait, and
    refuses few of them where it says its limits."""
    world, start = history.world, history.starts[-1]
    paces = [endpoint.pace for endpoint in world.endpoints]
    if None in paces or world.events or start.code not in (0, 1) or before(history, start):
        return
    job, requests = world.job, sent_in(history, start.number)
    if (job.rpm, job.tpm, job.deadline, job.budget, job.row_seconds) != (None,) * 5:
        return
    pace = sum(filter(None, paces))
    refused = [sent for sent in requests if sent.by_endpoint]
    served = len(requests) - len(refused)
    slowest = max(row.seconds for row in world.units) * served
    longest = slowest + 180.0 + 2.0 * 60.0 * served / pace
    if start.ended - start.began > longest:
        yield f"{start.ended - start.began:.0f} s for {served} requests of {pace} a minute"
    known = min(sent.done for sent in requests if sent.done is not None)
    late = [sent for sent in refused if sent.at > known]
    if world.endpoints[0].tells == "limits" and len(late) > STARTING + served // 5:
        yield f"{len(late)} of {len(requests)} requests were refused once the limits were known"


@invariant_for("single", "schema")
def tokens_a_minute_are_kept(history: History) -> Problems:
    """With ``limits.tpm`` no minute has more tokens than that, or one request more."""
    most = history.world.job.tpm
    for start in history.starts if most is not None else ():
        answered = sorted(sent.at for sent in sent_in(history, start.number) if is_answer(sent))
        count = 1 + int(most / (PROMPT_TOKENS + ANSWER_TOKENS))
        for first, last in zip(answered, answered[count:], strict=False):
            if last - first < 59.0:
                yield f"start {start.number}: {count + 1} answers from {first} to {last}"
                break
