"""The workers of a load test: this process alone, or several processes that send together.

A process of its own is ``python -m bagent.bench.workers``. Its stdin has a line with
:class:`~bagent.bench.plan.LoadConfig`, then one with :class:`WorkerCommand` for each stage. It
writes lines of :class:`LoadWorkerProgress` to stdout, the first once it may be signalled, and ends
with its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

from bagent.backends.http.client import Transport
from bagent.backends.http.resolver import ResolverLoop
from bagent.bench.load_generator import LoadGenerator, WorkerShare
from bagent.bench.plan import LoadConfig
from bagent.bench.schedule import LoadStage
from bagent.errors import EXIT_CANNOT_WRITE, EXIT_OK, BagentError, NeedsPerson, WriteError

START_SECONDS = 0.25
"""Notice of a stage before its start; workers collect garbage meanwhile."""

END_SECONDS = 10.0
"""Time for workers to write their rows."""

PROGRESS_SECONDS = 0.5
"""Time between two progress reports of a worker."""


class WorkerCommand(msgspec.Struct, frozen=True):
    """The next stage of a worker, from ``start_at`` on (test's clock), or the end."""

    stage: LoadStage | None = None
    start_at: float = 0.0


class LoadWorkerProgress(msgspec.Struct, frozen=True):
    """Progress of a worker's share."""

    share: WorkerShare
    done: bool = False


class Workers(Protocol):
    """Sends stages."""

    @property
    def shares(self) -> Sequence[WorkerShare]:
        """Return the progress of the running stage by worker."""
        ...

    async def run(self, stage: LoadStage) -> list[WorkerShare]:
        """Send one stage to its end."""
        ...

    def stop(self) -> None:
        """End the running stage early; requests in flight are given up."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class InProcessWorkers:
    """This process is the only worker."""

    def __init__(self, config: LoadConfig, transport: Transport) -> None:
        self._generator = LoadGenerator(config, transport)

    @property
    def shares(self) -> Sequence[WorkerShare]:
        """Return the progress of the running stage."""
        return [self._generator.share]

    async def run(self, stage: LoadStage) -> list[WorkerShare]:
        """Send one stage to its end."""
        return [await self._generator.run(stage, self._generator.now() + START_SECONDS)]

    def stop(self) -> None:
        """End the running stage early."""
        self._generator.stopping.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._generator.close()


class ProcessWorkers:
    """Processes of this host (``config.workers`` of them), which share its monotonic clock."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._processes: list[asyncio.subprocess.Process] = []
        self._parts: list[WorkerShare] = [WorkerShare(0, 0, 0)] * config.workers

    @property
    def shares(self) -> Sequence[WorkerShare]:
        """Return the progress of the running stage by worker."""
        return self._parts

    async def __aenter__(self) -> Self:
        for number in range(self._config.workers):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "bagent.bench.workers",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # the parent forwards Ctrl-C
            )
            self._processes.append(process)
            config = msgspec.structs.replace(self._config, worker=number)
            self._send(process, msgspec.json.encode(config))
        for process in self._processes:
            assert process.stdout is not None
            await process.stdout.readline()  # before it, SIGTERM would end the process
        return self

    async def run(self, stage: LoadStage) -> list[WorkerShare]:
        """Send one stage to its end."""
        now = time.monotonic() - self._config.origin
        command = WorkerCommand(stage, now + START_SECONDS)
        for process in self._processes:
            self._send(process, msgspec.json.encode(command))
        self._parts = [WorkerShare(now, now, now)] * len(self._processes)
        progress = [
            self._wait_for_share(number, process) for number, process in enumerate(self._processes)
        ]
        return list(await asyncio.gather(*progress))

    async def _wait_for_share(
        self, number: int, process: asyncio.subprocess.Process
    ) -> WorkerShare:
        """Read the progress of a worker until its share is done."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            progress = msgspec.json.decode(line, type=LoadWorkerProgress)
            self._parts[number] = progress.share
            if progress.done:
                return progress.share
        if await process.wait() == EXIT_CANNOT_WRITE:
            raise WriteError(
                f"worker {number + 1} could not write its rows: see above",
                hint="make room, or name another folder with -o DIR",
            )
        raise NeedsPerson(
            f"worker {number + 1} of {len(self._processes)} ended in the middle of a stage",
            hint="its messages are above; rows written so far are kept",
        )

    def stop(self) -> None:
        """End the running stage early."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def _send(self, process: asyncio.subprocess.Process, line: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(line + b"\n")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                async with asyncio.timeout(END_SECONDS if error is None else 0.1):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def available_cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


LINE_LIMIT = 1 << 30
"""Bytes of the longest line: the first one holds the bodies of a job."""


async def work() -> None:
    """Send this worker's share of all stages that stdin names."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    first = await reader.readline()
    if not first:
        return
    transport = Transport()
    generator = LoadGenerator(msgspec.json.decode(first, type=LoadConfig), transport)
    loop.add_signal_handler(signal.SIGTERM, generator.stopping.set)
    gc.freeze()
    _write(LoadWorkerProgress(generator.share))  # from now on a signal ends the stage alone
    try:
        while line := await reader.readline():
            command = msgspec.json.decode(line, type=WorkerCommand)
            if command.stage is None:
                break
            reporting = asyncio.ensure_future(_report(generator))
            try:
                share = await generator.run(command.stage, command.start_at)
            finally:
                reporting.cancel()
            _write(LoadWorkerProgress(share, done=True))
    finally:
        generator.close()
        await transport.close()


async def _report(generator: LoadGenerator) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        _write(LoadWorkerProgress(generator.share))


def _write(progress: LoadWorkerProgress) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(progress) + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    """Run the worker; return the exit code."""
    try:
        with asyncio.Runner(loop_factory=ResolverLoop) as runner:
            runner.run(work())
    except BagentError as error:
        sys.stderr.write(f"worker: {error}\n")
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
