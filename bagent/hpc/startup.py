"""The start of a fleet: wait until enough engines answer, take late ones in, tell how it went."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagent.errors import EXIT_NEEDS_PERSON, EXIT_STOPPED
from bagent.files import write_atomic
from bagent.hpc.engines import EngineState, read_states

LOOK_SECONDS = 2.0
"""How often the engines' files are looked at."""

LATE_SECONDS = 600.0
"""How long late engines are waited for at a time."""

TAIL_LINES = 15
SHOWN_LOGS = 3


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The folder of one batch job, which ``bagent submit``'s script makes."""

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
        """What became of each engine."""
        return list(read_states(self.engines))

    def failed(self) -> list[EngineState]:
        """The engines that died too often."""
        return [state for state in self.states() if state.state == "failed"]


def lines_of(path: Path) -> list[str]:
    """The lines of a hostfile; none where it is not there."""
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        return []


def cannot_reach_minimum(hosts: int, failed: int, min_fraction: float) -> bool:
    """Whether too many engines of ``hosts`` have failed for ``min_fraction`` to be reached."""
    return hosts - failed < max(1, math.ceil(min_fraction * hosts - 1e-9))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and is not fetched yet does not.

    ``kill(pid, 0)`` would take it for alive (proc(5), field 3).
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
    """The exit code of ``child``, which waits for the engines; 76 once there is a ``reason``.

    Args:
        reason: why waiting makes no sense any more, in words; empty while it does.
        pause: seconds between looks.
    """
    while True:
        try:
            return child.wait(pause)
        except subprocess.TimeoutExpired:
            words = reason()
        if words:
            child.terminate()
            child.wait()
            sys.stderr.write(f"{words}\n")
            return EXIT_NEEDS_PERSON


def wait_step(argv: list[str]) -> int:
    """Wait until enough engines answer a real request, and no longer than that makes sense."""
    parser = argparse.ArgumentParser(prog="bagent.hpc wait")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--min-fraction", type=float, required=True)
    parser.add_argument("--timeout", required=True, help="a duration")
    parser.add_argument("--launcher", type=int, required=True, help="its process id")
    given = parser.parse_args(argv)
    folder = JobFolder(given.folder)
    hosts = len(lines_of(folder.hosts))

    def reason() -> str:
        failed = folder.failed()
        if cannot_reach_minimum(hosts, len(failed), given.min_fraction):
            return (
                f"{len(failed)} of {hosts} engines failed, {given.min_fraction:g} of all are needed"
            )
        if not is_alive(given.launcher):
            return f"what runs the engines has ended: {tail(folder.path / 'launcher.log')}"
        return ""

    options = ["--min-fraction", f"{given.min_fraction:g}", "--timeout", given.timeout]
    child = _hosts(folder.hosts, folder.ready, options)
    with _stopping(child):
        code = await_engines(child, reason)
    if code:
        _show_logs(folder)
    return EXIT_STOPPED if code < 0 else code


def late_step(argv: list[str]) -> int:
    """Add engines to the ready ones as they come, until all are there or cannot come any more.

    A run follows its hostfile, so they join it.
    """
    parser = argparse.ArgumentParser(prog="bagent.hpc late")
    parser.add_argument("folder", type=Path)
    folder = JobFolder(parser.parse_args(argv).folder)
    missing, found = folder.path / "late.txt", folder.path / "late-ready.txt"
    while True:
        ready = lines_of(folder.ready)
        left = still_missing(lines_of(folder.hosts), ready, folder.failed())
        if not left:
            return 0
        write_atomic(missing, *(f"{line}\n" for line in left))
        found.unlink(missing_ok=True)
        child = _hosts(missing, found, ["--min-hosts", "1", "--timeout", f"{LATE_SECONDS:g}s"])
        with _stopping(child):
            code = child.wait()
        if code not in (0, EXIT_STOPPED):
            return max(0, code)
        new = (line for line in lines_of(found) if line not in ready)
        write_atomic(folder.ready, *(f"{line}\n" for line in (*ready, *new)))


def still_missing(
    hosts: Sequence[str], ready: Sequence[str], failed: Sequence[EngineState]
) -> list[str]:
    """The lines of the engines that have not answered and may yet do so."""
    gone = {(state.node, str(state.port)) for state in failed}
    have = set(ready)
    return [line for line in hosts if line not in have and _place(line) not in gone]


def _place(line: str) -> tuple[str, str]:
    """Node and port of a line of the script's hostfile: ``HOST<TAB>PORT<TAB>tags``."""
    words = line.split()
    node = next((word[5:] for word in words if word.startswith("node=")), words[0])
    return node, words[1]


def engines_step(argv: list[str]) -> int:
    """Print how the engines started, and the end of the logs of those that failed."""
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
    """The start-up statistics: a line an engine, and lines for all."""
    yield f"{'engine':24} {'port':>6} {'state':10} {'starts':>6} {'staged s':>9} {'start s':>8}"
    for one in states:
        took = "" if one.start_seconds is None else f"{one.start_seconds:.1f}"
        yield (
            f"{one.name:24} {one.port:6d} {one.state:10} {one.starts:6d}"
            f" {staged.get(one.node, ''):>9} {took:>8}"
        )
    times = sorted(s for one in states if (s := one.start_seconds) is not None)
    if times:
        middle = times[len(times) // 2]
        yield (
            f"{len(times)} of {len(states)} engines started, in {times[0]:.1f} s at least,"
            f" {middle:.1f} s in the middle, {times[-1]:.1f} s at most"
        )
    again = sum(max(0, one.starts - 1) for one in states)
    if again:
        yield f"{again} restarts"


def tail(path: Path, lines: int = 1) -> str:
    """The last lines of a file; empty where it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _show_logs(folder: JobFolder) -> None:
    failed = folder.failed()
    for state in failed[:SHOWN_LOGS]:
        log = folder.engines / f"{state.name}.log"
        words = f"--- {log}, exit code {state.exit_code}\n{tail(log, TAIL_LINES)}\n"
        sys.stderr.write(words)
    if len(failed) > SHOWN_LOGS:
        sys.stderr.write(f"--- and {len(failed) - SHOWN_LOGS} more failed: {folder.engines}\n")


def _hosts(source: Path, write: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bagent", "hosts", str(source), "--wait", *options]
    return subprocess.Popen([*command, "--write", str(write)], stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def _stopping(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """A signal that asks to stop ends the child, and this process with 75."""

    def stop(number: int, frame: object) -> None:
        child.terminate()
        child.wait()
        raise SystemExit(EXIT_STOPPED)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
