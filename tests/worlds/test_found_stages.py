"""Reduced worlds of faults of jobs with several stages that were mended."""

from __future__ import annotations

from worlds.invariants import problems
from worlds.play import play
from worlds.spec import EndpointSpec, Event, JobSpec, RowSpec, World
from worlds.test_found import holds


def test_a_reduction_whose_last_request_failed_has_one_failed_row():
    """A second row said that all rows had failed before; both counted."""
    history = play(
        World(
            seed=1,
            job=JobSpec(kind="stages", topology="map_reduce", retries=0),
            rows=(RowSpec("r0", replies=("500",), stage="reduce"),),
            endpoints=(EndpointSpec(),),
        )
    )
    assert problems(history) == []
    results = history.starts[0].results
    assert [(r["stage"], r["status"]) for r in results] == [("map", "ok"), ("reduce", "failed")]


def test_parents_on_a_board_name_the_results_of_its_sections():
    """They named the board as their stage, which has no results with these ids."""
    holds(
        World(
            seed=2,
            job=JobSpec(kind="stages", topology="blackboard"),
            rows=(RowSpec("r0"),),
            endpoints=(EndpointSpec(),),
        )
    )


def test_rows_of_a_broadcast_respect_a_429():
    """A row that only one server may answer was sent to it during its pause."""
    rows = [RowSpec("r0", replies=("429+3", "ok"), stage="broadcast")]
    rows += [RowSpec(f"r{number}", seconds=0.2, stage="broadcast") for number in range(1, 4)]
    holds(
        World(
            seed=20126,
            job=JobSpec("stages", "broadcast", concurrency=2),
            rows=tuple(rows),
            endpoints=(EndpointSpec(), EndpointSpec()),
        )
    )


def test_rows_that_a_stage_left_out_fail_once():
    """Where all rows failed before the last stage, each counted twice for ``allow_failures``."""
    rows = (RowSpec("r0", replies=("overflow",), stage="answer"),)
    history = play(
        World(
            seed=8051452,
            job=JobSpec("stages", "judge", allow_failures=2),
            rows=rows,
            endpoints=(EndpointSpec(),),
        )
    )
    assert problems(history) == []
    assert history.starts[0].code == 0


def test_an_accepted_truncated_answer_goes_on_to_the_next_stage():
    """The invariant took it for a failure, which is dropped."""
    holds(
        World(
            seed=8104581,
            job=JobSpec(kind="stages", topology="pipeline", truncated="accept", on_failure="drop"),
            rows=(RowSpec("r2", replies=("length",), seconds=0.2, stage="step2"),),
            endpoints=(EndpointSpec(),),
        )
    )


def test_stdout_has_no_result_that_a_later_one_replaced():
    """The reduction of nothing was printed again, although its rows were sent again just then."""
    holds(
        World(
            seed=8205450,
            job=JobSpec(
                kind="stages",
                topology="map_reduce",
                retries=0,
                options={"output": "-", "ordered": False},
            ),
            rows=(RowSpec("r0", replies=("500", "ok"), seconds=3.0, stage="map"),),
            endpoints=(EndpointSpec(),),
            rerun=True,
        )
    )


def test_a_reader_that_leaves_before_ordered_lines_of_stages_stops_the_start():
    """They were written after the end, so the start ended with 0 and then with a broken pipe."""
    world = World(
        seed=8217269,
        job=JobSpec(kind="stages", topology="map_reduce", options={"output": "-", "ordered": True}),
        rows=(RowSpec("r0"), RowSpec("r1")),
        endpoints=(EndpointSpec(),),
        events=(Event(0, "reader-gone", 1),),
    )
    history = play(world)
    assert problems(history) == []
    assert [start.code for start in history.starts] == [75, 0]


def test_a_group_of_which_nothing_is_left_names_a_row_of_its_own():
    """Its failure named the first row of the input, which belongs to another group."""
    holds(
        World(
            seed=9806644,
            job=JobSpec(kind="stages", topology="grouped", retries=1, concurrency="auto"),
            rows=(RowSpec("r0", text="a"), RowSpec("r1", text="", replies=("504",), stage="map")),
            endpoints=(EndpointSpec(),),
        )
    )
