"""Running ``bagent`` inside the test's own process, as a shell would run it.

A command gets its own standard files, environment, working directory, ``sys.argv``, signal
handlers and event loop, and gives all of them back. It costs about a tenth of a process.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import msgspec

from bagent.cli.app import main
from bagent.cli.process import report_fault
from bagent.duck import Access, connect
from bagent.runs import execute
from bagent.store import query
from bagent.store.run_dir import RunInfo
from bagent.store.tables import build, parquet
from bagent.store.tables.outputs import TableOutputs
from bagent.store.tables.parquet import MemoryLimits
from support.jumping_loop import ShiftedLoop

if TYPE_CHECKING:
    import pytest
    from duckdb import DuckDBPyConnection


class RunClock:
    """The clock of the next run in this process: that of its event loop.

    A test's thread skips time limits once everything else has happened, so that they may be long.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(execute, "_uvloop_factory", lambda: self._make_loop)

    def _make_loop(self) -> ShiftedLoop:
        self._loop = ShiftedLoop()
        return self._loop

    def skip(self, seconds: float) -> None:
        """Set the clock forward, and wait until what is due then has begun."""
        begun = threading.Event()

        def forward() -> None:
            self._loop.ahead += seconds
            self._loop.call_later(0, begun.set)

        self._loop.call_soon_threadsafe(forward)
        assert begun.wait(60)


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Do ``work`` in a thread beside the block; what it raises is raised at the end."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(work)
        yield
        future.result()


SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE,
)  # fmt: skip

READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "SSL_CERT_FILE")
"""Variables that the interpreter or the loader reads once; a test of them needs a process."""


def run_in_process(
    args: Sequence[str], cwd: Path, env: Mapping[str, str], stdin: bytes | None
) -> tuple[int, str, str]:
    """Run ``main(args)``; returns the exit code, stdout and stderr.

    Args:
        args: the command line after ``bagent``.
        cwd: the current folder of the command.
        env: its whole environment.
        stdin: what it reads from a pipe; None closes the pipe at once.
    """
    assert threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryFile())
        err = stack.enter_context(tempfile.TemporaryFile())
        stack.enter_context(_pipe_as_stdin(stdin or b""))
        stack.enter_context(_standard_file(1, out.fileno()))
        stack.enter_context(_standard_file(2, err.fileno()))
        stack.enter_context(_folder(cwd))
        stack.enter_context(mock.patch.dict(os.environ, dict(env), clear=True))
        stack.enter_context(mock.patch.object(sys, "argv", ["bagent", *args]))
        stack.enter_context(_signal_handlers())
        if _reads_tables(args):
            make_due_tables()
        code = _exit_code(list(args))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        return code, _text(out), _text(err)


def _exit_code(args: list[str]) -> int:
    """Return what the shell would see, also of a fault in the program."""
    try:
        return main(args)
    except Exception as error:
        if "--debug" in args:
            traceback.print_exc()
            return 1
        return report_fault(error)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode("utf-8", "replace"))


@contextlib.contextmanager
def _pipe_as_stdin(data: bytes) -> Iterator[None]:
    """Make the reading end of a pipe file descriptor 0; a thread writes ``data`` to it."""
    reader, writer = os.pipe()

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb") as pipe:
            pipe.write(data)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        with _standard_file(0, reader):
            os.close(reader)
            yield
    finally:  # descriptor 0 is closed now, so that the thread ends in any case
        feeder.join(10)


@contextlib.contextmanager
def _standard_file(number: int, descriptor: int) -> Iterator[None]:
    """Put ``descriptor`` in the place of a standard file, and its text stream into ``sys``."""
    name = ("stdin", "stdout", "stderr")[number]
    before = getattr(sys, name)
    if number and before is not None:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    saved = os.dup(number)
    os.dup2(descriptor, number)
    mode = "r" if number == 0 else "w"
    errors = "backslashreplace" if number == 2 else "surrogateescape"
    stream = os.fdopen(
        number, mode, 1 if number == 2 else -1, encoding="utf-8", errors=errors, closefd=False
    )
    setattr(sys, name, stream)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        setattr(sys, name, before)
        os.dup2(saved, number)
        os.close(saved)


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """Give signal handlers and the collector's settings back as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    thresholds, freezing = gc.get_threshold(), (gc.freeze, gc.unfreeze)
    try:
        # A run freezes what its process holds and melts it at its end; here that is the tests.
        gc.freeze = gc.unfreeze = lambda: None
        yield
    finally:
        gc.freeze, gc.unfreeze = freezing
        for number, handler in before.items():
            signal.signal(number, handler)
        gc.set_threshold(*thresholds)


def make_tables_here() -> None:
    """Make tables in this process from now on.

    A child spends more time on its imports than on the tables of a short run.
    """
    query.run_tables_child = _make_tables
    execute.TablesChild = TablesHere


class ParquetAlone(TableOutputs):
    """Tables without the DuckDB file, which takes half of the time and which no command reads."""

    def __init__(
        self, work: Path, limits: MemoryLimits, info: RunInfo, sources: Sequence[Path] = ()
    ) -> None:
        super().__init__(work, limits, msgspec.structs.replace(info, duckdb=False), sources)


@cache
def _open_duckdb() -> DuckDBPyConnection:
    """Open a DuckDB for all tables that are made here; opening one takes half of their time."""
    settings = {"threads": 1, "disabled_optimizers": "statistics_propagation"}
    return connect(Access(everything=True), settings=settings)


def _make_tables(arguments: list[str], rows: str = "") -> tuple[int, str]:
    with contextlib.ExitStack() as stack:
        err = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if not TablesHere.database:
            stack.enter_context(mock.patch.object(build, "TableOutputs", ParquetAlone))
            cursor = mock.Mock(side_effect=lambda *_, **__: _open_duckdb().cursor())
            stack.enter_context(mock.patch.object(parquet, "connect", cursor))
        code = build.main(arguments, rows.encode())
    return code, err.getvalue()


class TablesHere:
    """Has the interface of ``TablesChild``, without a child.

    Making tables takes half of a short run. They wait for a command that reads them, and most tests
    run none. Tests with the marker ``tables`` get them at the end of a run, as users do, and the
    DuckDB file too.
    """

    at_once = False
    due: ClassVar[dict[Path, str]] = {}
    """What to read the input again with, by run directory."""

    def __init__(self, run_dir: Path, rows: str = "") -> None:
        self._run_dir = run_dir.absolute()
        self._rows = rows

    def start(self) -> None:
        """Do nothing: there is no child to start."""

    def make(self) -> tuple[int, str]:
        """Make the tables, at once or later; returns the exit code and the messages."""
        if not self.at_once:
            self.due[self._run_dir] = self._rows
            return 0, ""
        code, output = _make_tables([str(self._run_dir)], self._rows)
        return code, output.strip()

    def close(self) -> None:
        """Do nothing: there is no child to end."""


def _reads_tables(args: Sequence[str]) -> bool:
    """Return whether a command may read tables; ``results`` without options reads the journal."""
    if args[:1] == ["results"]:
        return any(arg.startswith("-") for arg in args)
    return bool(args) and args[0] in ("query", "report", "view", "compare", "publish")


def make_due_tables() -> None:
    """Make the tables that wait for somebody who reads them."""
    while TablesHere.due:
        run_dir, rows = TablesHere.due.popitem()
        if run_dir.exists():
            _make_tables([str(run_dir)], rows)
