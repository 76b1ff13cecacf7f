"""Reduced worlds of faults of agents that were mended."""

from __future__ import annotations

import pytest

from worlds.invariants import problems
from worlds.play import play
from worlds.spec import EndpointSpec, Event, JobSpec, RowSpec, World
from worlds.test_found import holds


def test_a_turn_that_failed_where_it_is_cached_goes_to_the_other_server():
    """Each of two servers left it to the other: one for the failure, one for the cache."""
    holds(
        World(
            seed=5,
            job=JobSpec(kind="agents"),
            rows=(RowSpec("r0", replies=("ok", "junk", "ok"), calls=(("act:ok",),)),),
            endpoints=(EndpointSpec(), EndpointSpec()),
        )
    )


def test_a_call_that_ended_before_a_stop_keeps_its_answer():
    """It was reported as one that may have run, though its tool had answered."""
    history = play(
        World(
            seed=6,
            job=JobSpec(kind="agents"),
            rows=(RowSpec("r0", calls=(("act:quick", "act:slow"),)),),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "term", 0.8),),
        )
    )
    assert problems(history) == []
    texts = [answer.text for answer in history.network.sent[-1].answers]
    assert texts == ["did 0.0.0.0", "did 0.0.0.1"]


def test_a_call_of_a_reply_that_broke_off_is_recorded():
    """A row that failed left no trace of the tools that had started while it was streamed."""
    row = RowSpec("r0", replies=("cut",), calls=(("act:quick", "act:hang"),))
    history = play(
        World(
            seed=7,
            job=JobSpec(kind="agents", retries=0),
            rows=(row,),
            endpoints=(EndpointSpec(),),
            rerun=True,
        )
    )
    assert problems(history) == []
    records = history.starts[-1].tool_records
    assert [record.get("error") for record in records][:2] == [None, "may_have_run"]


def test_calls_that_may_have_run_have_ids_of_their_own():
    """Servers that send one id for all calls got it back twice, in one conversation."""
    holds(
        World(
            seed=8,
            job=JobSpec(kind="agents"),
            rows=(RowSpec("r0"), RowSpec("r1", calls=(("act:slow", "act:slow"),))),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "kill", 0.9),),
        )
    )


def test_turns_of_a_second_segment_survive_a_loss_of_power():
    """Its name was not synced, so the file was gone, and finished turns were asked for again."""
    rows = (
        RowSpec(1, seconds=0.2, calls=(("act:ok",), ("act:ok",))),
        RowSpec("r2", " ", calls=(("act:exit", "none:ok", "act:object"), ("look:slow",))),
    )
    holds(
        World(
            seed=2001523,
            job=JobSpec("agents", concurrency="auto", per_endpoint=1, segment_bytes=300),
            rows=rows,
            endpoints=(EndpointSpec(),),
            events=(Event(0, "power", 2.87),),
        )
    )


@pytest.mark.parametrize("call", [53.5, 54.5])
def test_a_row_out_of_turns_goes_on_where_its_end_was_not_written(call):
    """It was to start over before its outcome was on disk: a kill between both ran its tools with
    side effects once more."""
    holds(
        World(
            seed=8203664,
            job=JobSpec(kind="agents"),
            rows=(RowSpec("r0", calls=(("act:ok",),) * 6),),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "kill-at-call", call),),
        )
    )
