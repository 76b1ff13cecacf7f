"""What one account may ask per minute, on clocks that only the tests move."""

from __future__ import annotations

import heapq

import pytest

from bagent.fleet.limits.account import FIRST_COMPLETION, STEADY, Account, TokenPace, TokenUse

MINUTE = 60.0


def busiest_minute(charges):
    """The most tokens in any 60 s of ``charges``: (time, tokens) in order of time."""
    most = held = 0.0
    first = 0
    for at, tokens in charges:
        held += tokens
        while charges[first][0] <= at - MINUTE:
            held -= charges[first][1]
            first += 1
        most = max(most, held)
    return most


def saturate(account, draw, seconds, *, latency=4.0):
    """Starts requests as fast as the account lets them for ``seconds``.

    ``draw()`` gives (prompt, completion) of the next one. Returns when each one started, and the
    tokens that it used.
    """
    now, used, running = 0.0, [], []
    upcoming = draw()
    while now < seconds:
        reserve = account.estimate(upcoming[0])
        wait = account.wait(now, reserve.total)
        if running and running[0][0] <= now + wait:
            now, sent, reserved, prompt, completion = heapq.heappop(running)
            account.on_success(now, sent)
            account.on_answer(now, sent, reserved, prompt + completion, completion)
        elif wait:
            now += wait
        else:
            account.start(now, reserve)
            used.append((now, sum(upcoming)))
            heapq.heappush(running, (now + latency, now, reserve.total, *upcoming))
            upcoming = draw()
    return used


@pytest.mark.parametrize("size", [60, 700, 5000], ids=["small", "above-a-burst", "huge"])
def test_no_minute_holds_more_tokens_than_the_ceiling_and_one_request(size):
    tpm = 30_000
    account = Account(None, tpm, 120)
    used = saturate(account, lambda: (size, 0), 600)
    over = size if size > tpm * TokenPace.BURST else 0
    assert busiest_minute(used) <= tpm + over + 1
    assert sum(tokens for _, tokens in used) >= 0.95 * tpm * 10


def test_a_request_larger_than_the_burst_waits_for_a_full_bucket_and_starts():
    pace = TokenPace(6_000)
    assert pace.wait(0.0, 50_000) == 0.0
    pace.reserve(0.0, 50_000)
    wait = pace.wait(0.0, 50_000)
    assert wait == pytest.approx(50_000 / (6_000 * (1 - TokenPace.BURST)) * 60)
    assert pace.wait(wait, 50_000) == 0.0


def test_less_used_than_reserved_is_given_back_and_more_is_owed():
    account = Account(None, 6000, 120)
    account.start(0.0, TokenUse(120))
    account.on_answer(0.0, 0.0, 120, 20)
    assert account.wait(0.0, 100) == 0.0
    account.start(0.0, TokenUse(100))
    account.on_answer(0.0, 0.0, 100, 400)
    assert account.wait(0.0, 100) == pytest.approx((100 + 300) / 98)


def test_a_request_that_was_not_sent_takes_nothing_of_the_limits():
    account = Account(60, 6000, 120)
    account.start(0.0, TokenUse(120))
    assert account.wait(0.0, 100) > 1.0
    account.cancel(0.0, 0.0, TokenUse(120))
    assert account.wait(0.0, 120) == 0.0


def test_requests_per_minute_and_tokens_per_minute_hold_together():
    account = Account(60, 6000, 120)
    account.start(0.0, TokenUse(10))
    assert account.wait(0.0, 10) == pytest.approx(1.0), "one request a second"
    account.start(1.0, TokenUse(240))
    assert account.wait(1.0, 10) > 1.0, "now the tokens are what lacks"


def test_the_estimate_is_the_running_mean_of_the_answers():
    account = Account(None, 6000, 120)
    assert account.estimate(100).total == 100 + FIRST_COMPLETION
    assert account.estimate(100, max_answer=16).total == 116
    for completion in (100, 300):
        account.on_answer(1.0, 0.0, 0, None, completion)
    assert account.estimate(50).total == 250
    assert account.estimate(50, max_answer=80).total == 130
    for _ in range(6 * STEADY):
        account.on_answer(1.0, 0.0, 0, None, 1000)
    assert account.estimate(0).total == pytest.approx(1000, abs=5), (
        "what came long ago is forgotten"
    )
