"""Running ``bagent`` as a user does, with a clean environment.

``run_bagent`` runs a command to its end, in this process unless the test has the marker
``process``. ``Running`` is a real process that a test can signal, kill or talk to through pipes;
only tests with that marker may start one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from support.fork_server import ForkedProcess
from support.in_process import READ_AT_START, run_in_process

Json = Any

KEPT = ("PATH", "PYTHONPATH", "TMPDIR", "SSL_CERT_FILE", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended: exit code (negative: the signal), output, seconds it took."""

    code: int
    out: str
    err: str
    seconds: float

    def lines(self) -> list[Json]:
        """Return stdout as JSON lines."""
        # Not splitlines: U+2028 and U+0085 may stand in JSON as they are.
        return [msgspec.json.decode(line) for line in self.out.split("\n") if line]


def clean_env(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment without proxies, keys, scheduler variables or a real home.

    Args:
        home: becomes ``HOME``; made where it is missing.
        extra: variables to add or replace.
    """
    home.mkdir(parents=True, exist_ok=True)
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= {"HOME": str(home), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "COLUMNS": "120"}
    return env | dict(extra or {})


class ProcessUse:
    """Whether the test that runs now may start processes; set by ``conftest.py``."""

    allowed = False


@contextmanager
def in_this_process() -> Iterator[None]:
    """Run commands in this process again, in a test that has the marker ``process``."""
    before, ProcessUse.allowed = ProcessUse.allowed, False
    try:
        yield
    finally:
        ProcessUse.allowed = before


class Running:
    """A ``bagent`` process that is going on; leaving the ``with`` block kills it.

    It is a fork of a program that has ``bagent`` imported, which starts in a tenth of the time.

    Args:
        args: the command line after ``bagent``.
        cwd: the current folder; ``HOME`` is ``.home`` in it.
        env: variables added to the clean environment; with some that only a new interpreter reads
            it is one.
        fresh: start a new interpreter, for tests of what it imports or shows in ``/proc``.
    """

    def __init__(
        self,
        args: Sequence[str | Path],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        assert ProcessUse.allowed, 'this test needs @pytest.mark.process("why")'
        self.started = time.monotonic()
        arguments, variables = [str(arg) for arg in args], clean_env(cwd / ".home", env)
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if fresh or any(name.startswith(READ_AT_START) for name in env or ()):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bagent", *arguments],
                cwd=cwd,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        else:
            self.process = ForkedProcess(arguments, cwd, variables)
        self._out: list[bytes] = []
        self._err: list[bytes] = []
        self._changed = threading.Condition()
        streams = ((self.process.stdout, self._out), (self.process.stderr, self._err))
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[bytes], into: list[bytes]) -> None:
        for line in stream:
            with self._changed:
                into.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def out(self) -> str:
        """Stdout so far."""
        return b"".join(self._out).decode("utf-8", "replace")

    @property
    def err(self) -> str:
        """Stderr so far."""
        return b"".join(self._err).decode("utf-8", "replace")

    def write(self, text: str) -> None:
        """Send ``text`` to stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def wait_for_out(self, text: str, timeout: float = 20.0) -> None:
        """Block until stdout has ``text``.

        Raises:
            AssertionError: it did not come within ``timeout`` seconds, or the process ended.
        """
        self._wait(lambda: text in self.out, f"stdout never had {text!r}", timeout)

    def wait_for_err(self, text: str, timeout: float = 20.0) -> None:
        """Block until stderr has ``text``; raises as :meth:`wait_for_out`."""
        self._wait(lambda: text in self.err, f"stderr never had {text!r}", timeout)

    def _wait(self, done: Callable[[], bool], words: str, timeout: float) -> None:
        def over() -> bool:
            return done() or not any(reader.is_alive() for reader in self._readers)

        with self._changed:
            self._changed.wait_for(over, timeout)
        assert done(), f"{words}\n{self.out}\n{self.err}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its children."""
        self.process.send_signal(number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children, as a terminal or a scheduler does."""
        os.killpg(self.process.pid, number)

    def finish(self, timeout: float = 60.0) -> Completed:
        """Wait for the end.

        Raises:
            AssertionError: it did not end within ``timeout`` seconds; it is killed then.
        """
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            words = f"not over after {timeout} s"
            output = f"stdout: {self.out[-2000:]}\nstderr: {self.err[-4000:]}"
            raise AssertionError(f"{words}\n{output}") from None
        seconds = time.monotonic() - self.started
        for reader in self._readers:
            reader.join(5)
        return Completed(self.process.returncode, self.out, self.err, seconds)

    def kill(self) -> None:
        """End the process and its children with SIGKILL, where they still run."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.kill()
        for reader in self._readers:
            reader.join(5)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):  # a pipe that the process closed before
                    stream.close()


def run_bagent(
    args: Sequence[str | Path],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
    timeout: float = 60.0,
    kill_at: Callable[[], object] | None = None,
) -> Completed:
    """Run ``bagent`` with ``args`` to its end, in this process unless the test may use another.

    Args:
        args: the command line after ``bagent``.
        cwd: the current folder; ``HOME`` is ``.home`` in it.
        env: variables added to the clean environment.
        stdin: what it reads; None is an empty stdin.
        timeout: seconds; past it the process is killed.
        kill_at: end the process with SIGKILL once this function returns
            (for example ``lambda: fs.wait_for(20)``).

    Raises:
        AssertionError: it took longer than ``timeout``.
    """
    if not ProcessUse.allowed:
        assert kill_at is None, 'this test needs @pytest.mark.process("why")'
        return run_here(args, cwd, env, stdin)
    data = stdin.encode() if isinstance(stdin, str) else stdin
    with Running(args, cwd, env) as running:
        feeder = threading.Thread(target=_feed, args=(running, data or b""), daemon=True)
        feeder.start()
        if kill_at is not None:
            kill_at()
            running.kill()
        feeder.join(timeout)
        return running.finish(timeout)


def run_here(
    args: Sequence[str | Path],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
) -> Completed:
    """Run ``bagent`` as :func:`run_bagent` does, in this process also where others are allowed.

    Raises:
        AssertionError: ``env`` has variables that only a new process reads.
    """
    early = [name for name in env or () if name.startswith(READ_AT_START)]
    assert not early, f"{early} needs @pytest.mark.process"
    data = stdin.encode() if isinstance(stdin, str) else stdin
    started = time.monotonic()
    words = [str(arg) for arg in args]
    code, out, err = run_in_process(words, cwd, clean_env(cwd / ".home", env), data)
    return Completed(code, out, err, time.monotonic() - started)


def _feed(running: Running, data: bytes) -> None:
    stdin = running.process.stdin
    assert stdin is not None
    try:
        stdin.write(data)
        stdin.close()
    except (BrokenPipeError, ValueError):  # it ended, or was killed, without reading all
        pass


def _env_of_site(folder: Path, code: str) -> dict[str, str]:
    """Return variables under which every Python process begins with ``code``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def no_locks_env(folder: Path, error: str = "ENOSYS") -> dict[str, str]:
    """Return variables under which ``fcntl.flock`` and ``lockf`` fail in every Python process.

    This is what a shared file system mounted without locks looks like.

    Args:
        folder: an empty folder to use.
        error: the name in ``errno``: ``ENOSYS`` or ``ENOLCK``.
    """
    code = f"""\
import errno, fcntl, os
def refuse(*args):
    raise OSError(errno.{error}, os.strerror(errno.{error}))
fcntl.flock = fcntl.lockf = refuse
"""
    return _env_of_site(folder, code)


def hanging_names_env(folder: Path, *, own_loop: bool = False) -> dict[str, str]:
    """An environment whose resolver hangs for minutes at names that begin with ``node``, as an
    unreachable one does.

    Args:
        folder: where what does that is written.
        own_loop: Python's own event loop is used, not uvloop.
    """
    code = f"""\
import socket, sys, time
if {own_loop}:
    sys.modules["uvloop"] = None
real = socket.getaddrinfo
def slow(host, *args, **more):
    if str(host).startswith("node"):
        time.sleep(600)
    return real(host, *args, **more)
socket.getaddrinfo = slow
"""
    return _env_of_site(folder, code)
