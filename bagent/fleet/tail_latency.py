"""The rule that keeps the last rows of a run from slow endpoints."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagent.fleet.endpoint_state import EndpointState

WINDOW = 512
"""Requests over which the throughput of the fleet is measured."""

MIN_ENDPOINT_REQUESTS = 4
MIN_REQUESTS = 64
"""Requests of one endpoint, and of all, before an endpoint can be called slow."""

WEIGHT = 0.1
"""Weight of a new request in the running mean of latencies."""

SLOW_FACTOR = 1.5
"""An endpoint is slow if it takes at least this many times as long as the others."""

LAST_ANSWER_FACTOR = 1.5
"""The slowest of the last answers takes about this many times the mean."""


MIN_RATE_ROWS = 32
"""Answered rows of all endpoints from which their throughputs are compared."""

MIN_RATE_SECONDS = 0.1
"""Shortest time over which a throughput is measured."""

TOTAL_SECONDS = 0.25
"""How often the throughput of all endpoints is summed up."""

EQUAL_SHARE = 0.8
"""Share of the mean throughput from which an endpoint is not slow: it may have any number of
rows."""

SHORT_SHARE = 0.5
"""Share of the time to the end of the run. An endpoint that answers a row within it has no
limit."""

SLOW_SHARE = 0.6
"""How much of its share of the remaining rows a slow endpoint may have in flight, so that it ends
them before the others end theirs."""


class TailRule:
    """Decides whether an endpoint is too slow for the last rows; times on the fleet's clock."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._by_endpoint: dict[str, tuple[int, float]] = {}
        self._answers: dict[str, AnswerRate] = {}
        self._total_rate = self._mean_rate = self._mean_latency = 0.0
        self._total_at = float("-inf")
        self._ends: deque[tuple[float, int]] = deque()
        self._rows = 0

    def add(self, endpoint: str, now: float, seconds: float, rows: int = 1) -> None:
        """Record that an endpoint answered a request of ``rows`` after ``seconds``."""
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        weight = max(WEIGHT, 1 / (count + 1))
        self._by_endpoint[endpoint] = count + 1, mean + weight * (seconds - mean)
        self._mean += max(WEIGHT / 4, 1 / (len(self._ends) + 1)) * (seconds - self._mean)
        self._ends.append((now, rows))
        self._rows += rows
        if len(self._ends) > WINDOW:
            self._rows -= self._ends.popleft()[1]
        answers = self._answers.get(endpoint)
        if answers is None:
            answers = self._answers[endpoint] = AnswerRate(now - seconds)
        answers.add(now, rows)

    def most_rows(
        self, state: EndpointState, now: float, states: Iterable[EndpointState], remaining: int
    ) -> float:
        """Return how many rows an endpoint may have in flight without delaying the end of the run.

        A slow one, by throughput, may have part of its share of the ``remaining`` rows, those in
        flight included. No other has a limit, nor has any before some rows were answered, or one
        that answers a row about as soon as others do, or long before all of them can be done: its
        throughput may be low for want of rows.

        Args:
            states: the endpoints that can be sent rows.
        """
        rate = self._rate(state, now)
        if rate is None or self._rows < MIN_RATE_ROWS:
            return math.inf
        if now - self._total_at > TOTAL_SECONDS:
            self._total_at = now
            self._sum_up(list(states), now)
        _, latency = self._by_endpoint.get(state.name, (0, math.inf))
        early = latency < SHORT_SHARE * remaining / self._total_rate
        usual = latency * EQUAL_SHARE <= self._mean_latency
        if early or usual or rate >= EQUAL_SHARE * self._mean_rate:
            return math.inf
        return SLOW_SHARE * remaining * rate / self._total_rate

    def _sum_up(self, states: Sequence[EndpointState], now: float) -> None:
        rates = {state.name: self._rate(state, now) for state in states}
        measured = {name: rate for name, rate in rates.items() if rate is not None}
        self._mean_rate = sum(measured.values()) / max(1, len(measured))
        self._total_rate = self._mean_rate * len(states)
        latencies = self._by_endpoint
        answered = [
            (rate, latencies[name][1]) for name, rate in measured.items() if name in latencies
        ]
        busy = sum(rate * latency for rate, latency in answered)
        self._mean_latency = busy / max(1e-9, sum(rate for rate, _ in answered))

    def _rate(self, state: EndpointState, now: float) -> float | None:
        """Return the rows per second of an endpoint, None before it was sent any."""
        answers = self._answers.get(state.name)
        if answers is not None:
            return answers.rate(now, state.in_flight)
        began = state.oldest_wait
        return None if began is None else AnswerRate(began).rate(now, state.in_flight)

    def forget(self, endpoint: str) -> None:
        """Forget the throughput of an endpoint that was down."""
        self._answers.pop(endpoint, None)

    def is_too_slow(self, endpoint: str, now: float, remaining: int) -> bool:
        """Return whether all others would finish the ``remaining`` rows before this endpoint
        answered one more; False while too few requests are known."""
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        if count < MIN_ENDPOINT_REQUESTS or len(self._ends) < MIN_REQUESTS:
            return False
        if mean < SLOW_FACTOR * self._mean:
            return False
        others = remaining * (now - self._ends[0][0]) / self._rows
        return LAST_ANSWER_FACTOR * (mean - self._mean) > others


class AnswerRate:
    """The latest answers of one endpoint, for its throughput."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._ends: deque[tuple[float, int]] = deque()
        self._rows = 0

    def add(self, now: float, rows: int) -> None:
        """Record that ``rows`` were answered."""
        self._ends.append((now, rows))
        self._rows += rows
        if len(self._ends) > WINDOW:
            self._began, rows = self._ends.popleft()
            self._rows -= rows

    def rate(self, now: float, in_flight: int) -> float:
        """Return the rows per second.

        Before the first answer rows in flight count half: an engine works on all at once, so that
        none is answered for a long time, and then many.
        """
        return (self._rows or in_flight / 2) / max(now - self._began, MIN_RATE_SECONDS)
