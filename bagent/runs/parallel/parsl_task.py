"""The task of a Parsl worker: one ``bagent`` process for a chunk, watched until its end.

A chunk is a part of the rows (``--shard I/N``) of a run directory that all nodes share. Its state
and its stop signals are small files beside Parsl's own, since workers cannot be reached directly.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from bagent.errors import EXIT_STOPPED
from bagent.files import write_atomic
from bagent.hpc.startup import wait_until_vacant
from bagent.observe import Snapshot
from bagent.runs.parallel.worker import decode_options
from bagent.runs.parallel.workers import Worker, handle_worker_line

POLL_SECONDS = 0.5
STATE_SECONDS = 1.0
MOST_NOTES = 20


class ChunkTask(msgspec.Struct, frozen=True):
    """One chunk for a worker."""

    options: bytes
    """Encoded by ``encode_options``."""
    run_dir: str
    part: str
    folder: str
    """The folder of the chunk's state and of the stop signals."""
    env: Mapping[str, str]
    """Defaults for the worker's environment."""


class ChunkState(msgspec.Struct):
    """The reported state of a chunk."""

    host: str
    state: Snapshot | None = None
    code: int | None = None
    """The exit code; None until the end."""
    reason: str = ""
    action: str = ""
    notes: list[str] = []


def state_path(folder: Path, part: str) -> Path:
    """Return the file with the :class:`ChunkState` of a started part."""
    return folder / f"{part}.json"


def signals_path(folder: Path) -> Path:
    """Return the file of signals for all chunks, one number a line; its presence stops new ones."""
    return folder / "signals"


def read_state(folder: Path, part: str) -> ChunkState | None:
    """Return the last reported state of a part; None where it was not started."""
    try:
        return msgspec.json.decode(state_path(folder, part).read_bytes(), type=ChunkState)
    except (OSError, msgspec.DecodeError):
        return None


def run_chunk(task: ChunkTask) -> bytes:
    """Run one chunk in a Parsl worker; return its :class:`ChunkState` as JSON."""
    folder = Path(task.folder)
    signals = _SignalFile(signals_path(folder))
    state = ChunkState(platform.node())
    if signals.new():
        state.code, state.reason = EXIT_STOPPED, "stopped before it was begun"
        return msgspec.json.encode(state)
    _write_state(folder, task.part, state)
    wait_until_vacant(Path(task.run_dir), task.part, signals.pending)
    worker = Worker(decode_options(task.options))
    _run(
        worker, task, signals, lambda: _write_state(folder, task.part, _chunk_state(worker, state))
    )
    return msgspec.json.encode(_chunk_state(worker, state))


def _run(
    worker: Worker, task: ChunkTask, signals: _SignalFile, write_state: Callable[[], None]
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "bagent.runs.parallel.worker"],
        cwd=worker.options.cwd,
        env={**task.env, **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # When its worker is killed its stdin ends, and it stops in good task.
        start_new_session=True,
    )
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.write(task.options)
        child.stdin.flush()
    reader = threading.Thread(target=_read, args=(child, worker), daemon=True)
    reader.start()
    written = 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.code = child.wait(POLL_SECONDS)
            break
        for number in signals.new():
            child.send_signal(number)
        if time.monotonic() - written >= STATE_SECONDS:
            written = time.monotonic()
            write_state()
    reader.join(10)
    with contextlib.suppress(OSError):
        child.stdin.close()


def _read(child: subprocess.Popen[bytes], worker: Worker) -> None:
    def note(text: str) -> None:
        if len(worker.notes) < MOST_NOTES:
            worker.notes.append(text)

    assert child.stderr is not None
    with child.stderr as lines:
        for line in lines:
            handle_worker_line(worker, line, note)


def _chunk_state(worker: Worker, state: ChunkState) -> ChunkState:
    return ChunkState(
        state.host, worker.state, worker.code, worker.reason, worker.action, list(worker.notes)
    )


def _write_state(folder: Path, part: str, state: ChunkState) -> None:
    """Write the chunk's file atomically; ignore write errors."""
    with contextlib.suppress(OSError):
        write_atomic(state_path(folder, part), msgspec.json.encode(state))


class _SignalFile:
    """The file of signals, of which each is handled once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handled = 0

    def new(self) -> list[signal.Signals]:
        """Return the signals since the last call."""
        new = self._all()[self._handled :]
        self._handled += len(new)
        return new

    def pending(self) -> bool:
        """Return whether there are signals that :meth:`new` has not returned yet."""
        return len(self._all()) > self._handled

    def _all(self) -> list[signal.Signals]:
        try:
            return [signal.Signals(int(number)) for number in self._path.read_text().split()]
        except (OSError, ValueError):
            return []
