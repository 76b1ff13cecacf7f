from __future__ import annotations

import io
import json
from typing import Any

import pytest

from bagent.errors import JobError
from bagent.observe.progress import NoProgress, Progress, make_progress, one_line

TERMINAL = {"TERM": "xterm-256color"}


def plain(clock: Any) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return make_progress("plain", stream, is_tty=False, env={}, clock=clock), stream


def test_a_plain_line_says_everything_once(busy, clock):
    progress, stream = plain(clock)
    progress.start("gene-review: 4 endpoints")
    clock.now += 2
    progress.update(busy(throttled_s=3.0, throttle_answers=42))
    assert stream.getvalue() == (
        "gene-review: 4 endpoints\n"
        "[14s] 1,509 of ~6,700 rows (22 %), 1,500 ok, 9 failed (timeout 5, rejected 3, schema 1), "
        "this start: 1,209 sent; 64/64 in flight, 100 waiting, 2 retrying, "
        "throttled for 3.0s (42 answers), 3 of 4 endpoints up; "
        "86.4 rows/s, 1,714 tok/s, $0.1200, $0.6391 at the end, ETA 1m00s; throttling begins\n"
    )


def test_a_line_tells_the_stages_where_there_are_several(tally, make):
    tally.outcomes([make.outcome(0, stage="plan")])
    assert "plan" not in one_line(make.snapshot(tally))
    for number in range(9):
        tally.outcomes([make.outcome(1, "failed", stage=f"work{number}", error_kind="timeout")])
    line = one_line(make.snapshot(tally))
    assert "; plan 1 ok, work0 0 ok, 1 failed, work1 0 ok, 1 failed," in line
    assert "work6 0 ok, 1 failed, +2 stages; " in line


def test_a_start_with_nothing_to_do_has_no_speed(tally, make, clock):
    clock.now += 1
    feed = make.feed(read=3, skipped=3, ended=True, size=3, position=3)
    line = one_line(make.snapshot(tally, feed=feed, earlier={"ok": 3}))
    assert line == "[1.0s] 3 of 3 rows (100 %), 3 ok, this start: 0 sent"


def test_plain_lines_hold_no_control_codes(busy, clock):
    progress, stream = plain(clock)
    progress.start("run \x1b[1m")
    for _ in range(5):
        clock.now += 10
        progress.update(busy())
        progress.note("server said \x1b[2J\r\x07")
    progress.stop()
    assert len(stream.getvalue().splitlines()) == 7
    assert all(line.isprintable() for line in stream.getvalue().splitlines())
    assert "\r" not in stream.getvalue()
    clock.now += 130
    progress.update(busy())
    assert "nothing finished for 3m00s" in stream.getvalue()


def test_the_first_plain_line_comes_after_2_s_then_one_each_10_s(busy, clock):
    progress, stream = plain(clock)
    progress.start("run")
    begin = clock.now
    times = []
    for tick in range(1, 65):
        clock.now = begin + tick / 2
        before = stream.tell()
        progress.update(busy())
        if stream.tell() > before:
            times.append(clock.now - begin)
    assert times == [2.0, 12.0, 22.0, 32.0]


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ([{}, {"endpoints_up": 0}, {"endpoints_up": 0}, {"endpoints_up": 4}],
         ["ETA 1m00s", "no endpoint is up", "endpoints are up again"]),
        # Told to wait again and again, with gaps between.
        ([{}, {"throttled_s": 0.4}, {}, {"throttled_s": 0.4}, *[{}] * 6],
         ["ETA 1m00s", "throttling begins", "throttling ended"]),
    ],
)  # fmt: skip
def test_what_changes_gets_a_line_at_once_and_no_flood(busy, clock, changes, ends):
    progress, stream = plain(clock)
    clock.now += 1
    for number, change in enumerate(changes):
        clock.now += 1
        progress.update(busy(throttle_answers=min(3, number), **change))
    assert [line.split("; ")[-1].split(", ")[-1] for line in stream.getvalue().splitlines()] == ends
    size = stream.tell()
    for tick in range(100):
        clock.now += 0.01
        progress.update(busy(endpoints_up=tick % 2))
    assert len(stream.getvalue()[size:].splitlines()) <= 2


