"""The in-flight limit of an engine that never refuses: what looks at it change."""

from __future__ import annotations

import pytest

from bagent.fleet.limits.concurrency import QUIET_POLLS, SLOW_START_POLLS, InFlightLimit


def clean_round(limit: InFlightLimit) -> int:
    """As many successes as the limit is wide, with that many rows out; the limit after it."""
    width = limit.value
    for _ in range(width):
        limit.on_success(1, width)
    return limit.value


def test_a_held_limit_does_not_grow_until_it_is_eased() -> None:
    limit = InFlightLimit(16, 1000)
    limit.hold("something waits")
    assert (clean_round(limit), limit.held) == (16, "something waits")
    limit.allow_growth()
    assert (clean_round(limit), limit.held) == (32, None)


@pytest.mark.parametrize(
    ("start", "eased_between", "expected"), [(100, False, 105), (16, True, 32)]
)
def test_slow_start_ends_with_a_second_hold_in_a_row(start, eased_between, expected) -> None:
    limit = InFlightLimit(start, 1000)
    for _ in range(3):
        limit.hold("something waits")
        if eased_between:
            limit.allow_growth()
    limit.allow_growth()
    assert clean_round(limit) == expected


def test_a_pressed_limit_falls_gently_and_grows_in_small_steps_after_it() -> None:
    limit = InFlightLimit(100, 1000)
    assert limit.cut(1.0, "30 wait")
    assert (limit.value, limit.reason, limit.held) == (85, "30 wait", "30 wait")
    limit.allow_growth()
    assert (clean_round(limit), limit.reason) == (89, "clean round")


def test_pressing_goes_no_lower_than_told_and_never_raises_a_limit() -> None:
    limit = InFlightLimit(100, 1000)
    limit.cut(1.0, "many wait", keep=0.5, least=72)
    assert limit.value == 72
    assert not limit.cut(2.0, "many wait", keep=0.5, least=90)
    assert (limit.value, limit.held) == (72, "many wait")
    for at in range(3, 60):
        limit.cut(float(at), "many wait", keep=0.5)
    assert limit.value == 1


def test_a_limit_that_the_user_gave_is_not_pressed() -> None:
    limit = InFlightLimit(64, 1000, growing=False)
    assert not limit.cut(1.0, "many wait")
    assert limit.value == 64


def test_pressing_ends_the_recovery_from_an_overload() -> None:
    limit = InFlightLimit(400, 1000)
    limit.on_overload(0.5, 1.0, "full")
    limit.on_overload(1.5, 2.0, "full")
    limit.cut(3.0, "many wait")
    limit.allow_growth()
    assert (clean_round(limit), limit.reason) == (89, "clean round"), "not doubling up to 200"


def test_refusals_of_what_went_out_before_a_press_are_answered_by_it() -> None:
    limit = InFlightLimit(100, 1000)
    limit.cut(5.0, "many wait")
    limit.on_overload(4.0, 6.0, "full")
    assert limit.value == 85
    limit.on_overload(5.5, 6.5, "full")
    assert limit.value == 42


def test_quiet_looks_make_rounds_add_more() -> None:
    limit = InFlightLimit(100, 1000)
    limit.cut(1.0, "many wait", keep=1.0)
    for _ in range(QUIET_POLLS):
        limit.allow_growth(in_flight=10)
    assert (clean_round(limit), limit.reason) == (125, "nothing waits")
    limit.hold("something waits")
    limit.allow_growth()
    assert (clean_round(limit), limit.reason) == (131, "clean round")


def test_quiet_looks_at_a_limit_in_use_let_it_grow_before_a_round_is_over() -> None:
    limit = InFlightLimit(16, 64)
    widths = []
    for _ in range(3 * SLOW_START_POLLS):
        limit.allow_growth(limit.value)
        widths.append(limit.value)
    assert widths == [16, 32, 32, 64, 64, 64]


def test_quiet_polls_do_not_raise_an_unused_limit_or_that_of_a_silent_engine() -> None:
    limit = InFlightLimit(100, 1000)
    for _ in range(20):
        limit.allow_growth(79)
        limit.allow_growth(100, reported=False)
    assert limit.value == 100


def test_every_change_of_the_value_is_told_with_its_reason() -> None:
    told: list[tuple[int, str]] = []
    limit = InFlightLimit(16, 40, changes=lambda value, why: told.append((value, why)))
    for _ in range(3):
        clean_round(limit)
    limit.hold("something waits")
    limit.cut(1.0, "24 wait")
    limit.on_overload(2.0, 3.0, "HTTP 503")
    limit.on_rate_limit(4.0, 5.0, "HTTP 429")
    assert told == [
        (32, "slow start"),
        (40, "slow start"),
        (34, "24 wait"),
        (17, "HTTP 503"),
        (15, "HTTP 429"),
    ]
