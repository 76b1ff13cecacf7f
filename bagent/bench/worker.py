"""One worker of a load test as a process: ``python -m bagent.bench.worker``.

Its stdin has a line with :class:`~bagent.bench.plan.LoadConfig`, then one with
:class:`~bagent.bench.workers.WorkerCommand` for each stage. It writes lines of
:class:`~bagent.bench.workers.LoadWorkerProgress` to stdout, the first once it may be signalled, and
ends with its stdin.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys

import msgspec

from bagent.backends.http.client import Transport
from bagent.backends.http.resolver import ResolverLoop
from bagent.bench.load_generator import LoadGenerator
from bagent.bench.plan import LoadConfig
from bagent.bench.workers import PROGRESS_SECONDS, LoadWorkerProgress, WorkerCommand
from bagent.errors import EXIT_OK, BagentError

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
