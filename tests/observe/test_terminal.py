from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.cells import cell_len
from rich.console import Console

from bagent.observe.progress import Phrase
from bagent.observe.snapshot import Snapshot
from bagent.observe.terminal import RichProgress, RunView, flow, make_console
from bagent.text.terminal import SafeTextStream

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def draw(snapshot: Snapshot, width: int) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system="standard")
    console.print(RunView(snapshot))
    return CODES.sub("", stream.getvalue()).splitlines()


def test_the_figures_are_shown_at_80_columns(busy, clock):
    clock.now += 2
    lines = draw(busy(throttled_s=3.0, throttle_answers=42), 80)
    assert [line.strip("━╸ ") for line in lines] == [
        "1,509 of ~6,700 rows (22 %)  ETA 1m00s",
        "1,500 ok  9 failed (timeout 5, rejected 3, schema 1)  this start: 1,209 sent",
        "64/64 in flight  100 waiting  2 retrying  throttled for 3.0s (42 answers)",
        "3 of 4 endpoints up",
        "86.4 rows/s  1,714 tok/s  $0.1200  $0.6391 at the end  14s",
    ]
    assert "━" in lines[0]


@pytest.mark.parametrize("width", [1, 20, 79, 80, 300])
def test_no_line_is_wider_than_the_terminal_or_80_columns(busy, width):
    lines = draw(busy(throttled_s=3.0, throttle_answers=42, endpoints=40_000), width)
    assert lines
    assert max(cell_len(line.rstrip()) for line in lines) <= min(width, 80)


def test_no_words_are_lost_when_lines_are_broken():
    phrases = [Phrase("one two"), Phrase("three"), Phrase("four", "bad"), Phrase("five")]
    assert [line.plain for line in flow(phrases, 14)] == ["one two  three", "four  five"]
    wide = flow([Phrase("東京東京"), Phrase("x")], 5)
    assert [cell_len(line.plain) for line in wide] == [5, 1], "such characters take two columns"


def progress(stream: io.StringIO, **env: str) -> tuple[RichProgress, Console]:
    console = make_console(SafeTextStream(stream), {"TERM": "xterm-256color", **env}, 80)
    return RichProgress(console), console


def test_a_note_stands_above_the_display_and_is_kept(busy):
    stream = io.StringIO()
    display, _ = progress(stream)
    display.start("run")
    display.update(busy())
    before = stream.tell()
    display.note("endpoint [red]a[/] is down [/nothing]")
    display.note("endpoint [red]a[/] is down [/nothing]")
    display.update(busy())
    stream.seek(before)
    text = CODES.sub("", stream.read())
    assert text.count("bagent: endpoint [red]a[/] is down [/nothing]\n") == 1
    assert text.index("bagent: endpoint") < text.index("1,500 ok")
    display.stop()


def test_no_color_is_respected(busy):
    found = {}
    for name, env in (("color", {}), ("none", {"NO_COLOR": "1"}), ("empty", {"NO_COLOR": ""})):
        stream = io.StringIO()
        display, _ = progress(stream, **env)
        display.start("run")
        display.update(busy())
        display.stop()
        found[name] = bool(re.search(r"\x1b\[(?:[0-9;]*;)?[349][0-7]", stream.getvalue()))
    assert found == {"color": True, "none": False, "empty": True}


CHILD = """
import fcntl, struct, sys, termios
from bagent.observe import RunCounters, make_progress
from bagent.types import FeedStats, FleetStats

display = make_progress("auto", sys.stderr, is_tty=sys.stderr.isatty(), env={"TERM": "xterm"})
fleet = FleetStats(1, 64, 0, 77, 9.0, 1, 1)
state = RunCounters(lambda: 0.0).snapshot(fleet, FeedStats(9, 9, 9, 9, True))
display.start("begin")
for columns in (80, 30):
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    display.note(f"columns {columns}")
    display.update(state)
display.stop()
"""


@pytest.mark.process("terminal")
def test_the_display_follows_a_real_terminal_that_is_resized():
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal,
    ) as child:
        os.close(terminal)
        raw = read_all(master)
        assert child.stdout is not None
        assert child.stdout.read() == b""
    os.close(master)
    assert child.returncode == 0
    wide, narrow = CODES.sub("", raw.decode()).split("columns 30")
    lines = re.split(r"[\r\n]+", wide)
    assert any("77 retrying  throttled for 9.0s" in line for line in lines)
    lines = re.split(r"[\r\n]+", narrow)
    assert "throttled for 9.0s" in lines
    assert max(cell_len(line.rstrip()) for line in lines) <= 30
    assert raw.decode().rfind("\x1b[?25h") > raw.decode().rfind("\x1b[?25l")


def read_all(master: int) -> bytes:
    """Everything until the terminal's other end is closed (Linux says so by an error)."""
    parts = []
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


class Failing(io.StringIO):
    """A stream that takes nothing while it has an error."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    ("error", "broken"), [(BrokenPipeError(), True), (BlockingIOError(), False)]
)
def test_a_reader_that_is_gone_or_busy_loses_text_and_stops_nothing(error, broken):
    stream = Failing()
    out = SafeTextStream(stream)
    stream.error = error
    out.line("one")
    stream.error = None
    out.line("two")
    assert stream.getvalue() == ("" if broken else "two\n")
    assert out.broken == broken
    stream.close()
    assert not out.isatty()


def test_characters_that_the_encoding_lacks_become_escapes():
    raw = io.BytesIO()
    out = SafeTextStream(io.TextIOWrapper(raw, encoding="ascii"))
    out.line("Zürich \ud800")
    assert raw.getvalue() == b"Z\\xfcrich \\ud800\n"
    assert not out.broken
