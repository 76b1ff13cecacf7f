"""Start-up in a batch job: wait for a lost owner's lock and for engines, add late ones, report."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagent.errors import EXIT_NEEDS_PERSON, EXIT_STOPPED
from bagent.files import write_atomic
from bagent.hpc.engines import EngineState, read_states
from bagent.store.lock import STALE_SECONDS, is_live, owners

LOOK_SECONDS = 2.0
"""How often the engines' files are read."""

LATE_SECONDS = 600.0
"""Duration of one wait for late engines."""

TAIL_LINES = 15
MAX_LOGS = 3


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The folder of one batch job."""

    path: Path

    @property
    def hosts(self) -> Path:
        """The hostfile of all engines."""
        return self.path / "hosts.txt"

    @property
    def ready(self) -> Path:
        """The hostfile of those that answered."""
        return self.path / "ready.txt"

    @property
    def engines(self) -> Path:
        """The folder of the engines' states and logs."""
        return self.path / "engines"

    def states(self) -> list[EngineState]:
        """Return the state of each engine."""
        return list(read_states(self.engines))

    def failed(self) -> list[EngineState]:
        """Return the engines that failed for good."""
        return [state for state in self.states() if state.state == "failed"]


def lines_of(path: Path) -> list[str]:
    """Return the lines of a hostfile, none if it does not exist."""
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        return []


def cannot_reach_minimum(hosts: int, failed: int, min_fraction: float) -> bool:
    """Return whether too many of ``hosts`` engines failed to reach ``min_fraction``."""
    return hosts - failed < max(1, math.ceil(min_fraction * hosts - 1e-9))


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not, unlike for ``kill(pid, 0)``.

    See proc(5), field 3.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in (b"Z", b"X", b"x")


def await_engines(
    child: subprocess.Popen[bytes],
    reason: Callable[[], str],
    pause: float = LOOK_SECONDS,
) -> int:
    """Return the exit code of ``child``, or 76 once there is a ``reason`` to end it.

    Args:
        child: waits for the engines.
        reason: returns why waiting is pointless, else an empty text.
        pause: seconds between calls of it.
    """
    while True:
        try:
            return child.wait(pause)
        except subprocess.TimeoutExpired:
            message = reason()
        if message:
            child.terminate()
            child.wait()
            sys.stderr.write(f"{message}\n")
            return EXIT_NEEDS_PERSON


def wait_step(argv: list[str]) -> int:
    """Wait until enough engines answer a real request, or no longer can."""
    parser = argparse.ArgumentParser(prog="bagent.hpc wait")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--min-fraction", type=float, required=True)
    parser.add_argument("--timeout", required=True, help="a duration")
    parser.add_argument("--launcher", type=int, required=True, help="its process id")
    args = parser.parse_args(argv)
    folder = JobFolder(args.folder)
    hosts = len(lines_of(folder.hosts))

    def reason() -> str:
        failed = folder.failed()
        if cannot_reach_minimum(hosts, len(failed), args.min_fraction):
            return (
                f"{len(failed)} of {hosts} engines failed, {args.min_fraction:g} of all are needed"
            )
        if not is_alive(args.launcher):
            return f"what runs the engines has ended: {tail(folder.path / 'launcher.log')}"
        return ""

    options = ["--min-fraction", f"{args.min_fraction:g}", "--timeout", args.timeout]
    with _hosts(folder.hosts, folder.ready, options) as child:
        code = await_engines(child, reason)
    if code:
        _show_logs(folder)
    return EXIT_STOPPED if code < 0 else code


def late_step(argv: list[str]) -> int:
    """Add late engines to the ready ones until all are ready or have failed.

    A run follows its hostfile, so they join it.
    """
    parser = argparse.ArgumentParser(prog="bagent.hpc late")
    parser.add_argument("folder", type=Path)
    folder = JobFolder(parser.parse_args(argv).folder)
    missing, answered = folder.path / "late.txt", folder.path / "late-ready.txt"
    while True:
        ready = lines_of(folder.ready)
        lines = still_missing(lines_of(folder.hosts), ready, folder.failed())
        if not lines:
            return 0
        write_atomic(missing, *(f"{line}\n" for line in lines))
        answered.unlink(missing_ok=True)
        options = ["--min-hosts", "1", "--timeout", f"{LATE_SECONDS:g}s"]
        with _hosts(missing, answered, options) as child:
            code = child.wait()
        if code not in (0, EXIT_STOPPED):
            return max(0, code)
        new = (line for line in lines_of(answered) if line not in ready)
        write_atomic(folder.ready, *(f"{line}\n" for line in (*ready, *new)))


