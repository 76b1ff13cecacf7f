from __future__ import annotations

import os
from pathlib import Path

import pytest

from bagent.observe.run_log import RunLog

WHEN = 1_767_323_045.678
STAMP = "2026-01-02T03:04:05.678Z"


def opened(path: Path, **parts: object) -> RunLog:
    return RunLog(path, clock=lambda: WHEN, **parts)


def test_a_message_has_time_level_and_text_behind_earlier_ones(tmp_path):
    log = opened(tmp_path / "run.log")
    log.info("started")
    assert (tmp_path / "run.log").read_text() == f"{STAMP} info started\n", "at once"
    log.close()
    log = opened(tmp_path / "run.log")
    log.warning("endpoint a is down")
    log.error(f"server said:\n{STAMP} info all is well\r\n\n\x1b[2J \ud800")
    log.close()
    assert (tmp_path / "run.log").read_text() == (
        f"{STAMP} info started\n{STAMP} warning endpoint a is down\n"
        f"{STAMP} error server said:\n    {STAMP} info all is well\n    \\x1b[2J \\ud800\n"
    ), "foreign lines cannot pass for messages"


def test_repeated_messages_are_counted_not_written(tmp_path):
    log = opened(tmp_path / "run.log")
    for _ in range(123):
        log.warning("no answer")
        log.info("no answer")
    log.warning("once")
    log.close()
    log.close()
    lines = [line[25:] for line in (tmp_path / "run.log").read_text().splitlines()]
    assert [line for line in lines if line.startswith("warning")] == [
        "warning no answer",
        "warning no answer (10 times so far)",
        "warning no answer (100 times so far)",
        "warning once",
        "warning no answer (123 times)",
    ]


def test_distinct_messages_are_bounded_in_memory_and_in_the_file(tmp_path):
    path = tmp_path / "run.log"
    log = opened(path, max_bytes=20_000)
    for number in range(5000):
        log.info(f"message {number}")
    log.close()
    lines = path.read_text().splitlines()
    assert path.stat().st_size < 20_200
    assert lines[-1] == f"{STAMP} warning this log is full: later messages are left out"
    assert lines[-2].startswith(f"{STAMP} info message ")


@pytest.mark.parametrize(
    ("path", "why"),
    [("/proc/none/run.log", "No such file or directory"), ("/dev/full", os.strerror(28))],
)
def test_a_log_that_cannot_be_written_is_told_once_and_stops_nobody(path, why):
    told = []
    log = opened(Path(path), on_failure=told.append)
    log.info("one")
    log.info("two")
    log.close()
    assert told == [f"cannot write {path}: {why}; the run goes on"]
