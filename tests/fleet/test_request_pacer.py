"""The rate at which an account's requests may start, on clocks that only the tests move."""

from __future__ import annotations

import pytest

from bagent.fleet.limits.pacing import RequestPacer


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
