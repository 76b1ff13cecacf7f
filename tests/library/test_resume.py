"""A run of a program, called again with other rows: the input of a start is exactly ``rows``."""

from itertools import count

import pytest

import bagent
from bagent.cli.app import main
from bagent.errors import ChangedError, JobError, StoppedEarly
from support.jobs import rows
from support.replies import ok, slow


@pytest.mark.parametrize(
    "process",
    [False, pytest.param(True, marks=pytest.mark.process("a run in a process of its own"))],
    ids=["thread", "process"],
)
def test_rows_of_an_interrupted_start_are_sent_only_when_given_again(process, job, fs):
    fs.set_script({"r1": [ok("fine")], "*": [slow(0.5, ok("fine"))]})
    with bagent.run(job, rows=rows(30), options=["--set", "limits.concurrency=2"]) as first:
        for _ in first:
            break
    assert first.exit_code == 75
    sent = {request.row_id for request in fs.requests}
    assert len(sent) < 20
    fs.set_script({"*": [ok("again")]})
    subset = [*rows(2), *rows(30)[-2:]]
    second = bagent.run(job, rows=subset, ordered=True, process=process)
    results = list(second)
    assert [r.id for r in results] == ["r1", "r2", "r29", "r30"]
    assert [r.row for r in results] == [0, 1, 2, 3]
    assert [r.input for r in results] == subset
    assert second.exit_code == 0
    assert {request.row_id for request in fs.requests} == sent | {"r2", "r29", "r30"}
    # Good answers of rows that are no longer given stay in the run, as those of a file do.
    assert {r.id for r in bagent.open_run("job")} == sent | {"r2", "r29", "r30"}


def test_finished_rows_come_from_the_run_in_the_order_of_this_start(job, fs):
    list(bagent.run(job, rows=rows(4)))
    mixed = [rows(5)[4], *reversed(rows(4))]
    assert [r.id for r in bagent.run(job, rows=mixed, ordered=True)] == [r["id"] for r in mixed]
    assert {r.id for r in bagent.run(job, rows=rows(2))} == {"r1", "r2"}
    assert len(fs.requests) == 5


def test_an_edited_row_gets_a_new_answer_that_replaces_the_old(job, fs, caplog):
    caplog.set_level("INFO", logger="bagent")
    before = [r.text for r in bagent.run(job, rows=rows(3), ordered=True)]
    fs.set_script({"*": [ok("new")]})
    edited = rows(3)
    edited[1]["text"] = "edited"
    edited[2]["stars"] = 9  # the prompt does not use it
    results = list(bagent.run(job, rows=edited, ordered=True))
    assert [r.text for r in results] == [before[0], "new", before[2]]
    assert [r.input for r in results] == edited
    run = bagent.open_run("job")
    stored = run.results(with_input=True)
    assert [(r.text, r.input) for r in stored] == [(r.text, r.input) for r in results]
    ids = [{"id": r.id, "text": r.text} for r in results]
    assert run.rows("select id, text from results") == ids
    assert len(fs.requests) == 4
    assert "came before" not in caplog.text


def test_failed_rows_that_are_not_given_again_leave_the_run(job):
    mixed = [*rows(2), "no row"]
    first = bagent.run(job, rows=mixed)
    assert len(list(first)) == 3
    assert first.exit_code == 1
    second = bagent.run(job, rows=rows(2))
    assert [r.ok for r in second] == [True, True]
    assert second.exit_code == 0
    none = bagent.run(job, rows=[])
    assert list(none) == []
    assert len(bagent.open_run("job").df()) == 2


def test_a_changed_id_is_refused_before_anything_is_sent(dict_job, fs):
    values = [{"review_id": row["id"], "text": row["text"]} for row in rows(3)]
    list(bagent.run(dict_job, rows=values))
    with pytest.raises(ChangedError, match="id changed"):
        list(bagent.run(dict_job | {"id": "review_id"}, rows=values))
    assert len(fs.requests) == 3


def test_a_call_that_sends_nothing_leaves_the_speed_of_the_run(job):
    list(bagent.run(job, rows=rows(3)))
    before = bagent.open_run("job").summary().rows_per_second
    list(bagent.run(job, rows=rows(3)))
    assert bagent.open_run("job").summary().rows_per_second == before is not None


def test_a_refused_call_leaves_the_run_as_it_was(job):
    list(bagent.run(job, rows=rows(3)))
    before = [r.input for r in bagent.open_run("job").results(with_input=True)]
    with pytest.raises(JobError, match="text is not in the first row"):
        list(bagent.run(job, rows=[{"id": "r9"}]))
    assert [r.input for r in bagent.open_run("job").results(with_input=True)] == before == rows(3)


def test_a_job_that_was_refused_by_its_rows_can_be_corrected(dict_job):
    wrong = dict_job | {"prompt": "{{ txt }}"}
    with pytest.raises(JobError, match="txt is in none of the first 2 rows"):
        list(bagent.run(wrong, rows=rows(2)))
    assert len(list(bagent.run(dict_job, rows=rows(2)))) == 2


def test_status_names_the_call_that_goes_on(dict_job, capsys):
    endless = ({"id": number, "text": "more"} for number in count())
    with bagent.run(dict_job, rows=endless, name="reviews", options=["--no-canary"]) as run:
        next(iter(run))
    assert main(["status", "reviews"]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split(maxsplit=1)
    call = 'call run(job, rows=rows, name="reviews", options=["--no-canary"]) again in Python'
    assert last == ["next", f"{call}, with the same job and rows"]


def test_status_counts_rows_that_were_copied_from_an_earlier_run(job, fs, capsys):
    list(bagent.run(job, rows=rows(3), name="first"))
    list(bagent.run(job, rows=rows(4), name="second", options=["--reuse", "first"]))
    assert len(fs.requests) == 4
    assert main(["status", "second"]) == 0
    shown = capsys.readouterr().out
    assert "3 from equal requests, not sent; tokens are of others" in shown


def test_finished_rows_come_without_a_server(dict_job):
    list(bagent.run(dict_job, rows=rows(3)))
    gone = dict_job | {"backend": "http://127.0.0.1:9"}
    for ordered in (False, True):
        again = bagent.run(gone, rows=rows(2), ordered=ordered)
        assert [result.id for result in again] == ["r1", "r2"]
        assert again.exit_code == 0
    with pytest.raises(StoppedEarly):
        list(bagent.run(gone, rows=rows(4), options=["--wait-hosts", "0.1s"]))


def test_progress_leaves_out_failed_rows_that_are_not_given_again(job, fs, monkeypatch):
    monkeypatch.setattr("bagent.observe.progress.FIRST_S", 0.0)
    monkeypatch.setattr("bagent.observe.progress.INTERVAL_S", 0.0)
    mixed = [*rows(2), "no row", "no row either"]
    list(bagent.run(job, rows=mixed))
    fs.set_script({"*": [slow(1.0, ok("late"))]})
    states = []
    list(bagent.run(job, rows=rows(6), on_progress=states.append))
    totals = {state["total"] for state in states if state["remaining"]}
    assert 6 in totals
    assert states[-1]["total"] == 6
