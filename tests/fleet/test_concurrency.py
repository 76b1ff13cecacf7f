"""The in-flight limit of one endpoint, by answers and by looks at an engine that never refuses."""

from __future__ import annotations

from random import Random

from bagent.fleet.limits.concurrency import QUIET_POLLS, SLOW_START_POLLS, InFlightLimit


def clean_round(limit, in_flight=None):
    """As many successes as the limit is wide, with that many rows out; the limit after it."""
    width = limit.value
    for _ in range(width):
        limit.on_success(1, width if in_flight is None else in_flight)
    return limit.value


def test_slow_start_doubles_the_limit_after_each_round_that_used_it():
    limit = InFlightLimit(10, 100)
    for _ in range(5):
        clean_round(limit, in_flight=7)
    assert limit.value == 10
    widths = [clean_round(limit, in_flight=8)]
    widths += [clean_round(limit) for _ in range(3)]
    assert (widths, limit.reason) == ([20, 40, 80, 100], "slow start")


def test_an_overload_halves_the_limit_once_an_episode_and_ends_slow_start():
    limit = InFlightLimit(40, 100)
    for sent in (0.0, 0.5, 1.0, 2.0):
        limit.on_overload(sent, 2.0 + sent, "HTTP 503")
    assert (limit.value, limit.reason) == (20, "HTTP 503")
    clean_round(limit)
    assert (limit.value, limit.reason) == (21, "clean round")
    limit.on_overload(2.1, 5.0, "HTTP 503")
    assert limit.value == 10


def test_the_limit_never_falls_below_one_and_recovers_from_there():
    limit = InFlightLimit(8, 100)
    for episode in range(10):
        limit.on_overload(episode + 0.5, episode + 1.0, "full")
    assert limit.value == 1
    widths = [clean_round(limit) for _ in range(5)]
    assert widths == [2, 4, 5, 6, 7], "up to half of what was too much it doubles"


def faults(limit, share, requests, capacity=10**9, start=0.0):
    """Answers one after the other, of which ``share`` are refusals whatever is in flight, and all
    beyond ``capacity``; returns the limit after each of the second half."""
    random, now, widths = Random(11), start, []
    for place in range(requests):
        now += 1.0
        if random.random() < max(share, 1 - capacity / limit.value):
            limit.on_overload(now - 0.5, now, "HTTP 529")
        else:
            limit.on_success(1, limit.value)
        if place >= requests // 2:
            widths.append(limit.value)
    return widths


def test_refusals_that_come_whatever_is_in_flight_do_not_starve_the_run():
    limit = InFlightLimit(64, 256)
    assert min(faults(limit, 0.3, 2000)) >= 16


def test_a_rate_limit_trims_the_limit_once_an_episode_and_leaves_slow_start_on():
    limit = InFlightLimit(100, 1000)
    limit.on_rate_limit(0.0, 1.0, "HTTP 429")
    limit.on_rate_limit(0.9, 1.5, "HTTP 429")
    assert (limit.value, limit.reason) == (90, "HTTP 429")
    clean_round(limit)
    assert (limit.value, limit.reason) == (180, "slow start")


def test_a_number_of_the_users_own_is_never_passed():
    limit = InFlightLimit(10, 1000, growing=False)
    for _ in range(20):
        clean_round(limit)
    assert limit.value == 10
    limit.on_overload(0.0, 1.0, "full")
    assert limit.value == 5
    for _ in range(50):
        clean_round(limit)
    assert limit.value == 10


# --- looks at the engine


def test_a_held_limit_does_not_grow_until_it_is_eased():
    limit = InFlightLimit(16, 1000)
    limit.hold("something waits")
    assert (clean_round(limit), limit.held) == (16, "something waits")
    limit.allow_growth()
    assert (clean_round(limit), limit.held) == (32, None)


def test_a_pressed_limit_falls_gently_and_grows_in_small_steps_after_it():
    limit = InFlightLimit(100, 1000)
    assert limit.cut(1.0, "30 wait")
    assert (limit.value, limit.reason, limit.held) == (85, "30 wait", "30 wait")
    limit.allow_growth()
    assert (clean_round(limit), limit.reason) == (89, "clean round")


def test_quiet_looks_make_rounds_add_more():
    limit = InFlightLimit(100, 1000)
    limit.cut(1.0, "many wait", keep=1.0)
    for _ in range(QUIET_POLLS):
        limit.allow_growth(in_flight=10)
    assert (clean_round(limit), limit.reason) == (125, "nothing waits")
    limit.hold("something waits")
    limit.allow_growth()
    assert (clean_round(limit), limit.reason) == (131, "clean round")


def test_quiet_looks_at_a_limit_in_use_let_it_grow_before_a_round_is_over():
    limit = InFlightLimit(16, 64)
    widths = []
    for _ in range(3 * SLOW_START_POLLS):
        limit.allow_growth(limit.value)
        widths.append(limit.value)
    assert widths == [16, 32, 32, 64, 64, 64]
