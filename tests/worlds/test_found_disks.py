"""Reduced worlds of faults of disks and kills that were mended."""

from __future__ import annotations

from worlds.invariants import problems
from worlds.play import play
from worlds.spec import EndpointSpec, Event, JobSpec, RowSpec, World
from worlds.test_found import holds


def test_lines_of_a_killed_start_are_synced_by_the_next():
    """The next start wrote elsewhere, so a loss of power took rows that had long been finished."""
    holds(
        World(
            seed=2,
            job=JobSpec(),
            rows=(RowSpec("r0"), RowSpec("r1", replies=("slow:4",))),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "kill", 1.1), Event(1, "power", 3.0)),
        )
    )


def test_a_start_syncs_first_what_a_killed_one_wrote():
    """A loss of power right after a restart took a row that had been finished seconds before."""
    holds(
        World(
            seed=5,
            job=JobSpec(),
            rows=(RowSpec("r0"), RowSpec("r1", replies=("slow:4",))),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "kill", 1.05), Event(1, "power", 0.01)),
        )
    )


def test_a_start_syncs_all_segments_that_a_killed_one_wrote():
    """It synced the last segment only, so a loss of power took rows of those before it."""
    holds(
        World(
            seed=9,
            job=JobSpec(segment_bytes=300),
            rows=(RowSpec("r0"), RowSpec("r1"), RowSpec("r2"), RowSpec("r3", replies=("slow:4",))),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "kill", 1.05), Event(1, "power", 0.01)),
        )
    )


def test_a_full_disk_after_a_stop_is_told():
    """Attempts could not be written while requests ended, and the run said only that it stopped."""
    rows = tuple(RowSpec(f"r{number}") for number in range(7))
    history = play(
        World(
            seed=2000606,
            job=JobSpec(kind="lists", concurrency="auto", segment_bytes=3000),
            rows=(*rows, RowSpec("r7", seconds=3.0)),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "tight", 1.37, 1001.37), Event(0, "stop-file", 0.34)),
        )
    )
    assert problems(history) == []
    assert [start.code for start in history.starts] == [74, 0]


def test_what_was_written_before_the_disk_was_full_is_synced():
    """A loss of power right after the end took a row that had been finished for a second."""
    rows = tuple(RowSpec(f"r{number}", seconds=time) for number, time in enumerate((0.2, 1.0, 0.2)))
    holds(
        World(
            seed=8020183,
            job=JobSpec(retries=0, per_endpoint=1),
            rows=(*rows, RowSpec("r3")),
            endpoints=(EndpointSpec(), EndpointSpec()),
            events=(Event(0, "full", 0.36, 1.36), Event(1, "power-at-call", 3.0)),
            pause=0.0,
        )
    )


def test_a_folder_that_cannot_be_synced_ends_the_start():
    """A loss of power would have taken the new segment, and the start ended with 0."""
    history = play(
        World(
            seed=16,
            job=JobSpec(),
            rows=(RowSpec("r0"),),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "sync-fails", 0.4, 0.6),),  # before the first line
        )
    )
    assert problems(history) == []
    assert [start.code for start in history.starts] == [74, 0]


def test_a_start_syncs_what_was_killed_twice_before():
    """The second start was killed once it had begun a segment, and before it had synced those of
    the first. The third one took them for synced, since they were so much older."""
    holds(
        World(
            seed=9908711,
            job=JobSpec(segment_bytes=300),
            rows=tuple(
                RowSpec(f"r{number}", replies=replies, seconds=seconds)
                for number, (replies, seconds) in enumerate(
                    (
                        (("ok",), 0.2), (("slow:4",), 1.0), (("slow:4",), 1.0), (("ok",), 0.2),
                        (("ok",), 1.0), (("ok",), 1.0), (("503+3600", "usage"), 1.0),
                    )
                )
            ),
            endpoints=(EndpointSpec(), EndpointSpec(speed=2.0)),
            events=(
                Event(0, "power", 3.55),
                Event(1, "kill-at-call", 42.8),
                Event(2, "kill-at-call", 13.01),
            ),
            pause=90.0,
        )
    )  # fmt: skip


def test_a_kill_leaves_an_edited_row_with_its_old_result_or_its_new_one() -> None:
    rows = (RowSpec(id="r2", seconds=0.2), RowSpec(id="r1"), RowSpec(id="r2"))
    events = (
        Event(start=0, kind="sync-fails", at=1.29, until=2.29),
        Event(start=1, kind="kill-at-call", at=19.2),
        Event(start=1, kind="edit", at=0.0),
    )
    servers = (EndpointSpec(speed=2.0), EndpointSpec())
    job = JobSpec(concurrency="auto", temperature=0.7)
    holds(World(seed=9850050, job=job, rows=rows, endpoints=servers, events=events, pause=1.0))
