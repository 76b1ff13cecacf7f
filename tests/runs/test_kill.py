"""A run that is killed at any instant goes on, and nothing is lost, doubled or changed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from support.cli import clean_env
from support.fake_server import FakeProcess
from support.jobs import write_job
from support.replies import canned, slow

ROWS = 60
IN_FLIGHT = 8
RUNS_PER_TEST = 10
COMMAND = [sys.executable, "-m", "bagent", "run", "job.yaml", "--progress", "none"]


def set_up(folder: Path, url: str) -> None:
    write_job(
        folder,
        url,
        ROWS,
        limits={"concurrency": IN_FLIGHT},
        results={"duckdb": False, "parquet": False},
    )


def row_lines(folder: Path) -> list[dict]:
    """The lines of finished rows in the journal."""
    files = sorted((folder / "runs/job/journal").glob("rows-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def answers(folder: Path) -> dict[str, str]:
    """Text by id, of a journal in which each id must stand exactly once as ok."""
    found: dict[str, str] = {}
    for line in row_lines(folder):
        assert line["status"] == "ok", line
        assert line["id"] not in found, f"{line['id']} is there twice"
        found[line["id"]] = line["text"]
    return found


def run_until_done(folder: Path, number: signal.Signals, random: Random) -> tuple[int, list[int]]:
    """Start the command again and again, disturbing it, until it ends with 0."""
    kills, codes = 0, []
    for _ in range(30):
        child = subprocess.Popen(
            COMMAND, cwd=folder, env=clean_env(folder), stderr=subprocess.DEVNULL
        )
        # Every other start is left a little longer, so that each disturbed run gets on.
        wait = random.uniform(0.05, 1.4) + 0.2 * kills
        try:
            code = child.wait(timeout=wait)
        except subprocess.TimeoutExpired:
            child.send_signal(number)
            code = child.wait(timeout=20)
            kills += 1
        codes.append(code)
        if code == 0:
            return kills, codes
    raise AssertionError(f"not done after 30 starts: {codes}")


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    with FakeProcess(folder, {"*": [slow(0.03, canned())]}) as server:
        set_up(folder, server.url)
        subprocess.run(COMMAND, cwd=folder, env=clean_env(folder), check=True)
    found = answers(folder)
    assert len(found) == ROWS
    return found


def disturb(tmp_path: Path, undisturbed: dict[str, str], number: signal.Signals, seed: int) -> None:
    random = Random(seed)
    for run in range(RUNS_PER_TEST):
        folder = tmp_path / f"{seed}-{run}"
        folder.mkdir()
        with FakeProcess(folder, {"*": [slow(0.03, canned())]}) as server:
            set_up(folder, server.url)
            kills, codes = run_until_done(folder, number, random)
            assert answers(folder) == undisturbed
            # Requests of a killed client may still be in the server when it is asked.
            requests = len(server.requests())
        assert requests <= ROWS + IN_FLIGHT * kills, (requests, kills)
        if number == signal.SIGTERM:
            assert set(codes) <= {0, 75, -signal.SIGTERM}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_rows_survive_sigkill_at_random_instants(tmp_path, undisturbed, seed):
    disturb(tmp_path, undisturbed, signal.SIGKILL, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4, 20))
def test_rows_survive_sigkill_at_many_more_instants(tmp_path, undisturbed, seed):
    disturb(tmp_path, undisturbed, signal.SIGKILL, seed)


@pytest.mark.timeout(300)
def test_rows_survive_sigterm_at_random_instants(tmp_path, undisturbed):
    disturb(tmp_path, undisturbed, signal.SIGTERM, 100)


def test_sigterm_keeps_what_ends_within_the_grace_time(tmp_path):
    with FakeProcess(tmp_path, {"*": [slow(1.0, canned())]}) as server:
        set_up(tmp_path, server.url)
        child = subprocess.Popen(COMMAND, cwd=tmp_path, env=clean_env(tmp_path))
        deadline = time.monotonic() + 20
        # From the first end on others are in flight, however slow the machine is.
        while time.monotonic() < deadline and not server.requests():
            time.sleep(0.02)
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=20) == 75
        finished = len(row_lines(tmp_path))
        requests = server.requests()
    assert finished >= IN_FLIGHT
    assert len(requests) == finished, "a request that ended within the grace time was lost"
    info = json.loads((tmp_path / "runs/job/run.json").read_text())
    assert info["starts"][-1]["exit_code"] == 75
