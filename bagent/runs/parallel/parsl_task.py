"""What a Parsl worker does with a chunk: one process of ``bagent`` for it, watched until its end.

A chunk is a part of the rows (``--shard I/N``) of a run directory that all nodes share. What tells
how far it is, and what tells it to stop, are small files beside Parsl's own: they go through where
a worker cannot be spoken to.
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
from bagent.hpc.wait_for_owner import wait_until_vacant
from bagent.observe import Snapshot
from bagent.runs.parallel.worker import decode_options
from bagent.runs.parallel.workers import Worker, handle_worker_line

LOOK_SECONDS = 0.5
STATE_SECONDS = 1.0
MOST_NOTES = 20


class ChunkTask(msgspec.Struct, frozen=True):
    """One chunk for a worker.

    ``options`` are those of ``encode_options``; ``run_dir`` and ``part``
    name what it owns; ``folder`` is where its state and the stop signals are; ``env`` is added to
    the worker's environment where that has nothing of the name.
    """

    options: bytes
    run_dir: str
    part: str
    folder: str
    env: Mapping[str, str]


class ChunkState(msgspec.Struct):
    """How a chunk does: where it runs, what it last told. ``code`` is None until its end."""

    host: str
    state: Snapshot | None = None
    code: int | None = None
    reason: str = ""
    action: str = ""
    notes: list[str] = []


def state_path(folder: Path, part: str) -> Path:
    """The file with the :class:`ChunkState` of a part that was begun."""
    return folder / f"{part}.json"


def signals_path(folder: Path) -> Path:
    """The file of signals for all chunks: a number a line; nothing begins once it is there."""
    return folder / "signals"


def read_state(folder: Path, part: str) -> ChunkState | None:
    """What the worker last told of a part; None where it was not begun."""
    try:
        return msgspec.json.decode(state_path(folder, part).read_bytes(), type=ChunkState)
    except (OSError, msgspec.DecodeError):
        return None


def run_chunk(order: ChunkTask) -> bytes:
    """Do one chunk; returns its :class:`ChunkState` as JSON. Called by a Parsl worker."""
    folder = Path(order.folder)
    seen = _Signals(signals_path(folder))
    state = ChunkState(platform.node())
    if seen.new():
        state.code, state.reason = EXIT_STOPPED, "stopped before it was begun"
        return msgspec.json.encode(state)
    _tell(folder, order.part, state)
    wait_until_vacant(Path(order.run_dir), order.part, seen.waiting)
    worker = Worker(decode_options(order.options))
    _run(worker, order, seen, lambda: _tell(folder, order.part, _of(worker, state)))
    return msgspec.json.encode(_of(worker, state))


def _run(worker: Worker, order: ChunkTask, seen: _Signals, tell: Callable[[], None]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "bagent.runs.parallel.worker"],
        cwd=worker.options.cwd,
        env={**order.env, **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # When its worker is killed its stdin ends, and it stops in good order.
        start_new_session=True,
    )
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.write(order.options)
        child.stdin.flush()
    reader = threading.Thread(target=_read, args=(child, worker), daemon=True)
    reader.start()
    told = 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.code = child.wait(LOOK_SECONDS)
            break
        for number in seen.new():
            child.send_signal(number)
        if time.monotonic() - told >= STATE_SECONDS:
            told = time.monotonic()
            tell()
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


def _of(worker: Worker, state: ChunkState) -> ChunkState:
    return ChunkState(
        state.host, worker.state, worker.code, worker.reason, worker.action, list(worker.notes)
    )


def _tell(folder: Path, part: str, state: ChunkState) -> None:
    """Write the chunk's file, whole or not at all; a disk that refuses stops nothing."""
    with contextlib.suppress(OSError):
        write_atomic(state_path(folder, part), msgspec.json.encode(state))


class _Signals:
    """The signals in the file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0

    def new(self) -> list[signal.Signals]:
        """Those that came since the last call."""
        found = self._all()[self._seen :]
        self._seen += len(found)
        return found

    def waiting(self) -> bool:
        """Whether there are some that :meth:`new` has not given yet."""
        return len(self._all()) > self._seen

    def _all(self) -> list[signal.Signals]:
        try:
            return [signal.Signals(int(word)) for word in self._path.read_text().split()]
        except (OSError, ValueError):
            return []
