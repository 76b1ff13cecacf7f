"""Reduced worlds of faults of batches that were mended."""

from __future__ import annotations

import pytest

from worlds.spec import EndpointSpec, Event, JobSpec, RowSpec, Window, World
from worlds.test_found import holds


@pytest.mark.parametrize("pause", [5.0, 60.0])
def test_a_batch_gives_no_second_result_to_a_row_that_was_edited_meanwhile(pause):
    """The answers to the old and to the new content of a row both became results."""
    events = (Event(0, "kill", 3.0), Event(1, "edit", 1.0))
    holds(_world(events, pause))


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_a_batch_replaces_no_answer_to_a_row_that_was_edited_back(seconds):
    """The answer to the other content took its place, and the row was paid once more."""
    events = (Event(1, "edit", 1.0), Event(1, "kill", seconds), Event(2, "edit-back", 1.0))
    holds(_world(events, 5.0))


def _world(events, pause):
    return World(
        seed=13,
        job=JobSpec(kind="batches"),
        rows=tuple(RowSpec(f"r{number}") for number in range(3)),
        endpoints=(EndpointSpec(),),
        events=events,
        pause=pause,
    )


def test_a_row_equal_to_one_in_a_batch_of_a_killed_start_is_not_sent():
    """Such a batch was not looked through for equal rows, so it was paid twice."""
    rows = tuple(RowSpec(f"r{number}") for number in range(5))
    holds(
        World(
            seed=8010038,
            job=JobSpec(kind="batches"),
            rows=(*rows, RowSpec("r5", same=0)),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "kill-at-call", 27.0),),
        )
    )


def test_a_slow_batch_is_polled_at_a_twentieth_of_its_age():
    """The invariant gave the start the time of the batch, and not that until its end is noticed."""
    holds(
        World(
            seed=8104951,
            job=JobSpec(kind="batches", concurrency="auto"),
            rows=(RowSpec("r0", replies=("500",)),),
            endpoints=(EndpointSpec(windows=(Window(0.5, 1.5, "502"),)),),
            batches=("ok", "500", "failed", "slow:900", "429", "ok"),
        )
    )


def test_a_batch_that_is_read_again_counts_where_it_is_read():
    """A start was killed after it had written a failure, before it noted that the batch was read;
    the next one writes it again, and counts it."""
    holds(
        World(
            seed=8051979,
            job=JobSpec(kind="batches", retries=0, concurrency="auto", per_endpoint=1),
            rows=(RowSpec("r0", replies=("500",)),),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "full", 0.43, 1000.43), Event(2, "kill-at-call", 58.93)),
            batches=("500", "failed", "500"),
        )
    )


def test_a_row_equal_to_one_that_failed_in_single_calls_is_sent():
    """It joined the late batch, whose rows were being sent as single calls, and was lost."""
    rows = (RowSpec("r0", replies=("500",)), RowSpec("r1", same=0))
    holds(
        World(
            seed=70086,
            job=JobSpec(kind="batches", retries=0, by=305.0),
            rows=rows,
            endpoints=(EndpointSpec(),),
            batches=("slow:900",),
        )
    )


def test_a_row_equal_to_one_in_a_batch_that_is_not_read_yet_is_not_sent():
    """The batch had ended when its start was killed, so the next start sent an equal row."""
    rows = (RowSpec("r0", replies=("500", "ok")), RowSpec("r1", seconds=3.0, same=0))
    holds(
        World(
            seed=8205397,
            job=JobSpec(kind="batches", retries=0, concurrency="auto", per_endpoint=1),
            rows=rows,
            endpoints=(EndpointSpec(refuses="max_tokens"),),
            events=(Event(0, "kill-at-call", 3.87, 13.49635158074463),),
            batches=("faults", "failed", "faults", "ok", "faults", "failed"),
        )
    )


def test_an_edited_row_equal_to_one_in_single_calls_keeps_its_answer():
    """The answer to the row in the late batch was copied to the old content of the edited one."""
    holds(
        World(
            seed=9806275,
            job=JobSpec(kind="batches", retries=0, concurrency="auto", by=320.0),
            rows=(RowSpec("r0"), RowSpec("r1", same=0)),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "int", 4.44), Event(1, "edit", 1.0)),
            batches=("503", "lost-reply", "quota"),
        )
    )


def test_rows_that_ended_in_single_calls_before_a_kill_do_not_remain():
    """They were counted with the late batch of the killed start, which was not done yet."""
    busy = ("503",) * 7 + ("ok",)
    rows = tuple(RowSpec(f"r{number}") for number in range(10) if number != 8)
    holds(
        World(
            seed=9803877,
            job=JobSpec(kind="batches", segment_bytes=300, by=320.0),
            rows=(*rows[:8], RowSpec("r8", replies=busy), *rows[8:]),
            endpoints=(EndpointSpec(windows=(Window(2.0, 22.0, "cut"),)),),
            events=(Event(0, "kill-at-call", 31.25, 20.056964804807457),),
            batches=("ok", "failed", "slow:40"),
        )
    )