def still_missing(
    hosts: Sequence[str], ready: Sequence[str], failed: Sequence[EngineState]
) -> list[str]:
    """Return the lines of the engines that have not answered and have not failed."""
    gone = {(state.node, str(state.port)) for state in failed}
    have = set(ready)
    return [line for line in hosts if line not in have and _node_and_port(line) not in gone]


def _node_and_port(line: str) -> tuple[str, str]:
    """Return node and port of a line ``HOST<TAB>PORT<TAB>tags``."""
    fields = line.split()
    node = next((field[5:] for field in fields if field.startswith("node=")), fields[0])
    return node, fields[1]


def engines_step(argv: list[str]) -> int:
    """Print the start-up statistics, and the end of the logs of failed engines."""
    parser = argparse.ArgumentParser(prog="bagent.hpc engines")
    parser.add_argument("folder", type=Path)
    folder = JobFolder(parser.parse_args(argv).folder)
    staged = {path.name: path for path in (folder.path / "staged").glob("*")}
    lines = report(folder.states(), {name: tail(path) for name, path in staged.items()})
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    _show_logs(folder)
    return 0


def report(states: Sequence[EngineState], staged: dict[str, str]) -> Iterator[str]:
    """Yield the start-up statistics: a line for each engine, then a summary."""
    yield f"{'engine':24} {'port':>6} {'state':10} {'starts':>6} {'staged s':>9} {'start s':>8}"
    for engine in states:
        took = "" if engine.start_seconds is None else f"{engine.start_seconds:.1f}"
        yield (
            f"{engine.name:24} {engine.port:6d} {engine.state:10} {engine.starts:6d}"
            f" {staged.get(engine.node, ''):>9} {took:>8}"
        )
    times = sorted(s for engine in states if (s := engine.start_seconds) is not None)
    if times:
        median = times[len(times) // 2]
        yield (
            f"{len(times)} of {len(states)} engines started, in {times[0]:.1f} s at least,"
            f" {median:.1f} s in the middle, {times[-1]:.1f} s at most"
        )
    restarts = sum(max(0, engine.starts - 1) for engine in states)
    if restarts:
        yield f"{restarts} restarts"


def tail(path: Path, lines: int = 1) -> str:
    """Return the last lines of a file, empty if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _show_logs(folder: JobFolder) -> None:
    failed = folder.failed()
    for state in failed[:MAX_LOGS]:
        log = folder.engines / f"{state.name}.log"
        sys.stderr.write(f"--- {log}, exit code {state.exit_code}\n{tail(log, TAIL_LINES)}\n")
    if len(failed) > MAX_LOGS:
        sys.stderr.write(f"--- and {len(failed) - MAX_LOGS} more failed: {folder.engines}\n")


@contextlib.contextmanager
def _hosts(source: Path, write: Path, options: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``bagent hosts --wait``; the block has to wait for its end.

    A stop signal terminates it, also one that comes while it starts; the process then exits with 75
    after the block.
    """
    command = [sys.executable, "-m", "bagent", "hosts", str(source), "--wait", *options]
    child: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        if child is not None:
            child.terminate()

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        child = subprocess.Popen([*command, "--write", str(write)], stdout=subprocess.DEVNULL)
        if stopped:
            child.terminate()
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped:
        raise SystemExit(EXIT_STOPPED)


LOCK_POLL_SECONDS = 0.5
VACANT_SECONDS = 2 * STALE_SECONDS
"""Twice the time after which a dead owner is recognised."""


def wait_until_vacant(
    run_dir: Path, part: str | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Wait while a live process owns ``part`` (None: any part) of a run; return False if it stays.

    On another host a dead owner looks like a slow one until its file is stale.

    Args:
        run_dir: the run directory; there may be none yet.
        part: ``all`` or like ``1-of-4``.
        stop: ends the wait early.
    """
    end = time.monotonic() + VACANT_SECONDS
    notified = False
    while True:
        records = [owner for name, owner in owners(run_dir).items() if part in (None, name)]
        live = [record for record in records if is_live(record, time.time())]
        if not live:
            return True
        if time.monotonic() >= end or stop():
            return False
        if not notified:
            notified = True
            where = f"process {live[0].pid} on {live[0].host}"
            sys.stderr.write(f"waiting for {where}, or until it is seen to be gone\n")
        time.sleep(LOCK_POLL_SECONDS)


def vacant_step(argv: list[str]) -> int:
    """Wait for an earlier start of this job. Return 0: ``bagent run`` reports other owners."""
    parser = argparse.ArgumentParser(prog="bagent.hpc vacant")
    parser.add_argument("run_dir", type=Path)
    wait_until_vacant(parser.parse_args(argv).run_dir)
    return 0
