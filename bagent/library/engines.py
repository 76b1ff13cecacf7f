"""Engines of the library: a run in a thread of this process, or in a process of its own.

Both take rows and give results as JSON lines through sockets or pipes, so neither side holds more
of them than their buffers and a short queue do. Rows, and the results of a thread, go through
sockets: these can be shut down while processes that the program forked meanwhile hold copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import msgspec

from bagent.errors import EXIT_NEEDS_PERSON, BagentError, UsageError, WriteError
from bagent.runs.shutdown import StopRequests

Event = dict[str, Any]
"""An event as of ``--progress json``."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHUNK = 1 << 16


class EngineEnd(NamedTuple):
    """How a run ended."""

    code: int
    """The exit code."""
    headline: str = ""
    """How it ended, one line."""
    path: Path | None = None
    """The run directory, where the run got so far."""
    error: BaseException | None = None
    """What ended it; None where rows were processed."""
    lines: Sequence[str] = ()
    """The closing lines of ``bagent run``."""


class Engine(Protocol):
    """A started run."""

    results: asyncio.StreamReader
    rows: asyncio.StreamWriter | None
    """Takes the rows; None where the job reads its own input."""

    def stop(self) -> None:
        """Stop after what is in flight; a second call does not wait for that."""

    async def wait(self) -> EngineEnd:
        """Return how the run ended, once it has."""


class ThreadEngine:
    """A run in a thread with an event loop of its own; made by :meth:`start`.

    It leaves signals, standard files and settings of this process alone.
    """

    def __init__(
        self,
        args: Sequence[str],
        on_event: Callable[[Event], None],
        rows: asyncio.StreamWriter | None,
        results: asyncio.StreamReader,
        to_close: Sequence[asyncio.StreamWriter],
    ) -> None:
        self.rows = rows
        self.results = results
        self._to_close = to_close
        self._args = args
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._requests = StopRequests()
        self._end: asyncio.Future[EngineEnd] = self._loop.create_future()

    @classmethod
    async def start(
        cls, args: Sequence[str], on_event: Callable[[Event], None], *, piped: bool
    ) -> ThreadEngine:
        """Start a run with the options of ``bagent run``.

        Args:
            args: the job file and the options.
            on_event: takes events on the running loop.
            piped: rows come through :attr:`rows`.
        """
        results, results_end, stdout = await _open_socket()
        rows, stdin = None, None
        if piped:
            _, rows, other_end = await _open_socket()
            stdin = _ReadEnd(other_end)
        to_close = [results_end] if rows is None else [results_end, rows]
        engine = cls(args, on_event, rows, results, to_close)
        threading.Thread(
            target=engine._work, args=(stdin, stdout), name="bagent-run", daemon=True
        ).start()
        return engine

    def stop(self) -> None:
        """Stop after what is in flight; a second call does not wait for that."""
        self._requests.request()

    async def wait(self) -> EngineEnd:
        """Return how the run ended, once it has."""
        end = await asyncio.shield(self._end)
        for writer in self._to_close:
            await _close(writer)
        return end

    def _work(self, stdin: _ReadEnd | None, stdout: socket.socket) -> None:
        try:
            end = self._run(cast("BinaryIO | None", stdin), stdout.fileno())
        except BagentError as error:
            end = EngineEnd(error.exit_code, error=error)
        except OSError as error:
            kind = WriteError if error.errno in _FULL else UsageError
            name = f"{error.filename}: " if error.filename else ""
            failure = kind(f"{name}{error.strerror or error}")
            failure.__cause__ = error
            end = EngineEnd(failure.exit_code, error=failure)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            end = EngineEnd(EXIT_NEEDS_PERSON, error=error)
        finally:
            with stdout, contextlib.suppress(OSError):  # the other end has gone
                stdout.shutdown(socket.SHUT_RDWR)
            if stdin is not None:
                stdin.close()
        self._call_soon(self._set_end, end)

    def _run(self, stdin: BinaryIO | None, stdout: int) -> EngineEnd:
        """Run the job in this thread."""
        from bagent.cli.app import parse_run_options
        from bagent.observe.progress import EventProgress
        from bagent.runs.context import prepare
        from bagent.runs.ending import display_path, summarize
        from bagent.runs.execute import RunHost, execute_run, with_metrics

        options = parse_run_options(self._args)
        context = prepare(options)
        progress = with_metrics(EventProgress(self._send_event, time.monotonic), options)
        ending = execute_run(context, RunHost(progress, stdin, stdout, self._requests))
        summary = summarize(context, ending)
        path = Path(display_path(context.run_dir, options.cwd))
        return EngineEnd(ending.code, summary.headline, path, lines=summary.lines)

    def _send_event(self, event: Event) -> None:
        self._call_soon(self._on_event, msgspec.to_builtins(event, str_keys=True))

    def _set_end(self, end: EngineEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)

    def _call_soon(self, function: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._loop.call_soon_threadsafe(function, value)


async def _open_socket() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]:
    """Return the streams of one end of a pair of sockets, and its other end."""
    this_end, other_end = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=this_end)
    return reader, writer, other_end


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a socket, and drop what nobody has read."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class _ReadEnd:
    """A socket as a standard input.

    The thread that reads rows may use the descriptor until this object is deleted, so its number
    stays taken until then; after :meth:`close` it reads nothing more.
    """

    def __init__(self, end: socket.socket) -> None:
        self._descriptor = end.detach()

    def close(self) -> None:
        with socket.socket(fileno=os.dup(self._descriptor)) as end, contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        return os.read(self._descriptor, size)


