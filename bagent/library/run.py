"""Running of a job from another program; results are an iterator, with or without ``async``.

A thread with an event loop of its own does the work, or a process (``process=True``). As with
``bagent run``, finished rows are in the run directory, and the same call resumes the run.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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
from bagent.library.arguments import (
    JobText,
    Rows,
    ShortTraceback,
    check_options,
    check_progress,
    in_python,
    job_text,
    use_python_words,
)
from bagent.library.engines import Engine, EngineEnd, ProcessEngine, ThreadEngine, read_lines
from bagent.library.open_run import Result

if TYPE_CHECKING:
    from bagent.job.spec.job import Job


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


@ShortTraceback()
def load_job(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> LoadedJob:
    """Read and check a job file, as ``bagent run`` does before it sends anything.

    Args:
        path: the job file.
        sets: texts as of ``--set``, such as ``limits.concurrency=64``.

    Raises:
        bagent.errors.JobError: the first error, with file, line and column.
        bagent.errors.UsageError: it is no path.
    """
    _check_path(path, "load_job takes a path", "run({...}) takes a job that is a dict")
    from bagent.job.load import JobRequest
    from bagent.job.load import load_job as load

    file = Path(path).absolute()
    request = JobRequest(
        path=file, sets=tuple(sets), env=dict(os.environ), cwd=Path.cwd(), needs_input=False
    )
    return LoadedJob(file, tuple(sets), load(request))


def _check_path(path: Any, rule: str, hint: str) -> None:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{rule}, not a value of type {type(path).__name__}", hint=hint)


_T = TypeVar("_T")

logger = logging.getLogger("bagent")
"""Takes the messages that ``bagent run`` shows to people; the program chooses what it does."""

_open_loops: weakref.WeakSet[Generator[Result, None, None]] = weakref.WeakSet()
"""The plain loops over results; most have ended."""

_ERRORS: dict[int, type[BagentError]] = {
    EXIT_USAGE: UsageError,
    EXIT_CANNOT_WRITE: WriteError,
    EXIT_STOPPED: StoppedEarly,
}


@ShortTraceback()
def run(
    job: str | os.PathLike[str] | LoadedJob | Mapping[str, Any],
    *,
    rows: Rows | None = None,
    name: str | None = None,
    ordered: bool = False,
    options: Sequence[str] = (),
    on_progress: Callable[[dict[str, Any]], None] | Literal["show"] | None = None,
    process: bool = False,
) -> Run:
    """Run a job, or resume it; iterate the result by ``async for`` or a plain ``for``.

    The run starts with the iteration::

        with run(job, rows=rows) as results:
            for result in results:
                print(result.id, result.output)

    When the block, or a plain ``for``, ends early, the run finishes the requests in flight and
    stops; use ``async with`` where an ``async for`` may end early. Ctrl-C and the cancellation of
    the task that iterates stop the run too; a second Ctrl-C does not wait for the requests. The
    iteration raises the errors of :class:`Run`; failed rows are results.

    Args:
        job: a job file, its keys and values as a dict (paths in it start from the current folder,
            and the run is called ``job`` unless it has a name), or what :func:`bagent.load_job`
            returned.
        rows: the input of this call, as if it were a file: only these rows are sent and yielded,
            finished ones from the run. Dicts, or a pandas, polars or Arrow table, whose missing
            values (NaN, NaT, null) are fields that the row lacks; None reads the job's own input.
            ``id`` of the job is the field or column that names the rows. Dates
            and times become ISO text, numpy scalars plain numbers, decimals their digits; a value
            that JSON cannot hold is left out, and the row is ``bad_input`` where the job uses it.
        name: the run's name under ``./runs``; None takes the job's.
        ordered: yield results in input order, else as they are finished.
        options: further options of ``bagent run``, such as ``["--limit", "100"]``.
        on_progress: called a few times a minute with the state of the run
            (:class:`bagent.observe.Snapshot` as a dict). ``"show"`` displays it: in a notebook as
            an updated line (no widgets needed), elsewhere as lines on standard error.
        process: run in a process of its own, which shares neither memory nor the interpreter's
            lock with this one, keeps its keys from programs that tools start, and starts later.

    Raises:
        bagent.errors.UsageError: an argument is none of these.
    """
    if not isinstance(job, LoadedJob | Mapping):
        _check_path(job, "a job is a path or a dict", 'run("job.yaml"), or run({"backend": ...})')
    further = check_options(options)
    check_progress(on_progress)
    args = ["-o", "-", *_input_options(rows)]
    for text in job.sets if isinstance(job, LoadedJob) else ():
        args += ["--set", text]
    args += ["--name", name] if name is not None else []
    args += ["--ordered"] * ordered
    if on_progress == "show":
        from bagent.library.progress import make_progress

        on_progress = make_progress()
    return Run(job, [*args, *further], rows, on_progress, process=process)


def _input_options(rows: Rows | None) -> list[str]:
    """Return the options of ``bagent run`` for checked rows."""
    if rows is None:
        return ["--python", "job"]
    from bagent.library.row_values import check_rows

    check_rows(rows)
    count = f":{len(rows)}" if isinstance(rows, Sized) else ""
    return ["-i", "-", "--python", f"rows{count}"]


class Run:
    """A run, see :func:`run`.

    Iterating raises:
        bagent.errors.BagentError: the run could not start, or stopped before its rows ended:
            :class:`UsageError` (exit code 2), :class:`WriteError` (74), :class:`StoppedEarly`
            (75), else :class:`NeedsPerson`. Failed rows are results.
    """

    def __init__(
        self,
        job: str | os.PathLike[str] | LoadedJob | Mapping[str, Any],
        args: Sequence[str],
        rows: Rows | None,
        on_progress: Callable[[dict[str, Any]], None] | None,
        *,
        process: bool = False,
    ) -> None:
        self._end: EngineEnd | None = None
        self._job = job
        self._args = args
        self._rows = rows
        self._on_progress = on_progress
        self._engine_type = ProcessEngine if process else ThreadEngine
        self._short_traceback = ShortTraceback(debug="--debug" in args)
        self._engine: Engine | None = None
        self._stopping = False
        self._fault: BaseException | None = None
        self._last_state: dict[str, Any] = {}
        self._iterator: AsyncIterator[Result] | None = None
        self._blocking: Callable[[], Generator[Result, None, None] | None] = lambda: None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the run; None until it has ended."""
        return None if self._end is None else self._end.code

    @property
    def path(self) -> Path | None:
        """The run directory; None until the run has ended."""
        return None if self._end is None else self._end.path

    def __repr__(self) -> str:
        if self._end is not None:
            where = "" if self._end.path is None else f" {self._end.path}"
            reason = in_python(self._end.headline) or str(self._end.error)
            return f"<run{where}: {reason}>"
        return "<run, which the iteration starts>" if self._engine is None else "<run at work>"

    def __str__(self) -> str:
        """Return the closing lines of ``bagent run``, once the run has ended."""
        lines = self._end.lines if self._end is not None else ()
        return "\n".join(map(in_python, lines)) or repr(self)

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
        results = self._in_thread(self.__aiter__())
        # Only the loop holds it, so that it is closed when the loop is left, also by an exception.
        self._blocking = weakref.ref(results)
        _open_loops.add(results)
        return results

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
            await self.__aexit__()

        try:
            while True:
                with self._short_traceback:
                    result = _wait_for(next_result(), loop)
                if result is None:
                    break
                yield result
        finally:
            ending = asyncio.run_coroutine_threadsafe(stop(), loop)
            try:
                ending.result()
            except KeyboardInterrupt:
                if self._engine is not None:
                    self._engine.stop()
                ending.result()
                raise
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do the same as :meth:`__aexit__`, for a plain ``for`` loop."""
        results = self._blocking()
        if results is not None:
            results.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the run, if it still runs, and wait for its end."""
        close = getattr(self._iterator, "aclose", None)
        if close is not None:
            await close()

    async def _results(self) -> AsyncIterator[Result]:
        """Yield the results; raise why there are no more, where rows remain."""
        # One generator: the end of an event loop closes all that are open at the same time.
        self._suggest_id()
        with self._short_traceback, _job_path(self._job) as (path, job_text):
            self._engine = engine = await self._engine_type.start(
                [str(path), *self._args], self._on_event, piped=self._rows is not None
            )
            feeding: asyncio.Task[None] | None = None
            if self._rows is not None:
                feeding = asyncio.create_task(self._feed(engine, self._rows))
            running = True
            try:
                decoder = msgspec.json.Decoder(Result)
                async for line in read_lines(engine.results):
                    yield decoder.decode(line)
                running = False
            finally:
                end = await self._finish(engine, feeding, running=running)
            if feeding is not None and not feeding.cancelled():
                feeding.result()
            self._raise_error(end, job_text)

    def _suggest_id(self) -> None:
        """Say which column would name the rows, where the job names none."""
        if self._rows is None:
            return
        from bagent.library.row_values import id_column

        column = id_column(self._rows)
        if column is None or any(arg.startswith(("id=", "--set=id=")) for arg in self._args):
            return
        with contextlib.suppress(BagentError):  # the run says what is wrong with the job
            if self._job_id() is None:
                logger.warning(
                    "rows are named by their content; `id: %s` names them by that column", column
                )

    def _job_id(self) -> str | None:
        if isinstance(self._job, Mapping):
            name: str | None = self._job.get("id")
            return name
        job = self._job if isinstance(self._job, LoadedJob) else load_job(self._job)
        return job.spec.id

    async def _finish(
        self, engine: Engine, feeding: asyncio.Task[None] | None, *, running: bool
    ) -> EngineEnd:
        """Wait for the end of the run; ask it to stop where it still runs."""
        if running:
            self._stopping = True
            engine.stop()
            if feeding is not None:
                feeding.cancel()
            while await engine.results.read(1 << 16):
                pass  # a full pipe would block its end
        end = await engine.wait()
        self._end = end
        if feeding is not None:
            feeding.cancel()  # the run needed no more rows
            await asyncio.wait([feeding])
        return end

    async def _feed(self, engine: Engine, rows: Rows) -> None:
        from bagent.library.row_values import row_lines

        assert engine.rows is not None
        try:
            async for line in row_lines(rows):
                engine.rows.write(line + b"\n")
                await engine.rows.drain()
        except (BrokenPipeError, ConnectionResetError):
            return  # the run has ended
        except BaseException:
            # Rows that fail must not look like the end of the rows. A second stop would hurry.
            if not self._stopping:
                engine.stop()
            raise
        finally:
            if not engine.rows.is_closing():  # else the run has ended
                with contextlib.suppress(OSError):
                    engine.rows.write_eof()

    def _on_event(self, event: dict[str, Any]) -> None:
        """Pass the state on and log messages; an error of the function is raised at the end."""
        kind = event.pop("event", None)
        if kind == "note":
            level = logging.WARNING if event["level"] == "warning" else logging.INFO
            logger.log(level, in_python(event["text"]))
        if kind not in ("progress", "end") or self._on_progress is None:
            return
        if kind == "end" and event == self._last_state:
            return
        self._last_state = dict(event)
        try:
            self._on_progress(event)
        except Exception as error:  # noqa: BLE001 - the iteration raises it
            self._on_progress, self._fault = None, error

    def _raise_error(self, end: EngineEnd, job_text: JobText | None) -> None:
        if end.code not in (EXIT_OK, EXIT_ROWS_FAILED):
            error = end.error or _ERRORS.get(end.code, NeedsPerson)(end.headline)
            if isinstance(error, BagentError):
                if job_text is not None:
                    job_text.hide_file(error)
                use_python_words(error)
            raise error
        if self._fault is not None:
            raise self._fault


@contextmanager
def _job_path(
    job: str | os.PathLike[str] | LoadedJob | Mapping[str, Any],
) -> Iterator[tuple[Path, JobText | None]]:
    """Yield the file of a job; of a dict, also what it holds."""
    if isinstance(job, Mapping):
        with job_text(job) as text:
            yield text.path, text
    else:
        yield job.path if isinstance(job, LoadedJob) else Path(job), None


@atexit.register
def _stop_runs() -> None:
    """Let runs finish what is in flight before the interpreter ends their threads."""
    for loop in list(_open_loops):
        with contextlib.suppress(ValueError):  # another thread is in it
            loop.close()


def _wait_for(step: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
    return asyncio.run_coroutine_threadsafe(step, loop).result()
