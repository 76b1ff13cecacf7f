"""A whole load test: hostfile in, raw rows, summary and report out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.backends.names import NamesLoop
from bagent.backends.openai_http import OpenAIBackend
from bagent.backends.proof import Prover
from bagent.backends.transport import Transport
from bagent.bench.config import Material
from bagent.bench.plan import BenchPlan
from bagent.bench.prompts import AnswerPlan
from bagent.bench.session import Course, Session
from bagent.bench.trace import Recorded
from bagent.errors import StoppedEarly, UsageError, WriteError
from bagent.files import make_private
from bagent.fleet.called import Called, counts, grouped
from bagent.fleet.roll_call import RollCall, RollCallPlan
from bagent.observe.words import counted
from bagent.runs.endpoints import Servers
from bagent.runs.stop import raise_file_limit

if TYPE_CHECKING:
    from bagent.backends.endpoint import Endpoint
    from bagent.bench.config import JobBody
    from bagent.runs.prepare import Prepared

CALL_SECONDS = 30.0
"""How long endpoints have to answer a first request."""

MOST_AT_ONCE = 2048
SUMMARY, PAGE, ENDPOINTS, LOADS = "summary.json", "report.html", "endpoints.csv", "loads.csv"
_TOLD = 5


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be tested, and where the results go.

    Attributes:
        model: only endpoints that serve it get load; None is any.
        servers: the server that ``--backend`` names, in place of a fleet; else None.
        trace: the recorded load that the plan replays.
        command: the command line, for the summary.
    """

    plan: BenchPlan
    endpoints: Sequence[Endpoint]
    folder: Path
    model: str | None = None
    servers: Servers | None = None
    trace: list[Recorded] = []
    command: str = ""


