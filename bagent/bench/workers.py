"""The workers of a load test: this process alone, or several that send their parts together."""

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
"""So long before a stage starts all workers know of it: they collect garbage meanwhile."""

END_SECONDS = 10.0
"""So long workers get to write their rows out."""

TELL_SECONDS = 0.5
"""Between two words of a worker about its progress."""


class WorkerCommand(msgspec.Struct, frozen=True):
    """What a worker is to do next: a stage from ``start_at`` on (test's clock), or to stop."""

    stage: LoadStage | None = None
    start_at: float = 0.0


class LoadWorkerProgress(msgspec.Struct, frozen=True):
    """What a worker tells: how its part goes, and whether it is over."""

    part: WorkerShare
    over: bool = False


class Workers(Protocol):
    """Sends stages."""

    @property
    def parts(self) -> Sequence[WorkerShare]:
        """How the running stage goes, by worker."""
        ...

    async def run(self, stage: LoadStage) -> list[WorkerShare]:
        """Send one stage to its end."""
        ...

    def stop(self) -> None:
        """End the running stage early; what is in flight is given up."""
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
        self._load = LoadGenerator(config, transport)

    @property
    def parts(self) -> Sequence[WorkerShare]:
        """How the running stage goes."""
        return [self._load.part]

    async def run(self, stage: LoadStage) -> list[WorkerShare]:
        """Send one stage to its end."""
        return [await self._load.run(stage, self._load.now() + START_SECONDS)]

    def stop(self) -> None:
        """End the running stage early."""
        self._load.stopping.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._load.close()


class ProcessWorkers:
    """``config.workers`` processes of this host; they share its monotonic clock."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._processes: list[asyncio.subprocess.Process] = []
        self._parts: list[WorkerShare] = [WorkerShare(0, 0, 0)] * config.workers

    @property
    def parts(self) -> Sequence[WorkerShare]:
        """How the running stage goes, by worker."""
        return self._parts

    async def __aenter__(self) -> Self:
        for number in range(self._config.workers):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "bagent.bench.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the parent's to pass on
            )
            self._processes.append(process)
            config = msgspec.structs.replace(self._config, worker=number)
            self._say(process, msgspec.json.encode(config))
        return self

    async def run(self, stage: LoadStage) -> list[WorkerShare]:
        """Send one stage to its end."""
        now = time.monotonic() - self._config.origin
        order = WorkerCommand(stage, now + START_SECONDS)
        for process in self._processes:
            self._say(process, msgspec.json.encode(order))
        self._parts = [WorkerShare(now, now, now)] * len(self._processes)
        heard = [self._hear(number, process) for number, process in enumerate(self._processes)]
        return list(await asyncio.gather(*heard))

    async def _hear(self, number: int, process: asyncio.subprocess.Process) -> WorkerShare:
        """Listen to a worker until its part is over."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            word = msgspec.json.decode(line, type=LoadWorkerProgress)
            self._parts[number] = word.part
            if word.over:
                return word.part
        if await process.wait() == EXIT_CANNOT_WRITE:
            raise WriteError(f"worker {number + 1} could not write its rows: see above")
        raise NeedsPerson(
            f"worker {number + 1} of {len(self._processes)} ended in the middle of a stage",
            hint="its words are above; rows written so far are kept",
        )

    def stop(self) -> None:
        """End the running stage early."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def _say(self, process: asyncio.subprocess.Process, line: bytes) -> None:
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


def cores() -> int:
    """How many cores this process may use."""
    found = getattr(os, "sched_getaffinity", None)
    return len(found(0)) if found else os.cpu_count() or 1
