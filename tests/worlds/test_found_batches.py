"""Reduced worlds of faults of batches that were mended."""

from __future__ import annotations

import pytest

from worlds.spec import EndpointSpec, Event, JobSpec, RowSpec, World
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
