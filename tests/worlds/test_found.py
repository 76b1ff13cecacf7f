"""Reduced worlds of faults that were mended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worlds.invariants import problems
from worlds.play import play
from worlds.retry_invariants import a_429_pauses_its_account, retry_after_is_kept
from worlds.row_invariants import fresh_rows_go_first
from worlds.spec import EndpointSpec, Event, JobSpec, RowSpec, Window, World


def holds(world: World) -> None:
    """Check all invariants of a world."""
    assert problems(play(world)) == []


def test_an_outage_asks_no_busy_server_again():
    """A busy server got one more request, before its Retry-After, when the run gave it up."""
    history = play(
        World(
            seed=1,
            job=JobSpec(retries=1, concurrency=1),
            rows=(RowSpec("r0", replies=("529+2",) * 40),),
            endpoints=(EndpointSpec(),),
        )
    )
    assert history.starts[0].code == 75
    assert list(retry_after_is_kept(history)) == []  # the run never ends: its server stays busy


def test_the_wait_for_a_sick_server_does_not_slow_down_later_tries():
    """Each try of a row came a minute after the one before, as long as its server had been sick."""
    holds(
        World(
            seed=3,
            job=JobSpec(retries=5),
            rows=(RowSpec("r0", replies=("html", "500")), RowSpec("r1", replies=("slow:4",))),
            endpoints=(EndpointSpec(windows=(Window(1.1, 22.0, "403"),)),),
        )
    )


def test_a_row_too_long_for_one_server_goes_back_to_the_other_that_failed_it():
    """The row waited for ever: it avoided the only server whose context it could need."""
    holds(
        World(
            seed=4,
            job=JobSpec(),
            rows=(RowSpec("r0", replies=("overflow",)), RowSpec("r1"), RowSpec("r2")),
            endpoints=(
                EndpointSpec(windows=(Window(0.0, 20.0, "403"), Window(21.0, 41.0, "blank"))),
                EndpointSpec(),
            ),
        )
    )


def test_an_owner_that_wakes_up_leaves_the_end_of_its_successor():
    """It wrote its own starts into run.json: the run that had ended was interrupted again."""
    holds(
        World(
            seed=6,
            job=JobSpec(),
            rows=(RowSpec("r0", replies=("slow:4",)),),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "suspend", 1.0, until=70.0),),
        )
    )


def test_a_late_row_that_fails_everywhere_ends():
    """Each of its copies left the decision to the next one, so it was sent without end."""
    holds(
        World(
            seed=7,
            job=JobSpec(retries=0, hedge=2.0),
            rows=(RowSpec("r0", replies=("400",), seconds=3.0),),
            endpoints=(EndpointSpec(), EndpointSpec()),
        )
    )


def test_a_late_row_of_the_idlest_server_is_copied():
    """The copy would have gone to the least loaded server, which had the late row itself."""
    late = RowSpec("r0", replies=("slow:15",))
    holds(
        World(
            seed=8,
            job=JobSpec(concurrency="auto", hedge=3.0, timeout=60.0),
            rows=(late, RowSpec("r1"), late),
            endpoints=(EndpointSpec(), EndpointSpec()),
        )
    )


def test_a_row_that_waits_for_the_budget_is_not_sent_after_a_stop():
    """Each request that ended after a stop let the budget admit another one."""
    holds(
        World(
            seed=37,
            job=JobSpec(budget=80.0),
            rows=tuple(RowSpec(f"r{number}", seconds=3.0) for number in range(4)),
            endpoints=(EndpointSpec(),),
            events=(Event(0, "term", 1.0),),
        )
    )


def test_rows_that_wait_for_the_budget_respect_a_429():
    """They had been given to the server before, and were sent when others freed the budget."""
    rows = [RowSpec("r0", replies=("429+m1500", "ok")), *(RowSpec(f"r{n}") for n in range(1, 6))]
    holds(
        World(
            seed=510453,
            job=JobSpec(retries=0, concurrency="auto", budget=200.0),
            rows=tuple(rows),
            endpoints=(EndpointSpec(),),
            pause=90.0,
        )
    )


def test_a_row_that_waits_for_the_budget_is_not_copied():
    """It was late before it was sent, and was sent to two servers."""
    rows = (RowSpec(6, seconds=3.0), RowSpec("r7", seconds=3.0), RowSpec("r2"), RowSpec("r3"))
    holds(
        World(
            seed=513026,
            job=JobSpec(concurrency="auto", temperature=0.7, hedge=2.0, budget=200.0),
            rows=rows,
            endpoints=(EndpointSpec(), EndpointSpec(windows=(Window(0.5, 5.5, "blank"),))),
            pause=90.0,
        )
    )


def test_rows_that_no_server_can_answer_end():
    """Their attempts were given back by each server whose circuit they opened, for ever."""
    rows = RowSpec("r0", replies=("error200",)), RowSpec("r1", replies=("cut",), seconds=0.2)
    holds(
        World(
            seed=2010522,
            job=JobSpec(concurrency="auto", per_endpoint=3),
            rows=rows,
            endpoints=(EndpointSpec(),) * 3,
        )
    )


def test_a_stop_file_ends_the_wait_for_servers():
    """It was looked for only once a server had answered."""
    history = play(
        World(
            seed=7001802,
            job=JobSpec(),
            rows=(RowSpec("r0"),),
            endpoints=(EndpointSpec(windows=(Window(0.0, 8.0, "down"),)),),
            events=(Event(0, "stop-file", 2.0),),
        )
    )
    assert problems(history) == []
    assert [start.code for start in history.starts] == [75, 0]
    assert history.starts[0].ended < 3.0


def test_rows_that_failed_do_not_take_the_time_of_every_start():
    """Each start with a deadline began with them again, and never came to the last row."""
    failing = [RowSpec(f"r{number}", replies=("500",), seconds=3.0) for number in range(3)]
    history = play(
        World(
            seed=1050,
            job=JobSpec(retries=0, concurrency=1, deadline=12.0),
            rows=(*failing, RowSpec("r3", seconds=3.0)),
            endpoints=(EndpointSpec(),),
        )
    )
    assert list(fresh_rows_go_first(history)) == []
    assert history.starts[1].result_of[3]["status"] == "ok"


def test_a_row_that_two_servers_failed_goes_to_the_third():
    """It went to and fro between the two, until its attempts were used up."""
    busy = EndpointSpec(windows=(Window(2.0, 62.0, "503"),))
    hanging = EndpointSpec(windows=(Window(0.5, 60.5, "hang"),), capacity=2)
    seconds = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 0.2, 1.0, 3.0, 1.0)
    history = play(
        World(
            seed=7001730,
            job=JobSpec(),
            rows=tuple(RowSpec(f"r{n}", seconds=time) for n, time in enumerate(seconds)),
            endpoints=(replace(busy, speed=3.0), hanging, EndpointSpec()),
        )
    )
    assert problems(history) == []
    servers = [[sent.endpoint for sent in sent] for sent in history.sent_by_row[0].values()]
    assert [0, 1, 2] in map(sorted, servers)


def test_the_last_row_is_sent_although_a_429_slowed_requests_down():
    """A row with which two servers died waited for ever, where the pace allowed nothing at once."""
    holds(
        World(
            seed=1,
            job=JobSpec(retries=1, concurrency="auto", per_endpoint=3, timeout=60.0),
            rows=(
                RowSpec("r0", replies=("crash:8",)),
                RowSpec("r1", replies=("429", "slow:4")),
                RowSpec("r2"),
                RowSpec("r9", seconds=0.2),
            ),
            endpoints=(EndpointSpec(),),
        )
    )


def test_an_answer_during_an_outage_begins_its_time_anew():
    """A run stopped half a minute after both servers refused its key, though one had answered a
    long row meanwhile."""
    refusing = EndpointSpec(windows=(Window(10.0, 70.0, "401"),))
    seconds = (15.0, 5.0, 5.0, 15.0)
    history = play(
        World(
            seed=8030167,
            job=JobSpec(retries=5, concurrency=2, timeout=60.0),
            rows=tuple(RowSpec(f"r{number}", seconds=time) for number, time in enumerate(seconds)),
            endpoints=(refusing, refusing),
        )
    )
    assert problems(history) == []
    assert history.starts[0].ended > 45.0


def test_the_rows_of_a_stop_before_an_edited_row_is_done_are_inexact():
    """Its old and its new answer counted as two rows, and the sum was called exact."""
    holds(
        World(
            seed=8030326,
            job=JobSpec(),
            rows=(RowSpec("r0"), RowSpec("r1", seconds=9.0)),
            endpoints=(EndpointSpec(),),
            events=(Event(1, "edit", 1.0), Event(1, "int", 1.8)),
        )
    )


def test_a_list_that_was_not_sent_is_no_attempt():
    """Two servers refused lists at once: one that was formed for the second was never sent, and
    counted as a request with an attempt of each of its rows."""
    rows = [RowSpec(f"r{number}") for number in range(10)]
    rows[2] = replace(rows[2], replies=("html",))
    rows[7] = replace(rows[7], seconds=3.0)
    rows[8] = replace(rows[8], text="x" * 3000, replies=("502",), seconds=3.0)
    holds(
        World(
            seed=8041404,
            job=JobSpec(kind="lists", retries=1, concurrency="auto"),
            rows=tuple(rows),
            endpoints=(EndpointSpec(), EndpointSpec()),
            events=(Event(1, "term", 1.0),),
        )
    )


def test_a_server_that_comes_back_keeps_its_limit():
    """It got as many rows as it may have, beside those that it had before it left."""
    holds(
        World(
            seed=8200001,
            job=JobSpec(per_endpoint=2),
            rows=tuple(RowSpec(f"r{number}", seconds=12.0) for number in range(8)),
            endpoints=(EndpointSpec(), EndpointSpec()),
            events=(Event(0, "hosts", 0.1, hosts=(1,)), Event(0, "hosts", 3.0, hosts=(0, 1))),
        )
    )


def test_rows_do_not_wait_for_the_long_pause_of_another_server():
    """One server had failed them, and had nothing to do while the other one paused."""
    holds(
        World(
            seed=8200002,
            job=JobSpec(concurrency=4),
            rows=tuple(RowSpec(f"r{number}") for number in range(8)),
            endpoints=(
                EndpointSpec(windows=(Window(0.0135, 0.5, "500"),)),
                EndpointSpec(windows=(Window(0.0135, 0.1, "429+100"),)),
            ),
        )
    )


def test_a_person_has_time_to_mend_what_a_start_needs():
    """The same command was given a second after each 76, and no start was left at the end."""
    holds(
        World(
            seed=8103310,
            job=JobSpec(retries=5, concurrency="auto"),
            rows=(RowSpec("r0", replies=("500",)),),
            endpoints=(EndpointSpec(windows=(Window(5.0, 65.0, "401"),)),),
            pause=1.0,
        )
    )


def test_an_answer_while_a_stopped_start_drains_ends_no_outage():
    """The check of one server failed, and so ended the outage, just before that of the other one
    passed; the invariant took the last answers for signs of a server that serves."""
    holds(
        World(
            seed=8051519,
            job=JobSpec(
                kind="stages", topology="pipeline", retries=0, concurrency="auto",
                temperature=0.7, priced=True, on_failure="include",
            ),
            rows=(RowSpec("r0"), RowSpec("r4", seconds=0.2, stage="step2"), RowSpec("r2")),
            endpoints=(
                EndpointSpec(windows=(Window(10.0, 30.0, "error200"),)),
                EndpointSpec(windows=(Window(0.5, 20.5, "403"),)),
            ),
            events=(Event(0, "kill-at-call", 27.71), Event(1, "term", 0.16)),
        )
    )  # fmt: skip


def test_rows_refused_for_another_reason_interrupt_those_that_failed_alike():
    """They were left out, and the last four rows were said to have failed alike."""
    kinds = ("ok", "422", "filter", "422", "filter", "422", "filter", "422", "ok")
    holds(
        World(
            seed=8201440,
            job=JobSpec(concurrency=1, alike=4),
            rows=tuple(RowSpec(f"r{n}", replies=(kind,)) for n, kind in enumerate(kinds)),
            endpoints=(EndpointSpec(),),
        )
    )


@pytest.mark.parametrize("kind", ["term", "int"])
def test_a_signal_while_a_stopped_start_drains_keeps_its_code(kind):
    """It made 75 of the 76 of a start that needed a person, and left the reason as it was."""
    history = play(
        World(
            seed=8204274,
            job=JobSpec(stop_after=1),
            rows=(RowSpec("r0", replies=("unreadable",)), RowSpec("r1", replies=("slow:4",))),
            endpoints=(EndpointSpec(),),
            events=(Event(0, kind, 0.4),),
        )
    )
    assert history.starts[0].code == 76
    assert history.starts[0].ended < 1.0


def test_two_reasons_to_stop_in_one_moment_have_the_code_of_the_one_told():
    """The reader of stdout left at the row that was one too many: 75, and why a person must act."""
    holds(
        World(
            seed=8205591,
            job=JobSpec(concurrency=4, alike=4, options={"output": "-", "ordered": False}),
            rows=tuple(RowSpec(f"r{number}", replies=("400",)) for number in range(8)),
            endpoints=(EndpointSpec(), EndpointSpec()),
            events=(Event(0, "reader-gone", 3),),
        )
    )


def test_a_server_that_serves_nothing_until_a_timeout_is_checked():
    """With one slot it hung for all tries of a row, which failed, before it was suspected."""
    holds(
        World(
            seed=8204164,
            job=JobSpec(concurrency=1),
            rows=(RowSpec("r0"), RowSpec("r1"), RowSpec("r2", replies=("usage",))),
            endpoints=(EndpointSpec(windows=(Window(2.0, 62.0, "hang"),)),),
            pause=90.0,
        )
    )


def test_the_progress_counts_a_row_once_while_a_copy_of_it_is_under_way():
    """One row too many remained, of a total that was shown as exact."""
    calls = (
        ("read:ok",),
        ("act:junk", "act:junk", "act:exit"),
        ("act:hang", "act:ok", "act:fail"),
        ("look:slow",),
    )
    holds(
        World(
            seed=9500428,
            job=JobSpec(kind="agents", retries=5, concurrency="auto", hedge=2.0, stream=False),
            rows=(RowSpec("r0", replies=("slow:4",), seconds=3.0, calls=calls),),
            endpoints=(EndpointSpec(), EndpointSpec()),
        )
    )


def test_a_server_that_refuses_the_copy_of_a_row_is_asked_again():
    """Nobody asked it again until the other server had ended the row."""
    holds(
        World(
            seed=9809409,
            job=JobSpec(concurrency="auto", per_endpoint=1, hedge=2.0),
            rows=(RowSpec("r0", replies=("html",)), RowSpec("r1", replies=("400",), seconds=3.0)),
            endpoints=(
                EndpointSpec(windows=(Window(2.0, 62.0, "down"),)),
                EndpointSpec(windows=(Window(2.0, 62.0, "hang"),)),
            ),
        )
    )


def test_a_server_on_trial_is_sent_a_row_that_has_not_failed_elsewhere():
    """It was sent one bad row after the other, and rested for half a minute after each of them."""
    replies = (
        ("ok",), ("error200", "ok"), ("nochoice",), ("ok",), ("ok",), ("429+d4", "502"),
        ("invalid",), ("invalid", "invalid", "invalid", "ok"), ("429+3", "500"),
        ("invalid", "ok"), ("invalid", "junk", "junk", "junk", "429", "error200"), ("ok",),
    )  # fmt: skip
    seconds = (1.0, 3.0, 1.0, 0.2, 1.0, 0.2, 1.0, 1.0, 3.0, 0.2, 0.2, 3.0)
    ill = Window(0.0, 1.0, "reset"), Window(2.0, 22.0, "junk")
    holds(
        World(
            seed=9802844,
            job=JobSpec(
                kind="schema", answers=3, retries=1, per_endpoint=1, temperature=0.7,
                truncated="accept", allow_failures=2, segment_bytes=300,
                options={"output": "-", "ordered": False},
            ),
            rows=tuple(
                RowSpec(f"r{number}", replies=each, seconds=seconds[number])
                for number, each in enumerate(replies)
            ),
            endpoints=(EndpointSpec(windows=ill), EndpointSpec()),
        )
    )  # fmt: skip


def test_an_empty_answer_counts_once_for_the_rate():
    """It counted twice, so that a 429 after it was taken for one that no rate caused."""
    history = play(
        World(
            seed=9806585,
            job=JobSpec(kind="schema", answers=2, concurrency="auto", temperature=0.7, priced=True),
            rows=(
                RowSpec("r0", replies=("blank", "429+m1500")),
                RowSpec("r1", replies=("blank",)),
                RowSpec("r2", replies=("slow:4",)),
            ),
            endpoints=(EndpointSpec(),),
        )
    )
    assert list(a_429_pauses_its_account(history)) == []  # the run never ends: it stays busy


def test_a_row_that_fails_on_two_servers_on_trial_ends():
    """Each of them was taken for broken without a check, so the row lost no attempt, for ever."""
    holds(
        World(
            seed=9900352,
            job=JobSpec(retries=1, concurrency="auto", temperature=0.7, tpm=150, system=600),
            rows=(
                RowSpec("r0", replies=("502",)),
                RowSpec("r1", replies=("429+m1500", "429+3", "cut")),
            ),
            endpoints=(EndpointSpec(), EndpointSpec(pace=20)),
        )
    )


def test_a_server_on_trial_is_sent_a_row_beside_a_long_request():
    holds(
        World(
            seed=50005212,
            job=JobSpec(concurrency="auto", timeout=60.0, temperature=0.7, stream=True),
            rows=(RowSpec(id="r0", replies=("slow:40",)), RowSpec(id="r1", replies=("cut",))),
            endpoints=(EndpointSpec(),),
        )
    )
