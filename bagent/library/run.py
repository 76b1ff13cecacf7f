"""Running of a job from another program; results are an iterator, with or without ``async``.

A ``bagent run`` process does the work, which keeps the caller's event loop, signals and memory
separate from it. As with ``bagent run``, finished rows are in the run directory, and the same call
resumes the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import msgspec

from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_OK,
    EXIT_ROWS_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    BagentError,
    NeedsPerson,
    StoppedEarly,
    UsageError,
    WriteError,
)
from bagent.files import PRIVATE, write_atomic
from bagent.library.open_run import Result

if TYPE_CHECKING:
    from bagent.job.spec.job import Job
    from bagent.library.row_values import Rows


@dataclass(frozen=True)
class LoadedJob:
    """A checked job."""

    path: Path
    sets: tuple[str, ...]
    """The ``dotted.key=value`` texts that were set."""
    spec: Job

    def __repr__(self) -> str:
        # All settings would fill the screen, and may hold keys.
        return f"<job {self.spec.name} of {self.path}>"


def load_job(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> LoadedJob:
    """Read and check a job file, as ``bagent run`` does before it sends anything.

    Args:
        path: the job file.
        sets: texts as of ``--set``, such as ``limits.concurrency=64``.

    Raises:
        bagent.errors.JobError: the first error, with file, line and column.
    """
    from bagent.job.load import JobRequest
    from bagent.job.load import load_job as load

    file = Path(path).absolute()
    request = JobRequest(
        path=file, sets=tuple(sets), env=dict(os.environ), cwd=Path.cwd(), needs_input=False
    )
    return LoadedJob(file, tuple(sets), load(request))


@contextmanager
def job_file(job: str | os.PathLike[str] | LoadedJob | Mapping[str, Any]) -> Iterator[Path]:
    """Yield the file of a job; a dict gets a file in the current folder during the run.

    Raises:
        UsageError: a job file cannot hold the dict, or the folder cannot be written.
    """
    if isinstance(job, LoadedJob):
        yield job.path
        return
    if not isinstance(job, Mapping):
        yield Path(job)
        return
    try:
        text = json.dumps({"name": "job", **job}, indent=1, default=os.fspath, ensure_ascii=False)
        text.encode()  # raises where UTF-8 cannot hold it
    except (TypeError, ValueError) as error:
        raise UsageError(f"the job cannot be written as a job file: {error}") from None
    # In this folder, since the paths of a job are relative to its file.
    path = Path(f".bagent-{secrets.token_hex(8)}.yaml")
    try:
        write_atomic(path, text, mode=PRIVATE)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"a job that is a dict needs a file in the current folder: {reason}",
            hint="write the job into a file, and give its path",
        ) from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


_T = TypeVar("_T")
_CHUNK = 1 << 16
_ERRORS: dict[int, type[BagentError]] = {
    EXIT_USAGE: UsageError,
    EXIT_CANNOT_WRITE: WriteError,
    EXIT_STOPPED: StoppedEarly,
}


def run(
    job: str | os.PathLike[str] | LoadedJob | Mapping[str, Any],
    *,
    rows: Rows | None = None,
    name: str | None = None,
    ordered: bool = False,
    options: Sequence[str] = (),
    on_progress: Callable[[dict[str, Any]], None] | Literal["show"] | None = None,
) -> Run:
    """Run a job, or resume it; iterate the result by ``async for`` or a plain ``for``.

    The run starts with the iteration. Use ``async with`` (or ``with``) where the loop may end
    early: the run then finishes the requests in flight and stops.

    Args:
        job: a job file, its keys and values as a dict (paths in it start from the current folder,
            and the run is called ``job`` unless it has a name), or what :func:`bagent.load_job`
            returned.
        rows: the input rows: dicts, or a pandas, polars or Arrow table, whose missing values
            (NaN, NaT, null) are fields that the row lacks; None reads the job's own input. Dates
            and times become ISO text, numpy scalars plain numbers, decimals their digits; a row
            with a value that JSON cannot hold becomes ``bad_input`` and names the column.
        name: the run's name under ``./runs``; None takes the job's.
        ordered: yield results in input order, else as they are finished.
        options: further options of ``bagent run``, such as ``["--limit", "100"]``.
        on_progress: called a few times a minute with the state of the run
            (:class:`bagent.observe.Snapshot` as a dict). ``"show"`` displays it: in a notebook as
            an updated line (no widgets needed), elsewhere as lines on standard error.
    """
    args = ["-o", "-", "--progress", "json"]
    for text in job.sets if isinstance(job, LoadedJob) else ():
        args += ["--set", text]
    if rows is not None:
        from bagent.library.row_values import check_rows

        check_rows(rows)
    args += ["-i", "-"] * (rows is not None)
    args += ["--name", name] if name is not None else []
    args += ["--ordered"] * ordered
    if on_progress == "show":
        from bagent.library.progress import make_progress

        on_progress = make_progress()
    return Run(job, [*args, *options], rows, on_progress)


class Run:
    """A run, see :func:`run`.

    ``exit_code`` and ``path`` (the run directory) are None until it has ended.

    Iterating raises:
        bagent.errors.BagentError: the run could not start, or stopped before its rows ended. The
            class follows from the exit code (:class:`UsageError` 2, :class:`WriteError` 74,
            :class:`StoppedEarly` 75, else :class:`NeedsPerson`). Failed rows are results.
    """

    def __init__(
        self,
        job: str | os.PathLike[str] | LoadedJob | Mapping[str, Any],
        args: Sequence[str],
        rows: Rows | None,
        on_progress: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.exit_code: int | None = None
        self.path: Path | None = None
        self._job = job
        self._args = args
        self._rows = rows
        self._on_progress = on_progress
        self._messages: list[str] = []
        self._iterator: AsyncIterator[Result] | None = None
        self._blocking: Generator[Result, None, None] | None = None

    def __aiter__(self) -> AsyncIterator[Result]:
        """Start the run and return its results; works once."""
        if self._iterator is not None:
            raise RuntimeError("the results of a run come once; open_run(...) reads them again")
        self._iterator = self._results()
        return self._iterator

    def __iter__(self) -> Iterator[Result]:
        """Start the run in a thread and return its results; works once.

        It works where an event loop runs already, such as in a notebook.
        """
        self._blocking = self._in_thread(self.__aiter__())
        return self._blocking

    def _in_thread(self, results: AsyncIterator[Result]) -> Generator[Result, None, None]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="bagent-run", daemon=True)
        thread.start()
        step: asyncio.Task[Result | None] | None = None

        async def next_result() -> Result | None:
            nonlocal step
            step = asyncio.ensure_future(anext(results, None))
            return await step

        async def stop() -> None:
            if step is not None and not step.done():  # interrupted while it waited
                step.cancel()
                await asyncio.wait([step])
            await self.__aexit__(None, None, None)

        try:
            while (result := _wait_for(next_result(), loop)) is not None:
                yield result
        finally:
            _wait_for(stop(), loop)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do the same as :meth:`__aexit__`, for a plain ``for`` loop."""
        if self._blocking is not None:
            self._blocking.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the run, if it still runs, and wait for its end."""
        close = getattr(self._iterator, "aclose", None)
        if close is not None:
            await close()

    async def _results(self) -> AsyncIterator[Result]:
        with job_file(self._job) as path:
            async with contextlib.aclosing(self._results_of(path)) as results:
                async for result in results:
                    yield result
        self._check(path)

    async def _results_of(self, job: Path) -> AsyncGenerator[Result, None]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bagent", "run", str(job), *self._args),
            stdin=asyncio.subprocess.PIPE if self._rows is not None else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        tasks = [asyncio.create_task(self._listen(process))]
        if self._rows is not None:
            tasks.append(asyncio.create_task(self._feed(process, self._rows)))
        try:
            assert process.stdout is not None
            decoder = msgspec.json.Decoder(Result)
            async for line in _lines(process.stdout):
                yield decoder.decode(line)
            await process.wait()
            await asyncio.gather(*tasks)
        finally:
            await self._end(process, tasks)

    async def _end(
        self, process: asyncio.subprocess.Process, tasks: list[asyncio.Task[None]]
    ) -> None:
        """Wait for the end of the process; ask it to stop where it still runs."""
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            for task in tasks[1:]:
                task.cancel()
            assert process.stdout is not None
            while await process.stdout.read(_CHUNK):
                pass  # a full pipe would block its end
        self.exit_code = await process.wait()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, process: asyncio.subprocess.Process, rows: Rows) -> None:
        from bagent.library.row_values import row_lines

        stdin = process.stdin
        assert stdin is not None
        try:
            async for line in row_lines(rows):
                stdin.write(line + b"\n")
                await stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            return  # the process has ended; _check raises the reason
        except BaseException:
            # Rows that fail must not look like the end of the rows.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            raise
        finally:
            stdin.close()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Read the run's stderr: events as JSON lines, and error messages."""
        assert process.stderr is not None
        async for line in _lines(process.stderr):
            try:
                event = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._messages.append(line.decode("utf-8", "replace").strip())
                continue
            kind = event.pop("event", None) if isinstance(event, dict) else None
            if kind == "summary":
                self.path = Path(event["run"])
                self._messages += [event["ending"]]
            elif kind in ("progress", "end") and self._on_progress is not None:
                self._on_progress(event)

    def _check(self, job: Path) -> None:
        code = self.exit_code
        if code in (EXIT_OK, EXIT_ROWS_FAILED):
            return
        message = (
            self._messages[-1] if self._messages else f"bagent run ended with exit code {code}"
        )
        message = message.removeprefix("bagent: error: ").removeprefix("bagent").strip()
        if isinstance(self._job, Mapping):  # its file was temporary
            message = message.replace(str(job), "job")
        raise _ERRORS.get(code or 0, NeedsPerson)(message)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length; unread data stays in the pipe."""
    parts: list[bytes] = []
    while data := await reader.read(_CHUNK):
        head, *others = data.split(b"\n")
        parts.append(head)
        if others:
            yield b"".join(parts)
            for line in others[:-1]:
                yield line
            parts = [others[-1]]
    if last := b"".join(parts):
        yield last


def _wait_for(step: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
    return asyncio.run_coroutine_threadsafe(step, loop).result()
