"""One worker of a load test as a process: ``python -m bagent.bench.worker``.

Its stdin holds a line of :class:`~bagent.bench.plan.LoadConfig`, then one of
:class:`~bagent.bench.workers.WorkerCommand` for each stage; its stdout gets lines of
:class:`~bagent.bench.workers.LoadWorkerProgress`. It ends with its stdin.
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
from bagent.bench.workers import TELL_SECONDS, LoadWorkerProgress, WorkerCommand
from bagent.errors import EXIT_OK, BagentError

LINE_LIMIT = 1 << 30
"""Bytes of the longest line: the first one holds the bodies of a job."""


async def work() -> None:
    """Send the parts of all stages that stdin orders."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    first = await reader.readline()
    if not first:
        return
    transport = Transport()
    load = LoadGenerator(msgspec.json.decode(first, type=LoadConfig), transport)
    loop.add_signal_handler(signal.SIGTERM, load.stopping.set)
    gc.freeze()
    try:
        while line := await reader.readline():
            order = msgspec.json.decode(line, type=WorkerCommand)
            if order.stage is None:
                break
            telling = asyncio.ensure_future(_tell(load))
            try:
                part = await load.run(order.stage, order.start_at)
            finally:
                telling.cancel()
            _say(LoadWorkerProgress(part, over=True))
    finally:
        load.close()
        await transport.close()


async def _tell(load: LoadGenerator) -> None:
    while True:
        await asyncio.sleep(TELL_SECONDS)
        _say(LoadWorkerProgress(load.part))


def _say(word: LoadWorkerProgress) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    """Work to the end; returns the exit code."""
    try:
        with asyncio.Runner(loop_factory=ResolverLoop) as runner:
            runner.run(work())
    except BagentError as error:
        sys.stderr.write(f"worker: {error}\n")
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
