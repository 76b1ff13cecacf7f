"""``bagent`` processes that begin with all modules imported: forks of a program without threads.

A start costs a tenth of that of a new interpreter. The fork has its own session, standard files,
environment, folder and ``sys.argv``, and ends as any interpreter does.
``/proc/PID/cmdline`` and ``/proc/PID/environ`` show the program, not the command.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

MODULES = (
    "uvloop", "bagent.agents.agent_loop", "bagent.cli.app", "bagent.cli.commands.check",
    "bagent.cli.commands.run", "bagent.cli.help", "bagent.cli.render.tables", "bagent.check.report",
    "bagent.hpc.schedulers", "bagent.runs.agents_setup", "bagent.runs.hostfile_reload",
    "bagent.runs.parallel.worker", "bagent.runs.parallel.workers", "bagent.runs.build",
    "bagent.sim.server", "bagent.stages.embed", "bagent.stages.expand", "bagent.stages.map",
    "bagent.stages.pipeline", "bagent.stages.sql", "bagent.tools.executor",
)  # fmt: skip
"""Imported before the first fork: what most commands need."""


A_JOB = Path(__file__).resolve().parents[2] / "jobs/sentiment/job.yaml"


class Command(msgspec.Struct):
    """A command to start; its standard files and a pipe for its end come beside it."""

    args: list[str]
    cwd: str
    env: dict[str, str]


class ForkedProcess:
    """A command that a fork runs; with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, args: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        self._stderr, stderr = os.pipe()
        self._end, end = os.pipe()
        passed = [stdin, stdout, stderr, end]
        try:
            self.pid = _server().start(Command(list(args), str(cwd), dict(env)), passed)
        finally:
            for descriptor in passed:
                os.close(descriptor)
        self.returncode: int | None = None
        self.stdin = os.fdopen(self._stdin, "wb")
        self.stdout = os.fdopen(self._stdout, "rb")
        self.stderr = os.fdopen(self._stderr, "rb")

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; negative: the signal.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than ``timeout`` seconds.
        """
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("bagent", timeout or 0)
            status = os.read(self._end, 4)
            os.close(self._end)
            self.returncode = os.waitstatus_to_exitcode(struct.unpack("i", status)[0])
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            # It may end after the question, and is then gone: the server reaps it.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The program that forks, and the socket to it."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        self._turn = threading.Lock()
        names = ("PATH", "PYTHONPATH", "VIRTUAL_ENV")
        variables = {name: os.environ[name] for name in names if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(other.fileno())],
            env=variables | {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"},
            # Pipes, as the commands get them: Python's streams look only once at what they are.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        other.close()
        atexit.register(self._close)

    def start(self, command: Command, descriptors: list[int]) -> int:
        """Start a command and return its process id.

        Args:
            descriptors: stdin, stdout, stderr, and a pipe that gets the exit status.
        """
        message = msgspec.json.encode(command)
        with self._turn:
            socket.send_fds(self._socket, [struct.pack("i", len(message))], descriptors)
            self._socket.sendall(message)
            return int(struct.unpack("i", self._socket.recv(4, socket.MSG_WAITALL))[0])

    def _close(self) -> None:
        self._socket.close()
        self._process.communicate(timeout=10)


@cache
def _server() -> ForkServer:
    return ForkServer()


def _wait_for_command(control: socket.socket) -> Command | None:
    """Fork for every command that ``control`` brings; returns it in the fork, None at the end."""
    ends: dict[int, int] = {}
    woken, wake = os.pipe2(os.O_NONBLOCK)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _report_ends(ends)
        if control not in ready:
            continue
        size, descriptors, *_ = socket.recv_fds(control, 4, 4)
        if not size:
            return None
        message = control.recv(struct.unpack("i", size)[0], socket.MSG_WAITALL)
        begun, begin = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(begun)
            os.close(begin)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            for number, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, number)
            for descriptor in (*descriptors, *ends.values(), woken, wake):
                os.close(descriptor)
            control.close()
            return msgspec.json.decode(message, type=Command)
        os.close(begin)
        os.read(begun, 1)  # until the fork leads a process group, which a test may signal at once
        os.close(begun)
        ends[pid] = descriptors.pop()
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(struct.pack("i", pid))


def _report_ends(ends: dict[int, int]) -> None:
    """Write the exit status of every fork that ended to its pipe, and forget it."""
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        end = ends.pop(pid)
        with suppress(BrokenPipeError):
            os.write(end, struct.pack("i", status))
        os.close(end)


def _run(command: Command) -> None:
    """Become the command, as ``python -m bagent`` would."""
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.env)
    time.tzset()
    sys.path.insert(0, command.cwd)
    sys.argv = ["bagent", *command.args]
    runpy.run_module("bagent", run_name="__main__", alter_sys=True)


def _main(control: socket.socket) -> None:
    del sys.path[0]  # the folder of this file
    for name in MODULES:
        importlib.import_module(name)
    loader = importlib.import_module("bagent.job.load")
    loader.load_job(loader.JobRequest(A_JOB))  # pydantic builds its validators at the first one
    gc.collect()
    gc.freeze()
    command = _wait_for_command(control)
    if command is not None:
        _run(command)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
