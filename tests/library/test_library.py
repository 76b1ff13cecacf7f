"""The package as other programs use it, against a scripted server and run directories."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import bagent
from bagent.errors import JobError, NeedsPerson, OwnedError, UsageError
from bagent.library.arguments import in_python
from bagent.library.engines import read_lines
from bagent.library.row_values import encode_row, row_lines
from bagent.rows.formats.json import decode_line
from support.jobs import rows, write_job
from support.replies import gated, ok, slow

if TYPE_CHECKING:
    import pandas


def test_the_public_names_are_these_and_each_is_there():
    names = "LoadedJob OpenedRun Result Run __version__ load_job open_run run"
    assert bagent.__all__ == names.split()
    for name in bagent.__all__:
        assert getattr(bagent, name) is not None
        assert name in dir(bagent)
    with pytest.raises(AttributeError):
        _ = bagent.nothing


@pytest.mark.process("imports")
def test_importing_the_package_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import bagent; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"bagent", "__future__"}


def test_a_job_is_checked_when_it_is_loaded(job_dir):
    path = write_job(job_dir, "http://127.0.0.1:9")
    job = bagent.load_job(path, ["limits.retries=1"])
    assert (job.spec.name, job.spec.limits.retries) == ("job", 1)
    assert repr(job) == f"<job job of {path}>"
    path.write_text("modle: x\n")
    with pytest.raises(JobError, match="did you mean model"):
        bagent.load_job(path)


async def collect(run: bagent.Run) -> list[bagent.Result]:
    return [result async for result in run]


def endless() -> Iterator[dict[str, Any]]:
    """Rows without an end."""
    return ({"id": f"r{number}", "text": "more"} for number in itertools.count())


def test_rows_go_in_and_typed_results_come_out_in_input_order(fs, job_dir):
    fs.set_script({"r1": [slow(0.3, ok("late"))], "*": [ok("fine")]})
    path = write_job(job_dir, fs.url, input=None, batching={"mode": "single"})
    states = []
    run = bagent.run(bagent.load_job(path), rows=rows(4), ordered=True, on_progress=states.append)
    found = asyncio.run(collect(run))
    assert [r.id for r in found] == ["r1", "r2", "r3", "r4"]
    assert [(r.text, r.ok) for r in found] == [("late", True)] + [("fine", True)] * 3
    assert found[0].input == {"id": "r1", "text": "text number 1"}
    assert run.exit_code == 0
    assert states[-1]["ok"] == 4
    assert run.path is not None
    assert [r.id for r in bagent.open_run(run.path)] == ["r1", "r2", "r3", "r4"]


def test_without_order_the_first_to_finish_comes_first(fs, job_dir):
    fs.set_script({"r1": [slow(0.4, ok("late"))], "*": [ok("fine")]})
    write_job(job_dir, fs.url, 3, batching={"mode": "single"})
    found = asyncio.run(collect(bagent.run("job.yaml")))
    assert [r.text for r in found] == ["fine", "fine", "late"]


def test_the_state_is_shown_as_lines_where_there_is_no_notebook(job, capfd):
    asyncio.run(collect(bagent.run(job, rows=rows(3), on_progress="show")))
    shown, err = capfd.readouterr()
    assert shown == ""
    assert "3 of 3 rows (100 %), 3 ok" in err.splitlines()[-1]


@pytest.fixture
def frame() -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(
        {
            "id": [1, 2],
            "text": ["a", None],
            "day": [pandas.Timestamp("2024-01-01"), pandas.NaT],
            "score": [1.5, float("nan")],
        }
    )


def test_tables_are_rows_and_missing_values_are_missing(frame):
    import pyarrow

    table = pyarrow.Table.from_pandas(frame)
    batch = pyarrow.RecordBatch.from_pandas(frame)
    expected = [{"id": 1, "text": "a", "day": "2024-01-01T00:00:00", "score": 1.5}, {"id": 2}]
    for some in (frame, frame.set_index("id"), table, batch, iter(table.to_batches())):
        assert asyncio.run(lines_of(some)) == expected, type(some)


async def lines_of(some: Any) -> list[Any]:
    return [decode_line(line) async for line in row_lines(some)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime.date(2024, 1, 1), "2024-01-01"),
        (Decimal("1.10"), "1.10"),
        (Decimal("7"), 7),
        (b"text", "text"),
        (Path("images/a.png"), "images/a.png"),
        ({3, 1, 2}, [1, 2, 3]),
        ({"day": datetime.date(2024, 1, 1)}, {"day": "2024-01-01"}),
        (None, None),
    ],
    ids=repr,
)
def test_values_of_rows_are_written_as_a_file_would_hold_them(value, expected):
    assert decode_line(encode_row({"id": 1, "x": value})) == {"id": 1, "x": expected}


def test_values_of_pandas_and_numpy_are_written_as_a_file_would_hold_them():
    import numpy
    import pandas

    for value, expected in [
        (pandas.Timestamp("2024-01-01 10:00", tz="UTC"), "2024-01-01T10:00:00Z"),
        (pandas.Timedelta("1 day"), "P1D"),
        (numpy.datetime64("2024-01-01T00:00:00.000000001"), "2024-01-01T00:00:00.000000001"),
        (numpy.int64(3), 3),
        (numpy.bool_(True), True),
        (numpy.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (pandas.Series([1.0, float("nan")]), [1.0, None]),
    ]:
        assert decode_line(encode_row({"id": 1, "x": value})) == {"id": 1, "x": expected}


def test_bad_rows_of_a_program_keep_their_ids_and_end_as_bad_input(fs, job_dir):
    write_job(job_dir, fs.url, input=None, id="k", prompt="id={{ k }} {{ text }}")
    unused = {"k": 1, "text": "a", "image": object()}
    mixed = [unused, {"k": 2, "text": 1j, "day": 3}, "no row"]
    run = bagent.run("job.yaml", rows=mixed, ordered=True)
    results = list(run)
    assert [r.id for r in results[:2]] == [1, 2]
    assert [r.input for r in results] == [{"k": 1, "text": "a"}, {"k": 2, "day": 3}, {}]
    assert [r.error_kind for r in results] == [None, "bad_input", "bad_input"]
    assert "column 'text'" in str(results[1].error)
    assert "a row is a dict" in str(results[2].error)


def test_a_table_may_lack_a_value_in_its_first_rows(job, frame):
    results = list(bagent.run(job, rows=frame.iloc[::-1], ordered=True))
    assert [(r.id, r.error_kind) for r in results] == [(2, "template"), (1, None)]


def test_a_job_may_be_a_dict_and_a_plain_loop_gives_typed_ids(dict_job, job_dir, frame):
    (job_dir / "prompt.txt").write_text("{{ text }}")
    job = dict_job | {"name": "from-dict", "prompt": {"user": {"file": "prompt.txt"}}}
    with bagent.run(job, rows=frame.head(1), ordered=True) as run:
        results = list(run)
    assert [(r.id, r.ok) for r in results] == [(1, True)]
    assert not list(job_dir.glob(".bagent-*"))
    results_frame = bagent.open_run("from-dict").df()
    assert "1 row: 1 ok" in str(run)
    assert repr(run) == "<run runs/from-dict: finished>"
    assert list(frame.merge(results_frame, on="id")["status"]) == ["ok"]
    list(bagent.run(job | {"name": "mixed"}, rows=[{"id": n, "text": "t"} for n in (1, "01")]))
    assert [row["id"] for row in bagent.open_run("mixed").rows()] == ["1", "01"]
    with pytest.raises(UsageError, match=r"^job:.*did you mean model"):
        list(bagent.run(job | {"modle": "x"}, rows=frame))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_run_that_needs_no_more_rows_leaves_the_rest(loop, job):
    run = bagent.run(job, rows=endless(), options=["--limit", "5"])
    new_loop = asyncio.new_event_loop if loop == "asyncio" else pytest.importorskip(loop).Loop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert len(runner.run(collect(run))) == 5
    assert run.exit_code == 0


def test_an_error_in_a_plain_loop_stops_the_work(job):
    run = bagent.run(job, rows=endless())
    with pytest.raises(ZeroDivisionError):
        for _ in run:
            raise ZeroDivisionError
    assert run.exit_code == 75


def test_leaving_a_loop_waits_for_the_requests_in_flight(fs, job):
    fs.set_script({"r0": [ok("fine")], "*": [slow(0.4, ok("fine"))]})
    with bagent.run(job, rows=endless()) as run:
        for _ in run:
            fs.wait_for(4)
            break
    assert run.exit_code == 75
    kept = {result.id for result in bagent.open_run("job")}
    assert kept == {request.row_id for request in fs.requests}
    assert len(kept) >= 4


@pytest.mark.parametrize(
    "call",
    [
        lambda: list(bagent.run("job.yaml")),
        lambda: bagent.run("job.yaml", rows="text"),
        lambda: bagent.load_job("job.yaml"),
        lambda: bagent.open_run("none"),
    ],
    ids=["loop", "arguments", "load_job", "open_run"],
)
def test_an_error_of_the_caller_has_a_short_traceback(job_dir, call):
    (job_dir / "job.yaml").write_text("modle: x\n")
    with pytest.raises(UsageError) as caught:
        call()
    package = Path(bagent.__file__).parent
    assert len([entry for entry in caught.traceback if package in Path(entry.path).parents]) <= 1
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(ZeroDivisionError(), ZeroDivisionError), (OSError(5, "disk"), NeedsPerson)],
    ids=["fault", "disk"],
)
def test_a_run_that_broke_off_can_be_started_again_in_the_same_program(
    job, monkeypatch, fault, raised
):
    def broken(*_: Any, **__: Any) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr("bagent.runs.ending.finish_run", broken)
        run = bagent.run(job, rows=rows(1))
        with pytest.raises(raised):
            asyncio.run(collect(run))
    assert run.exit_code == 76
    again = bagent.run(job, rows=rows(1))
    asyncio.run(collect(again))
    assert again.exit_code == 0


def test_rows_that_break_off_are_no_end_of_the_input(job):
    async def broken() -> AsyncIterator[dict[str, Any]]:
        yield {"id": "r1", "text": "one"}
        raise ZeroDivisionError

    run = bagent.run(job, rows=broken())
    with pytest.raises((ZeroDivisionError, NeedsPerson)):
        asyncio.run(collect(run))
    assert run.exit_code not in (0, 1)


@pytest.mark.parametrize(
    "process",
    [False, pytest.param(True, marks=pytest.mark.process("a run in a process of its own"))],
    ids=["thread", "process"],
)
def test_a_run_ends_while_a_forked_process_still_works(process, job):
    copies = []

    def descriptors() -> set[int]:
        return {int(path.name) for path in Path("/dev/fd").iterdir()}

    def forking(before: set[int]) -> Iterator[dict[str, Any]]:
        yield {"id": "r1", "text": "one"}
        for descriptor in descriptors() - before:
            with contextlib.suppress(OSError):  # the one that listed them
                copies.append(os.dup(descriptor))  # as a forked process has them
        yield {"id": "r2", "text": "two"}

    run = bagent.run(job, rows=forking(descriptors()), process=process)
    try:
        done = asyncio.run(asyncio.wait_for(collect(run), 30))
    finally:
        for descriptor in copies:
            os.close(descriptor)
    assert copies
    assert sorted(result.id for result in done) == ["r1", "r2"]
    assert run.exit_code == 0


async def break_off(run: bagent.Run) -> None:
    async with run as results:
        async for _ in results:
            break


async def forget(run: bagent.Run) -> None:
    async for _ in run:
        return


async def be_cancelled(run: bagent.Run) -> None:
    started = asyncio.Event()

    async def work() -> None:
        async with run as results:
            async for _ in results:
                started.set()

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [break_off, forget, be_cancelled])
def test_a_task_that_leaves_its_run_stops_it(leave, job, caplog):
    async def given() -> AsyncIterator[dict[str, Any]]:
        for row in endless():
            yield row

    run = bagent.run(job, rows=given())
    asyncio.run(leave(run))
    assert run.exit_code == 75
    assert list(bagent.open_run("job")), "what was finished is kept"
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_line_that_the_end_of_a_run_cut_off_is_no_result():
    async def lines() -> list[bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(b'{"id": 1}\n{"id": ')
        reader.feed_eof()
        return [line async for line in read_lines(reader)]

    assert asyncio.run(lines()) == [b'{"id": 1}']


def test_a_run_works_in_a_process_of_its_own_too(job, caplog):
    states = []
    caplog.set_level("INFO", logger="bagent")
    twice = [*rows(3), {"id": "r3", "text": "again"}]
    run = bagent.run(job, rows=twice, on_progress=states.append, process=True)
    assert sorted(r.id for r in run) == ["r1", "r2", "r3", "r3"]
    assert [record for record in caplog.records if '"r3"' in record.getMessage()]
    assert (run.exit_code, run.path) == (0, Path("runs/job"))
    assert states[-1]["ok"] == 4


def test_two_runs_work_in_one_program_at_once(fs, job):
    fs.set_script({"*": [slow(0.3, ok("fine"))]})

    async def both() -> list[list[bagent.Result]]:
        runs = [bagent.run(job, rows=rows(5), name=name) for name in ("a", "b")]
        return await asyncio.gather(*map(collect, runs))

    first, second = asyncio.run(both())
    assert [len(first), len(second)] == [5, 5]
    assert {r.id for r in bagent.open_run("a")} == {r.id for r in bagent.open_run("b")}


def test_two_runs_of_one_directory_are_refused(fs, job_dir):
    fs.set_script({"r1": [ok("fine")], "*": [gated(ok("fine"))]})
    write_job(job_dir, fs.url, 3, batching={"mode": "single"})
    with bagent.run("job.yaml") as first:
        results = iter(first)
        next(results)
        with pytest.raises(OwnedError, match="is working on this run"):
            list(bagent.run("job.yaml"))
        fs.release()
        assert len(list(results)) == 2


def test_a_run_leaves_the_settings_of_the_program_alone(job):
    def settings() -> Any:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return handlers, gc.get_threshold(), gc.get_freeze_count(), dict(os.environ), sys.path[:]

    before = settings()
    assert len(list(bagent.run(job, rows=rows(3)))) == 3
    assert settings() == before


def test_an_error_of_the_progress_function_is_raised_at_the_end(job):
    def fail(state: dict[str, Any]) -> None:
        raise ZeroDivisionError

    run = bagent.run(job, rows=rows(3), on_progress=fail)
    seen = []
    with pytest.raises(ZeroDivisionError):
        for result in run:
            seen.append(result.id)
    assert len(seen) == 3


@pytest.mark.parametrize("option", [["--limt", "3"], ["--workers", "2"], ["--executor", "parsl"]])
def test_an_option_that_a_run_in_a_program_cannot_have_is_refused(job, option):
    with pytest.raises(UsageError, match=option[0]):
        list(bagent.run(job, rows=rows(1), options=option))


@pytest.mark.process("what a program does at its end")
def test_a_program_that_ends_with_an_open_run_lets_it_stop(fs, job):
    fs.set_script({"*": [slow(0.5, ok("fine"))]})
    code = (
        "import bagent, itertools\n"
        "endless = ({'id': n, 'text': 'more'} for n in itertools.count())\n"
        "results = iter(bagent.run('job.yaml', rows=endless))\n"
        "next(results)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    assert bagent.open_run("job").summary().statuses.keys() == {"ok"}


def test_messages_for_people_are_logged(job_dir, job, caplog):
    caplog.set_level("INFO", logger="bagent")
    twice = [{"id": 1, "text": "a"}, {"id": 1, "text": "b"}]
    assert len(list(bagent.run(job, rows=twice))) == 2
    records = [record for record in caplog.records if record.name == "bagent"]
    messages = [record.getMessage() for record in records if record.levelname == "WARNING"]
    assert len(messages) == 1
    log = (job_dir / "runs" / "job" / "run.log").read_text()
    assert "--set id=COLUMN" in log
    assert messages[0] in in_python(log)  # options are the arguments of the library


@pytest.mark.process("Ctrl-C")
def test_ctrl_c_in_a_plain_loop_finishes_what_is_in_flight(fs, job):
    fs.set_script({"*": [slow(0.3, ok("fine"))]})
    code = (
        "import bagent, itertools\n"
        "endless = ({'id': n, 'text': 'more'} for n in itertools.count())\n"
        "run = bagent.run('job.yaml', rows=endless)\n"
        "try:\n"
        "    for result in run: print(result.id, flush=True)\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped', run.exit_code)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline().strip().isdigit()
        program.send_signal(signal.SIGINT)
        lines = program.communicate(timeout=60)[0].splitlines()
    assert lines[-1] == "stopped 75"
    assert bagent.open_run("job").summary().statuses.keys() == {"ok"}
