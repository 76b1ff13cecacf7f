from __future__ import annotations

import io
import re
from dataclasses import dataclass, field

import msgspec
import pytest
from rich.console import Console

from bagent.observe import Live, make_progress
from bagent.observe.dashboard import STEP_S, Dashboard, History, bars
from bagent.types import EndpointSample


@dataclass
class Limit:
    value: int = 64


@dataclass
class State:
    name: str
    health: str = "ok"
    in_flight: int = 12
    limit: Limit = field(default_factory=Limit)


def board(clock, width: int = 80, height: int = 24) -> tuple[Dashboard, io.StringIO]:
    out = io.StringIO()
    size = {"width": width, "height": height, "_environ": {"TERM": "xterm"}}
    console = Console(file=out, force_terminal=True, no_color=True, legacy_windows=False, **size)
    return Dashboard(console, clock), out


def screen(clock, tally, snapshot, states) -> list[str]:
    """Return the lines of a dashboard over these endpoints."""
    dashboard, out = board(clock)
    dashboard.start("a run")
    dashboard.attach(Live(tally, lambda: states))
    clock.now += 1
    dashboard.update(snapshot())
    return last_screen(out)


def last_screen(out: io.StringIO) -> list[str]:
    frame = out.getvalue().split("\x1b[H")[-1]
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in frame.splitlines()]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 12), (200, 60)])
def test_every_part_fits_the_screen(clock, make, tally, busy, width, height):
    states = [State(f"http://node{n:03d}.cluster.example.org:8000") for n in range(40)]
    states[17].health = "down"
    dashboard, out = board(clock, width, height)
    dashboard.start("a run")
    dashboard.attach(Live(tally, lambda: states))
    for _ in range(3):
        clock.now += STEP_S
        dashboard.update(busy())
    lines = last_screen(out)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    shown = "\n".join(lines)
    assert "a run" in shown
    assert "down" in shown  # what needs attention comes first
    assert "1,500 ok" in shown


def test_endpoints_show_load_cache_and_errors(clock, make, tally, busy):
    for kind in (None, "timeout"):
        tally.attempts([make.attempt("g", endpoint="a", error_kind=kind)])
    for hits, queries in ((100, 200), (103, 204)):
        one = EndpointSample(endpoint="a", at=1.0, healthy=True, in_flight=1, limit=2, waiting=7)
        tally.sample(msgspec.structs.replace(one, cache_hits=hits, cache_queries=queries))
    (line,) = [line for line in screen(clock, tally, busy, [State("a")]) if "12/64" in line]
    assert line.split() == ["a", "ok", "12/64", "7", "75", "%", "2", "1"]


def test_a_slow_endpoint_comes_first_and_names_stay_apart(clock, make, tally, busy):
    states = [State(f"http://node{n:03d}.cluster.example.org:8000") for n in range(3)]
    for state, seconds in zip(states, (1.0, 1.2, 4.0), strict=True):
        for number in range(6):
            sent = 10.0 + number
            attempt = make.attempt(f"{state.name}{number}", endpoint=state.name)
            tally.attempts([msgspec.structs.replace(attempt, sent=sent, done=sent + seconds)])
    shown = screen(clock, tally, busy, states)
    lines = [line.split() for line in shown if "12/64" in line]
    assert [(line[0][:7], line[0][-4:]) for line in lines] == [
        (f"node00{n}", "8000") for n in (2, 0, 1)
    ]
    assert [line[1] for line in lines] == ["slow", "ok", "ok"]
    assert lines[0][2:] == ["12/64", "4.0s", "3.3", "6", "0"]
    assert not any("cache" in line for line in shown)


def test_the_last_answers_and_the_errors_are_there_without_control_codes(clock, make, tally, busy):
    tally.outcomes([make.outcome(7, text="fine\x1b[31m", id="the-id")])
    shown = "\n".join(screen(clock, tally, busy, []))
    assert "\nthe-id: fine\\x1b[31m" in shown
    assert "5 x timeout: timeout text" in shown


def test_it_is_drawn_at_most_once_a_second_and_leaves_its_messages_behind(clock, busy):
    dashboard, out = board(clock)
    dashboard.note("before")
    dashboard.start("a run")
    clock.now += 1
    snapshot = busy()
    dashboard.update(snapshot)
    size = len(out.getvalue())
    clock.now += 0.5
    dashboard.update(snapshot)
    assert len(out.getvalue()) == size
    clock.now += 0.6
    dashboard.update(snapshot)
    assert len(out.getvalue()) > size
    for step in (lambda: dashboard.note("meanwhile"), dashboard.stop):
        step()
        step()
    assert out.getvalue().split("\x1b[?1049l")[1].count("bagent: meanwhile") == 1


def test_the_history_has_one_bar_a_step(clock, make, tally):
    history = History()
    for row in range(40):
        clock.now += 1
        tally.outcomes([make.outcome(row, completion_tokens=10)])
        history.add(make.snapshot(tally))
    assert history.rates(1) == [1.0] * int(40 / STEP_S)
    assert history.rates(2) == [10.0] * int(40 / STEP_S)
    assert bars([0.0, 1.0, 4.0], 2) == "▂█"


def test_without_a_terminal_lines_are_shown_and_it_is_said(clock):
    out = io.StringIO()
    progress = make_progress("dashboard", out, is_tty=False, env={"TERM": "xterm"}, clock=clock)
    progress.start("a run")
    assert "--dashboard needs a terminal" in out.getvalue()
    assert "\x1b" not in out.getvalue()
