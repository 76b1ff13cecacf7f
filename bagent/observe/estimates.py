"""How much work is left, and when it will be done."""

from __future__ import annotations

from bagent.observe.snapshot import Rates
from bagent.types import FeedStats, FleetStats


def estimate_to_do(done: int, fleet: FleetStats, feed: FeedStats) -> int | None:
    """Return how many results are still to be made, None where the input's size is not known.

    Rows not yet read are reckoned from the input's size, from how many rows came per unit so
    far, and from how many of those that were not skipped became work; rows that wait or are in
    flight are counted, and so are those that were read and not begun: all of a small file.
    """
    waiting = max(fleet.in_flight + fleet.ready + fleet.retrying, feed.wanted - done)
    if is_read_whole(feed):
        return waiting
    if feed.size is None:
        return None
    if feed.position <= 0 or feed.read <= 0:
        return None
    taken = feed.read - feed.skipped
    work_per_row = (done + waiting) / taken if taken > 0 else 1.0
    unread = (feed.size - feed.position) * feed.read / feed.position
    return waiting + round(unread * work_per_row)


def is_read_whole(feed: FeedStats) -> bool:
    """Return whether no rows of the input are left to read."""
    return feed.ended or (feed.size is not None and feed.position >= feed.size)


def rates_over(span_s: float, rows: int, prompt: int | None, completion: int | None) -> Rates:
    """Return what came in ``span_s`` seconds as speeds."""

    def per_second(number: int) -> float:
        return number / span_s if span_s > 0 else 0.0

    return Rates(
        span_s=span_s,
        rows_per_s=per_second(rows),
        prompt_tokens_per_s=None if prompt is None else per_second(prompt),
        completion_tokens_per_s=None if completion is None else per_second(completion),
    )


def finished_share(finished: int, to_do: int | None) -> float | None:
    """Return the share of the work that is finished, None where its size is not known."""
    if to_do is None:
        return None
    total = finished + to_do
    return finished / total if total else 1.0


def seconds_left(to_do: int | None, rows_per_s: float, throttled_s: float) -> float | None:
    """Return the seconds until the end, None where nobody can tell."""
    if to_do is None:
        return None
    if to_do == 0:
        return 0.0
    if rows_per_s <= 0:
        return None
    return max(to_do / rows_per_s, throttled_s)
