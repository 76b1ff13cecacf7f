"""Whether and when a failed call is sent again."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from bagent.backends.request import CallSettings, Request
from bagent.fleet.call import Call
from bagent.fleet.retry import RetryPolicy, adapt_streaming, count_and_decide, record_pause
from bagent.types import Failure

POLICY = RetryPolicy()
PASSING = Failure("overloaded", "HTTP 500", True, 500)
BUSY = Failure("rate_limited", "HTTP 429", True, 429, busy=True)


def a_call(**fields):
    return Call(None, None, "key", 0, "map", 0, **fields)


def told(seconds, busy=True):
    return Failure("rate_limited", "HTTP 429", True, 429, seconds, busy=busy)


def decide_once(failure, policy=POLICY, call=None, now=100.0, seed=1):
    return count_and_decide(policy, call or a_call(), failure, now, Random(seed))


def test_waits_double_up_to_the_longest_with_a_spread_that_only_adds():
    policy = RetryPolicy(retries=100, base=0.5, longest=30.0)
    least = [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    for seed in range(50):
        call, random = a_call(), Random(seed)
        delays = [count_and_decide(policy, call, PASSING, 0.0, random).delay for _ in least]
        assert all(low <= delay <= 1.5 * low for low, delay in zip(least, delays, strict=True))


def test_a_backoff_is_longer_than_the_last_pause_also_after_a_wait_for_a_slot():
    policy = RetryPolicy(retries=100)
    for seed in range(50):
        random, call, now, pauses = Random(seed), a_call(), 0.0, []
        for _ in range(4):
            record_pause(call, PASSING, now, now + 1.0)
            now += 1.0
            delay = count_and_decide(policy, call, PASSING, now, random).delay
            pauses.append(delay + random.uniform(0.0, 2.0))
            now += pauses[-1]
        assert all(b > 1.1 * a for a, b in itertools.pairwise(pauses)), pauses


@pytest.mark.parametrize(("seconds", "busy"), [(0.02, True), (3.0, False), (60.0, True)])
def test_nobody_comes_back_earlier_than_told_and_not_all_at_once(seconds, busy):
    delays = [decide_once(told(seconds, busy), seed=seed).delay for seed in range(50)]
    assert min(delays) >= seconds
    assert max(delays) <= seconds + max(0.2, 0.1 * seconds)
    assert len(set(delays)) > 40
    assert max(delays) - min(delays) > 0.1


def test_a_full_server_is_waited_on_for_a_bounded_time_in_all():
    call = a_call()
    policy = RetryPolicy(throttled=1800.0)
    assert count_and_decide(policy, call, BUSY, 100.0, Random(1)).delay is not None
    assert count_and_decide(policy, call, BUSY, 1900.0, Random(1)).delay is not None
    decision = count_and_decide(policy, call, BUSY, 1900.1, Random(1))
    assert (decision.delay, decision.reason) == (None, "refused for 1800 s")


@pytest.mark.parametrize(("retries", "seconds"), [(0, 15), (1, 15), (3, 70), (5, 310), (30, 1800)])
def test_a_server_that_serves_nobody_is_given_up_sooner_the_fewer_tries_are_wanted(
    retries, seconds
):
    call = a_call()
    policy = RetryPolicy(retries=retries)
    for refusal in range(retries + 1):
        assert count_and_decide(policy, call, BUSY, refusal / 100, Random(1), 0.0).delay is not None
    assert count_and_decide(policy, call, BUSY, float(seconds), Random(1), 0.0).delay is not None
    decision = count_and_decide(policy, call, BUSY, seconds + 0.1, Random(1), 0.0)
    assert decision.delay is None
    assert "refused" in decision.reason


def test_a_row_whose_time_is_over_is_not_sent_again():
    for failure in (PASSING, BUSY, told(1.0)):
        decision = decide_once(failure, call=a_call(deadline=100.0), now=100.0)
        assert (decision.delay, decision.reason) == (None, "the row's time limit is over")


def streamed_call(**fields):
    request = Request(CallSettings("m", {}, {}), b"[]", stream=True)
    return Call(None, request, "key", 0, "map", 0, **fields)


def test_a_row_in_trouble_is_asked_whole_once_it_is_refused_for_load():
    cut = Failure("bad_response", "the stream broke off", True, 200)
    streams = []
    call = streamed_call()
    first = call.request
    for tries, failure in enumerate((cut, BUSY, cut, cut, BUSY, BUSY), start=1):
        call.attempts = tries
        assert not adapt_streaming(call, failure)
        streams.append(call.request.stream)
    assert streams == [True, True, True, True, False, False]
    assert first.stream  # who made the request has it unchanged
