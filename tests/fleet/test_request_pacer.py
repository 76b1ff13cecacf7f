"""The rate at which an account's requests may start, on clocks that only the tests move."""

from __future__ import annotations

import heapq
import itertools
from random import Random

import pytest

from bagent.fleet.call import Call
from bagent.fleet.limits.pacing import RequestPacer
from bagent.fleet.retry import RetryPolicy, count_and_decide
from bagent.types import Failure


def starts(pace, count, at=0.0, late=0.0):
    """When ``count`` requests start that are all ready, each ``late`` seconds after its time."""
    times = []
    for _ in range(count):
        wait = pace.wait(at)
        if wait > 0:
            at += wait + late
        assert pace.wait(at) <= 1e-9
        pace.start(at)
        times.append(at)
    return times


def test_pauses_double_where_the_server_names_none():
    pace = RequestPacer(None, 1000)
    now, pauses = 0.0, []
    for _ in range(8):
        pauses.append(pace.on_refusal(now, now + 0.01, None))
        now += 0.02 + pauses[-1]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 30, 30, 30])


def test_refusals_of_what_was_sent_before_a_pause_are_answered_by_it():
    pace = RequestPacer(None, 120)
    pace.on_refusal(0.0, 1.0, None)
    for sent in (0.0, 0.5, 0.9):
        assert pace.on_refusal(sent, 1.5, None) == pytest.approx(0.5)
    assert pace.on_refusal(2.1, 2.2, None) == pytest.approx(2.0)


def test_patience_starts_anew_once_something_sent_after_the_pause_is_served():
    pace = RequestPacer(None, 120)
    pace.on_refusal(0.0, 1.0, None)
    pace.on_refusal(2.0, 3.0, None)
    pace.on_success(3.5, 0.5)
    assert pace.on_refusal(5.5, 6.0, None) == pytest.approx(4.0)
    pace.on_success(11.0, 10.5)
    assert pace.on_refusal(11.5, 12.0, None) == pytest.approx(1.0)


def test_the_rate_creeps_up_by_three_percent_a_second():
    pace = RequestPacer(None, 120)
    for second in range(10):
        for _ in range(100):
            pace.on_success(second + 0.5, second)
    pace.on_refusal(9.0, 10.0, None)
    rate = pace.rate
    for _ in range(round(rate)):
        pace.on_success(11.5, 11.0)
    assert pace.rate == pytest.approx(1.03 * rate, rel=0.01)


def test_a_success_shortens_the_wait_that_had_begun():
    """A server that had refused all for minutes got the second request 50 s after the first."""
    pace = RequestPacer(None, 1000)
    now = 0.0
    for _ in range(12):
        pace.on_refusal(now, now + 0.1, 7.0)
        now += 0.1 + pace.wait(now + 0.1)
    pace.start(now)
    assert pace.wait(now) == pytest.approx(50.0)
    pace.on_success(now + 2.0, now)
    assert pace.wait(now + 2.0) == pytest.approx(24.0)


def test_refusals_without_any_success_slow_down_to_a_crawl_but_never_stop():
    pace = RequestPacer(None, 1000)
    now = 0.0
    for _ in range(40):
        pace.on_refusal(now, now + 0.1, None)
        now += 100
    assert 0 < pace.rate <= 0.05
    assert pace.wait(now) < 100


@pytest.mark.parametrize("per_minute", [1, 60, 90, 600, 1200])
def test_a_fixed_rate_is_never_passed_in_any_minute(per_minute):
    times = starts(RequestPacer(per_minute, 120), 5 * per_minute + 3)
    for first, later in zip(times, times[per_minute:], strict=False):
        assert later - first >= 60 - 1e-6


# --- against servers that count -----------------------------------------------------------------


class Server:
    """Allows ``allowed`` requests in each window of ``window`` seconds; tells when if asked."""

    def __init__(self, allowed, window, *, tells=False, latency=0.05):
        self.allowed, self.window, self.tells, self.latency = allowed, window, tells, latency
        self.counts = {}
        self.requests = 0

    def ask(self, now):
        """Whether the request is served, when the answer comes, and what it is told."""
        self.requests += 1
        place = int(now // self.window)
        self.counts[place] = self.counts.get(place, 0) + 1
        if self.counts[place] <= self.allowed:
            return True, now + self.latency, None
        return False, now + 0.005, self.window - now % self.window if self.tells else None


def simulate(server, rows, concurrency, pace=None, policy=None):
    """Rows through the pace and the retry rules; returns when each was served."""
    pace, policy = pace or RequestPacer(None, 120.0), policy or RetryPolicy(throttled=1e9)
    random, serial = Random(7), itertools.count()
    ready = [Call(None, None, "k", row, "s", 0) for row in range(rows)]
    events, served, now, in_flight = [], [], 0.0, 0
    earliest = {}
    while len(served) < rows:
        while ready and in_flight < concurrency and pace.wait(now) <= 0:
            call = ready.pop(0)
            assert now >= earliest.get(call.row, 0.0)
            in_flight += 1
            pace.start(now)
            good, at, told = server.ask(now)
            heapq.heappush(events, (at, next(serial), call, good, now, told))
        due = events[0][0] if events else float("inf")
        if ready and in_flight < concurrency:
            due = min(due, now + max(pace.wait(now), 1e-6))
        now = max(now, due)
        while events and events[0][0] <= now:
            at, _, call, good, sent, told = heapq.heappop(events)
            if good is None:
                ready.insert(0, call)
                continue
            in_flight -= 1
            if good:
                served.append(at)
                pace.on_success(at, sent)
                continue
            pace.on_refusal(sent, at, told)
            failure = Failure("rate_limited", "slow down", True, 429, told, busy=True)
            decision = count_and_decide(policy, call, failure, at, random)
            assert decision.delay is not None
            if told is not None:
                earliest[call.row] = at + told
            wake = (at + decision.delay, next(serial), call, None, 0.0, None)
            heapq.heappush(events, wake)
    return served


@pytest.mark.parametrize(
    ("server", "rows", "concurrency"),
    [
        (Server(3, 60.0, tells=True), 30, 50),
        (Server(500, 60.0), 2000, 200),
        (Server(5, 1.0), 100, 50),
        (Server(50, 1.0, latency=5.0), 1000, 300),
        (Server(1, 10.0), 50, 50),
    ],
)
def test_any_fixed_window_is_used_well_and_with_few_refusals(server, rows, concurrency):
    served = simulate(server, rows, concurrency)
    ideal = rows / server.allowed * server.window + server.latency
    assert served[-1] < 1.6 * ideal + 10
    assert server.requests < 2.5 * rows + concurrency
