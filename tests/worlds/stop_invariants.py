"""Invariants of early stops: signals, a stop file, deadlines and budgets."""

from __future__ import annotations

from worlds.evidence import Problems, invariant, sent_in
from worlds.network import ANSWER_USD, MAX_TOKENS, Sent, base_kind
from worlds.play import History

GRACE = 10.0
"""Seconds after a signal at which batch systems kill."""

NOTICED = 1.0
"""Seconds within which a stop file is seen."""


@invariant
def a_stop_is_quick(history: History) -> Problems:
    """After a signal or a stop file nothing new is sent, and the start ends within seconds; after a
    second Ctrl-C it ends at once."""
    for start in history.starts:
        asked = sorted(
            (start.began + event.at + (NOTICED if event.kind == "stop-file" else 0.0), event.kind)
            for event in history.world.events
            if event.start == start.number and event.kind in ("term", "int", "stop-file")
        )
        asked = [entry for entry in asked if entry[0] < start.ended]
        if not asked:
            continue
        at = asked[0][0]
        for sent in sent_in(history, start.number):
            if sent.at > at + 0.1:
                yield f"start {start.number}: row {sent.rows} sent at {sent.at}, stopped at {at}"
        if start.ended > at + GRACE:
            yield f"start {start.number} ended at {start.ended}, stopped at {at}"
        again = [second for second, kind in asked[1:] if kind == "int"]
        if again and start.ended > again[0] + 1.0:
            yield f"start {start.number} ended at {start.ended}, hurried at {again[0]}"


@invariant
def a_second_interrupt_is_130(history: History) -> Problems:
    """Only a second signal ends a start with 130."""
    for start in history.starts:
        signals = [
            event
            for event in history.world.events
            if event.start == start.number and event.kind in ("term", "int")
        ]
        if start.code == 130 and len(signals) < 2:
            yield f"start {start.number}: {signals}"


@invariant
def a_deadline_is_kept(history: History) -> Problems:
    """A start feeds until a quarter of its time remains, and has ended when the time is over."""
    seconds = history.world.job.deadline
    if seconds is None:
        return
    for start in history.starts:
        feeding = start.began + 0.75 * seconds
        for sent in sent_in(history, start.number):
            if sent.at > feeding + 0.1:
                yield f"start {start.number}: row {sent.rows} sent at {sent.at}"
        if start.ended > start.began + seconds:
            yield f"start {start.number} began at {start.began}, ended at {start.ended}"
        reason = start.ending.reason if start.ending is not None else ""
        if "deadline" in reason and start.ended < feeding - 0.1:
            yield f"start {start.number} stopped at {start.ended}: {reason}"


@invariant
def the_budget_is_kept(history: History) -> Problems:
    """What is spent, and what requests in flight may cost, is never more than the budget; the
    budget stops a start only where the next request might pass it."""
    budget = history.world.job.budget
    if budget is None:
        return
    for start in history.starts:
        requests = list(sent_in(history, start.number))
        for sent in requests:
            least = sum(_costs_at(other, sent.at)[0] for other in requests if other.at <= sent.at)
            if least > budget + 1e-6:
                yield f"start {start.number}: ${least} or more at {sent.at}, budget ${budget}"
                break
        reason = start.ending.reason if start.ending is not None else ""
        spent = sum(_costs_at(sent, start.ended)[1] for sent in requests)
        if "budget" in reason:
            if start.code != 76:
                yield f"start {start.number}: {start.code} {reason}"
            largest = max((len(sent.rows) for sent in requests), default=8)
            if spent + MAX_TOKENS * max(largest, 8) < budget:
                yield f"start {start.number}: ${spent} of ${budget} are spent: {reason}"


def _costs_at(sent: Sent, at: float) -> tuple[float, float]:
    """Return what a request may have cost at a time, at least and at most: an answer that cannot be
    read counts in full; an error in it, or one that never came, may do so."""
    over, in_full = sent.over, float(MAX_TOKENS * len(sent.rows))
    if over is None or over >= at:
        return in_full, in_full
    replies = sent.replies or (sent.reply,)
    if sent.status is None or base_kind(sent.reply) == "error200":
        return 0.0, in_full
    if sent.status >= 400:
        return 0.0, 0.0
    answered = all(
        base_kind(reply) in ("ok", "slow", "length", "filter", "blank", "invalid", "tools")
        for reply in replies
    )
    cost = ANSWER_USD * len(sent.rows) if answered else in_full
    return cost, cost
