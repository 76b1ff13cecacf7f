"""The workers of a load test: this process alone, or several processes that send together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

from bagent.backends.http.client import Transport
from bagent.bench.load_generator import LoadGenerator, WorkerShare
from bagent.bench.plan import LoadConfig
from bagent.bench.schedule import LoadStage
from bagent.errors import EXIT_CANNOT_WRITE, NeedsPerson, WriteError

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
                "bagent.bench.worker",
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
