"""Invariants of rows with which servers die."""

from __future__ import annotations

from collections.abc import Sequence

from worlds.evidence import Problems, events_of, invariant_for, new_results, sent_by_row, sent_in
from worlds.history import History
from worlds.network import Sent

MOST_DEATHS = 3
"""Servers that may die with a row."""

SURELY_DOWN = 2.0
"""Seconds for which a server is down that fails its probe for sure."""

STALE_SECONDS = 0.9
"""A connection that was used before, and breaks after so long without a request, or within about so
long in one, may have been closed by the server: the row is then sent once more for free."""


@invariant_for("single", "schema", "lists", "agents")
def a_deadly_row_is_given_up(history: History) -> Problems:
    """A row with which three servers died fails, and not before; after the second one it runs
    alone on its server."""
    if history.world.job.hedge != "off" or history.world.job.hosted:
        return
    for start in history.starts:
        if start.woken or "hosts" in events_of(history, start.number):
            continue
        requests = sent_in(history, start.number)
        results = new_results(history, start)
        for row, own in sent_by_row(history, start.number).items():
            deaths = [sent for sent in own if _died(history, sent)]
            sure = _sure(history, deaths, requests)
            for number, death in enumerate(sure, 1):
                after = [sent for sent in own if sent.at > (death.done or 0.0)]
                where = f"row {row}: {number} servers died with it at {death.done}"
                if number >= MOST_DEATHS and after:
                    yield f"{where}, sent at {after[0].at}"
                if number == MOST_DEATHS - 1 and after and _has_company(requests, after[0]):
                    yield f"{where}, not alone at {after[0].at}"
            error = results.get(row, {}).get("error") or ""
            if "endpoints died" in error and len(deaths) < MOST_DEATHS:
                yield f"row {row}: {error}, {len(deaths)} servers died with it"


def _died(history: History, sent: Sent) -> bool:
    """Return whether the server of a request was down, or hung, when its connection ended."""
    if sent.status is not None or sent.over is None:
        return False
    return history.network.state_at(sent.endpoint, sent.at, sent.over + 0.1) is not None


def _sure(history: History, deaths: Sequence[Sent], requests: Sequence[Sent]) -> list[Sent]:
    """Return the deaths that count for sure: the server went down for some seconds, in a moment in
    which it answered nothing, and the connection was not merely closed."""
    answered = {(sent.endpoint, sent.done) for sent in requests if sent.status is not None}
    counted, free = list[Sent](), 1
    for sent in deaths:
        down = any(
            window.kind == "down"
            and window.begin == sent.done
            and window.end - window.begin >= SURELY_DOWN
            for window in history.network.windows(sent.endpoint)
        )
        if not down or (sent.endpoint, sent.done) in answered:
            continue
        if free and _may_be_stale(sent):
            free -= 1
        else:
            counted.append(sent)
    return counted


def _may_be_stale(sent: Sent) -> bool:
    """Return whether a connection that broke may have been closed before the request."""
    if sent.idle is None or sent.done is None:
        return False
    return sent.idle >= STALE_SECONDS or sent.done - sent.at < 1.0 / STALE_SECONDS


def _has_company(requests: Sequence[Sent], sent: Sent) -> bool:
    """Return whether a server worked on another request while it got this one."""
    return any(
        other is not sent
        and other.endpoint == sent.endpoint
        and other.at <= sent.at
        and (other.over is None or other.over > sent.at)
        for other in requests
    )
