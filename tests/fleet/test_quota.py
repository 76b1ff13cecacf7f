"""Limits that a provider tells, kept without a refusal, on clocks that only the tests move."""

from __future__ import annotations

import asyncio
import heapq
import itertools

import pytest

from bagent.backends.http.rate_limit_headers import Allowance, RateLimits
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.limits.account import NOTHING, Account, RateQuota, RequestReservation, TokenUse
from support.scripted_fleet import GOOD, Answer, run_rows, throttled


class Bucket:
    """Fills at ``limit`` in ``period`` seconds; tells as OpenAI and Anthropic do."""

    def __init__(self, limit, period=60.0, full=1.0):
        self.limit, self.period = limit, period
        self.left, self.at = limit * full, 0.0

    def take(self, now, amount):
        self.left = min(self.limit, self.left + (now - self.at) * self.limit / self.period)
        self.at = now
        if self.left < amount:
            return False
        self.left -= amount
        return True

    def tell(self, now):
        reset = (self.limit - self.left) * self.period / self.limit
        return Allowance(self.limit, int(self.left), reset)


class Window:
    """Counts anew in each window of ``period`` seconds; tells as gateways do."""

    def __init__(self, limit, period=60.0, used=0):
        self.limit, self.period, self.used, self.window = limit, period, used, 0

    def take(self, now, amount):
        window = int(now // self.period)
        if window != self.window:
            self.window, self.used = window, 0
        if self.used + amount > self.limit:
            return False
        self.used += amount
        return True

    def tell(self, now):
        return Allowance(self.limit, self.limit - self.used, self.period - now % self.period)


def work(account, meters, seconds, *, latency=2.0, usage=(600, 40), in_flight=64):
    """Starts requests whenever the account lets it; returns (served, refused).

    ``meters`` counts by the names of the limits; heads come at once, answers after ``latency``.
    """
    amounts = {"requests": 1, "tokens": sum(usage), "input": usage[0], "output": usage[1]}
    now, served, refused, running, serial = 0.0, 0, 0, [], itertools.count()
    while now < seconds:
        wait = account.wait(now, 0) if len(running) < in_flight else float("inf")
        if running and running[0][0] <= now + wait:
            now, _, sent, mark, limits = heapq.heappop(running)
            served += 1
            account.update_limits(now - latency, limits, mark)
            account.on_success(now, sent)
            account.on_answer(now, sent, 0, None, usage[1])
            continue
        now += wait
        if wait:
            continue
        mark = account.start(now, account.estimate(usage[0], 4 * usage[1]))
        taken = [meter.take(now, amounts[name]) for name, meter in meters.items()]
        limits = RateLimits(now, **{name: meter.tell(now) for name, meter in meters.items()})
        if all(taken):
            heapq.heappush(running, (now + latency, next(serial), now, mark, limits))
        else:
            refused += 1
            account.update_limits(now, limits, mark)
            account.on_refusal(now, now, None)
    return served, refused


NOW = 1_796_000_000.0


def test_no_row_is_refused_by_a_provider_that_tells_what_it_allows(monkeypatch):
    monkeypatch.setattr("bagent.fleet.exchanges.unix", lambda: NOW)
    bucket = Bucket(120)

    def script(row, number):
        now = asyncio.get_running_loop().time() - 1000
        taken = bucket.take(now, 1)
        # Heads come with the request, 0.5 s before the end; the loop's clock does not show that.
        limits = RateLimits(NOW - 0.5, bucket.tell(now))
        return Answer(GOOD, 0.5, limits=limits) if taken else Answer(throttled(), limits=limits)

    s = run_rows({"a": script, "b": script}, 300, limit=8, hosted=True)
    assert len(s.recorder.replies) == len(s.backend.sent) == 300
    assert s.fleet.stats().throttle_answers == 0
    assert sum("allows 120 requests a minute" in notice for notice in s.notices) == 1
    times = [at for at, _, _ in s.backend.sent]
    assert times[-1] - times[0] < 1.1 * 300 / 120 * 60
    assert min(s.backend.shares.values()) > 100


METERS = {
    "requests": {"requests": Bucket(300)},
    "requests-in-windows": {"requests": Window(300)},
    "tokens": {"requests": Bucket(5000), "tokens": Bucket(120_000)},
    "prompts": {"requests": Bucket(5000), "input": Bucket(120_000), "output": Bucket(50_000)},
    "answers": {"requests": Bucket(5000), "input": Bucket(900_000), "output": Bucket(8_000)},
}


@pytest.mark.parametrize("name", list(METERS))
def test_what_a_provider_allows_is_used_and_nothing_is_refused(name):
    meters = METERS[name]
    served, refused = work(Account(None, None, 120.0, hosted=True), meters, 600.0)
    amounts = {"requests": 1, "tokens": 640, "input": 600, "output": 40}
    most = min(meter.limit * 10 / amounts[key] for key, meter in meters.items())
    assert refused == 0
    assert served >= 0.9 * most


@pytest.mark.parametrize(
    "meter", [Bucket(600, full=0.0), Window(600, used=590)], ids=["emptied", "spent"]
)
def test_an_account_that_others_have_emptied_is_refused_hardly_ever(meter):
    account = Account(None, None, 120.0, hosted=True)
    _, refused = work(account, {"requests": meter}, 300.0)
    assert refused <= 64, "what was sent before the first answer, and no more"


def test_the_pace_begins_at_what_the_first_answer_tells():
    account = Account(None, None, 120.0, hosted=True)
    assert account.rate is None
    mark = account.start(0.0)
    words = account.update_limits(0.1, RateLimits(0.1, Allowance(300, 299, 0.2)), mark)
    assert words == "allows 300 requests a minute"
    assert account.rate == 5.0
    assert account.update_limits(0.2, RateLimits(0.2, Allowance(300, 298, 0.4)), mark) == ""


def test_a_limit_that_the_user_gave_stays_where_it_is_lower():
    account = Account(60, 6000, 120.0, hosted=True)
    told = RateLimits(0.0, Allowance(300, 299, 0.2), Allowance(60_000, 59_000, 1.0))
    account.update_limits(0.0, told, NOTHING)
    assert account.rate == 1.0
    account.start(0.0, TokenUse(120))
    assert account.wait(0.0, 120) == pytest.approx(120 / 98)


def test_a_raised_limit_is_followed_and_a_slowed_pace_is_not_sped_up():
    account = Account(None, None, 120.0, hosted=True)
    account.update_limits(0.0, RateLimits(0.0, Allowance(300, 299, 0.2)), RequestReservation(1))
    account.update_limits(1.0, RateLimits(1.0, Allowance(600, 599, 0.1)), RequestReservation(2))
    assert account.rate == 10.0
    account.on_refusal(2.0, 2.0, 1.0)
    slowed = account.rate
    assert slowed < 10.0
    account.update_limits(4.0, RateLimits(4.0, Allowance(900, 899, 0.07)), RequestReservation(3))
    assert account.rate == slowed


def test_a_limit_a_day_sets_no_pace_and_holds_back_once_it_is_used():
    account = Account(None, None, 120.0, hosted=True)
    told = RateLimits(0.0, Allowance(14_400, 14_399, 6.0))
    assert account.update_limits(0.0, told, RequestReservation(1)) == "allows 14,400 requests a day"
    assert account.rate is None
    used = RateLimits(5.0, Allowance(14_400, 0, 86_400.0))
    account.update_limits(5.0, used, account.start(5.0))
    assert account.wait(5.0) == pytest.approx(6.0, abs=0.01)


def test_what_was_started_since_counts_against_what_is_left():
    quota = RateQuota(120.0)
    quota.update(0.0, Allowance(100, 10, 40.0), 0)
    assert quota.wait(0.0, 9, 1) == 0.0
    assert quota.wait(0.0, 10, 1) == pytest.approx(40.0, abs=0.01)
    assert quota.wait(40.01, 10, 1) == 0.0


HEADER = "x-ratelimit-remaining-requests"


@pytest.mark.parametrize(("left", "reset"), [(0, None), (1, 3600.0)])
def test_a_rest_that_answers_contradict_is_disregarded_and_named(left, reset):
    account = Account(None, None, 120.0, hosted=True)
    told = Allowance(600, left, reset, header=HEADER)
    marks = [account.start(0.0) for _ in range(6)]
    words = [account.update_limits(1.0, RateLimits(1.0, told), mark) for mark in marks]
    assert words[0] == ("allows 600 requests a minute" if reset is None else words[0])
    assert [HEADER in line for line in words] == [False, False, False, True, False, False]
    assert account.wait(20.0) == 0.0


def test_a_request_of_several_rows_raises_the_rate_once_whether_tokens_count_or_not():
    def script(row, number):
        return Answer(throttled() if number == 1 else GOOD, 0.5)

    rates = []
    for hosted in (False, True):
        s = run_rows(
            {"a": script}, 16, hosted=hosted, limits={"a": 4}, group=BatchSizeRule(4, single=False)
        )
        assert len(s.recorder.replies) == 16
        rates.append(s.account.rate)
    assert rates[0] == rates[1] is not None