class ProcessEngine:
    """A run in a ``bagent run`` process; made by :meth:`start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        on_event: Callable[[Event], None],
        rows: asyncio.StreamWriter | None,
    ) -> None:
        assert process.stdout is not None
        self.results = process.stdout
        self.rows = rows
        self._process = process
        self._on_event = on_event
        self._messages: list[str] = []
        self._path: Path | None = None
        self._lines: list[str] = []
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, args: Sequence[str], on_event: Callable[[Event], None], *, piped: bool
    ) -> ProcessEngine:
        """Start a run; for the arguments see :meth:`ThreadEngine.start`."""
        rows, stdin = None, None
        if piped:
            _, rows, stdin = await _open_socket()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bagent", "run", *args, "--progress", "json"),
            stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin.fileno(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        if stdin is not None:
            stdin.close()
        return cls(process, on_event, rows)

    def stop(self) -> None:
        """Stop after what is in flight; a second call does not wait for that."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    async def wait(self) -> EngineEnd:
        """Return how the run ended, once it has."""
        code = await self._process.wait()
        await self._listening
        if self.rows is not None:
            await _close(self.rows)
        message = self._messages[-1] if self._messages else f"exit code {code}"
        message = message.removeprefix("bagent: error: ").removeprefix("bagent").strip()
        return EngineEnd(code, message, self._path, lines=self._lines)

    async def _listen(self) -> None:
        """Read the run's stderr: events as JSON lines, and error messages."""
        assert self._process.stderr is not None
        async for line in read_lines(self._process.stderr):
            try:
                event = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._messages.append(line.decode("utf-8", "replace").strip())
                continue
            if not isinstance(event, dict):
                continue
            if event.get("event") == "summary":
                self._path = Path(event["run"])
                self._messages.append(event["ending"])
                self._lines = event["lines"]
            else:
                self._on_event(event)


async def read_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length but one that was cut off; unread data stays in the pipe."""
    parts: list[bytes] = []
    while data := await reader.read(_CHUNK):
        head, *others = data.split(b"\n")
        parts.append(head)
        if others:
            yield b"".join(parts)
            for line in others[:-1]:
                yield line
            parts = [others[-1]]