def test_a_pipe_as_input_shows_rows_without_a_total(tally, make, clock):
    progress, stream = plain(clock)
    clock.now += 2
    tally.outcomes([make.outcome(0)])
    feed = make.feed(size=None, ended=False, read=1)
    progress.update(tally.snapshot(make.fleet(), feed))
    assert stream.getvalue() == "[2.0s] 1 row, 1 ok; 0/64 in flight; 0.50 rows/s, ETA ?\n"


def test_json_mode_writes_one_object_a_line(busy, clock):
    stream = io.StringIO()
    progress = make_progress("json", stream, is_tty=True, env=TERMINAL, clock=clock)
    progress.start("gene-review")
    progress.update(busy())
    clock.now += 2
    progress.update(busy(retrying=7))
    progress.note("low on quota")
    progress.note("low on quota")
    clock.now += 1
    progress.update(busy(retrying=0))
    progress.stop()
    progress.stop()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["start", "progress", "note", "end"]
    assert events[0]["header"] == "gene-review"
    assert (events[2]["level"], events[2]["text"]) == ("info", "low on quota")
    assert (events[1]["ok"], events[1]["failed"], events[1]["total"]) == (1500, 9, 6723)
    assert events[1]["this_start"]["ok"] == 1200
    assert events[1]["rows_per_s"] == events[1]["recent"]["rows_per_s"] > 0
    assert events[1]["fleet"]["retrying"] == 7
    assert events[3]["fleet"]["retrying"] == 0
    assert events[1]["tokens"]["reasoning"] == {"total": None, "unknown": 1200}


def test_json_mode_accounts_for_errors_that_it_leaves_out(tally, make, clock):
    for row, word in enumerate("abcdefghijklmno"):
        tally.outcomes([make.outcome(row, "failed", error_kind="rejected", error=word * 3)])
    stream = io.StringIO()
    progress = make_progress("json", stream, is_tty=False, env={}, clock=clock)
    progress.update(make.snapshot(tally))
    progress.stop()
    [event] = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (len(event["errors"]), event["errors_other"]) == (10, 5)


@pytest.mark.parametrize(
    ("mode", "is_tty", "env", "live"),
    [
        ("auto", True, TERMINAL, True),
        ("auto", False, TERMINAL, False),
        ("auto", True, {}, False),
        ("auto", True, {**TERMINAL, "CI": "true"}, False),
        ("auto", True, {**TERMINAL, "CI": "false"}, True),
        ("rich", True, {**TERMINAL, "CI": "true"}, True),
        ("rich", True, {"TERM": "dumb"}, False),
        ("plain", True, TERMINAL, False),
    ],
)
def test_the_live_display_needs_a_terminal(mode, is_tty, env, live, busy, clock):
    stream = io.StringIO()
    progress = make_progress(mode, stream, is_tty=is_tty, width=80, env=env, clock=clock)
    progress.start("run")
    clock.now += 2
    progress.update(busy())
    progress.stop()
    assert ("\x1b" in stream.getvalue()) == live
    assert "1,500 ok" in stream.getvalue()


@pytest.mark.parametrize("mode", ["auto", "rich", "plain", "json", "none"])
def test_a_closed_standard_error_stops_no_display(mode, busy, clock):
    stream = io.StringIO()
    progress = make_progress(mode, stream, is_tty=True, width=80, env=TERMINAL, clock=clock)
    progress.start("run")
    clock.now += 2
    progress.update(busy())
    assert bool(stream.getvalue()) == (mode != "none")
    stream.close()
    clock.now += 20
    progress.update(busy(throttled_s=1.0))
    progress.note("still here")
    progress.stop()
    assert stream.closed
    with pytest.raises(JobError, match="auto, rich, plain, json, none"):
        make_progress("fancy", io.StringIO(), is_tty=False)
    assert isinstance(make_progress("auto", None, is_tty=False), NoProgress)