def make_folder(folder: Path) -> None:
    """Make the folder for the results.

    Raises:
        UsageError: it holds another load test, or is a file.
        WriteError: it cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder}: this is a file", hint="name a folder")
    if folder.is_dir() and any(folder.glob("*.jsonl")):
        raise UsageError(f"{folder} holds another load test", hint="name another with -o DIR")
    try:
        make_private(folder)
    except OSError as error:
        raise WriteError(f"cannot make {folder}: {error.strerror or error}") from None


def send_all(
    wanted: Wanted, job: Prepared | None, tell: Callable[[str], None]
) -> tuple[list[Called], Course]:
    """Call the endpoints and send the load to those that are ready.

    The first Ctrl-C, or SIGTERM, ends the load; what was measured by then is kept. A second
    Ctrl-C is a KeyboardInterrupt.

    Raises:
        StoppedEarly: a signal came before anything was sent.
    """
    try:
        with asyncio.Runner(loop_factory=NamesLoop) as runner:
            return runner.run(_send_all(wanted, job, tell))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _send_all(
    wanted: Wanted, job: Prepared | None, tell: Callable[[str], None]
) -> tuple[list[Called], Course]:
    switch = _Switch(tell)
    try:
        called = await switch.or_stop(_call(wanted, tell))
        if job is None and not wanted.trace:
            _check_context(wanted.plan, called, tell)
        bodies: list[JobBody] = []
        if job is not None and any(one.ready for one in called):
            from bagent.bench.jobs import job_bodies

            bodies = await asyncio.to_thread(job_bodies, job, called)
            tell(f"{len(bodies)} rows of the job are sent in turn")
        material = Material(bodies, _fitting(wanted.trace, called, tell))
        session = Session(wanted.plan, called, wanted.folder, material, tell)
        switch.session = session
        if switch.stopped:
            session.stop()
        return called, await session.run()
    finally:
        switch.close()


def _check_context(plan: BenchPlan, called: Sequence[Called], tell: Callable[[str], None]) -> None:
    """Refuse a load of which no ready endpoint could answer anything, and say where it is some.

    Raises:
        UsageError: prompts and answers fit no context.
    """
    answer = AnswerPlan(plan.output_tokens, plan.as_json).most
    asked = plan.input_tokens + answer + (plan.turns - 1) * (plan.turn_tokens + answer)
    ready = [one for one in called if one.ready]
    contexts = [one.known.context if one.known else None for one in ready]
    short = [length for length in contexts if length and length < asked]
    if not short:
        return
    words = f"prompts and answers of {asked:,} tokens do not fit"
    if len(short) == len(ready):
        raise UsageError(
            f"{words} {max(short):,} tokens of context",
            hint="less --input-tokens, --output-tokens or --turns",
        )
    tell(f"{words} the context of {counted(len(short), 'endpoint')}: all requests fail there")


def _fitting(
    trace: Sequence[Recorded], called: Sequence[Called], tell: Callable[[str], None]
) -> list[Recorded]:
    """The recorded requests that the shortest context of the ready endpoints holds."""
    known = [one.known.context for one in called if one.ready and one.known]
    context = min((length for length in known if length), default=None)
    if context is None:
        return list(trace)
    found = [one for one in trace if one.input_tokens + one.output_tokens <= context]
    if len(found) < len(trace):
        if not found:
            raise UsageError(f"--replay: no recorded request fits {context:,} tokens of context")
        words = f"{len(trace) - len(found)} of {len(trace)} recorded requests"
        tell(f"{words} are left out: they do not fit {context} tokens of context")
    return found


class _Switch:
    """Ends a load test early at the first signal, and at once at the second Ctrl-C."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tell = tell
        self._task = asyncio.current_task()
        self._asked = asyncio.Event()
        self.session: Session | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._signalled, number)

    @property
    def stopped(self) -> bool:
        """Whether a signal came."""
        return self._asked.is_set()

    def _signalled(self, number: signal.Signals) -> None:
        if self.stopped and number == signal.SIGINT and self._task is not None:
            self._task.cancel()
            return
        self._asked.set()
        if self.session is not None:
            self._tell(
                f"got {number.name}: no further requests; the report is made of what there is"
            )
            self.session.stop()

    async def or_stop(self, calling: Any) -> list[Called]:
        """The endpoints as they were found, unless a signal comes first."""
        work = asyncio.ensure_future(calling)
        stop = asyncio.ensure_future(self._asked.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait([work])
            raise StoppedEarly("stopped by a signal before any load was sent")
        found: list[Called] = work.result()
        return found

    def close(self) -> None:
        """Give the signals back."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


async def _call(wanted: Wanted, tell: Callable[[str], None]) -> list[Called]:
    if wanted.servers is not None:
        from bagent.runs.one_call import call_one

        called = [await call_one(wanted.servers, wanted.model, CALL_SECONDS)]
    else:
        called = await _call_fleet(wanted, tell)
    tell(counts(called))
    for group in grouped(called)[:_TOLD]:
        tell(f"  {group.words()}")
    return called


async def _call_fleet(wanted: Wanted, tell: Callable[[str], None]) -> list[Called]:
    count = len(wanted.endpoints)
    calls = max(wanted.plan.concurrency, default=64) * count
    room = raise_file_limit(max(2 * count, calls))
    if room < calls:
        tell(f"this machine allows {room} open connections, fewer than {calls} calls in flight")
    plan = RollCallPlan(CALL_SECONDS, min(MOST_AT_ONCE, count), count, wanted.model)
    transport = Transport()
    try:
        backend = OpenAIBackend(transport)
        return await RollCall(wanted.endpoints, plan, transport, Prover(backend)).run()
    finally:
        await transport.close()


def write_results(
    wanted: Wanted,
    called: Sequence[Called],
    course: Course,
    old: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Make all results from the raw rows in the folder; returns the summary.

    Raises:
        WriteError: the disk is full, or the folder cannot be written.
    """
    from bagent.bench import measure
    from bagent.bench.page import page
    from bagent.bench.summary import summarise
    from bagent.bench.tables import Tables, write_csv

    folder = wanted.folder
    with Tables(folder) as tables:
        summary = summarise(tables, wanted.plan, course, called, wanted.command)
        heat = measure.heat(tables)
        tables.write_parquet()
    write_csv(folder / ENDPOINTS, [_flat(one) for one in summary["endpoints"]])
    loads = summary["loads"]
    columns = dict.fromkeys(name for one in loads for name in one)
    write_csv(folder / LOADS, [_flat({**dict.fromkeys(columns), **one}) for one in loads])
    try:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=1)
        (folder / SUMMARY).write_bytes(text + b"\n")
        (folder / PAGE).write_text(page(summary, heat, old), encoding="utf-8")
    except OSError as error:
        raise WriteError(f"cannot write to {folder}: {error.strerror or error}") from None
    return summary


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose lists and objects are JSON texts."""
    return {
        key: msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value
        for key, value in row.items()
    }
