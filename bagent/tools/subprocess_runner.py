"""One child process per call: own process group, bounded output, nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bagent.tools.types import ToolFault

OUTPUT_BYTES = 1 << 20
"""What is kept of the output; a program that writes more is stopped there."""

TAIL_BYTES = 2_000
"""What is kept of the error output: its end."""

LAST_WORDS_SECONDS = 1.0
"""How long output is waited for after the process has ended and its group was killed."""


KILLED_SECONDS = 5.0
"""How long a process that was killed is waited for: the kernel may not be able to stop it now, as
in a read from a file server that is gone, and a busy machine may be slow to tell of its end."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What a process may take; None: no limit. Sizes in bytes, time in seconds of CPU."""

    memory: int | None = None
    file_size: int | None = None
    cpu: int | None = None

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """``argv`` such that the limits hold before its program begins.

        A shell sets them: code of our own between fork and exec could deadlock in a process that
        has threads.
        """
        words = ["ulimit -c 0"]
        if self.memory is not None:
            words.append(f"ulimit -v {self.memory // 1024}")
        if self.file_size is not None:
            words.append(f"ulimit -f {self.file_size // 512}")
        if self.cpu is not None:
            words.append(f"ulimit -t {self.cpu}")
        if len(words) == 1:
            return list(argv)
        return ["/bin/sh", "-c", "; ".join(words) + '; exec "$@"', "sh", *argv]


@dataclass(frozen=True, slots=True)
class CommandChild:
    """A program to run: its argv, input, folder and whole environment."""

    argv: Sequence[str]
    stdin: bytes
    cwd: Path
    env: Mapping[str, str]
    limits: ProcessLimits = ProcessLimits()


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """How a child ended: its code (negative: the signal), output, the end of its error output.

    ``cut``: it wrote more than is kept, and was stopped for it.
    """

    code: int
    out: str
    err: str
    cut: bool


class _Head(asyncio.Protocol):
    """Keeps the first bytes; tells when there are more."""

    def __init__(self, full: asyncio.Event) -> None:
        self.kept = bytearray()
        self.ended = asyncio.Event()
        self._full = full

    def data_received(self, data: bytes) -> None:
        room = OUTPUT_BYTES - len(self.kept)
        self.kept += data[:room]
        if len(data) > room:
            self._full.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


class _Tail(asyncio.Protocol):
    """Keeps the last bytes."""

    def __init__(self) -> None:
        self.kept = bytearray()
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.kept += data
        del self.kept[:-TAIL_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


async def run_child(child: CommandChild) -> ProcessResult:
    """Run a program to its end; when this is cancelled its whole process group is killed.

    Processes that it left in its group are killed too, so none outlives its call.

    Raises:
        ToolFault: it cannot be started.
    """
    full = asyncio.Event()
    head, tail = _Head(full), _Tail()
    out, err = await _reading(head), await _reading(tail)
    try:
        try:
            process = await _start(child, out[1], err[1])
        finally:
            os.close(out[1])
            os.close(err[1])
        code = await _until_end(process, full)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await asyncio.gather(head.ended.wait(), tail.ended.wait())
    finally:
        out[0].close()
        err[0].close()
    return ProcessResult(
        code,
        head.kept.decode("utf-8", "replace"),
        tail.kept.decode("utf-8", "replace").strip(),
        full.is_set(),
    )


async def _reading(protocol: asyncio.Protocol) -> tuple[asyncio.ReadTransport, int]:
    """A pipe that ``protocol`` reads, and its other end.

    asyncio's own pipes would not do: it calls a process ended only when they are closed, and any
    process that the program left behind holds them open.
    """
    reading, writing = os.pipe()
    pipe: BinaryIO = os.fdopen(reading, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return transport, writing


async def _start(child: CommandChild, out: int, err: int) -> asyncio.subprocess.Process:
    try:
        # A file holds the whole input, so that nobody waits for a program that does not read.
        with tempfile.TemporaryFile() as stdin:
            stdin.write(child.stdin)
            stdin.seek(0)
            return await asyncio.create_subprocess_exec(
                *child.limits.wrap(child.argv),
                stdin=stdin,
                stdout=out,
                stderr=err,
                cwd=child.cwd,
                env=dict(child.env),
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise ToolFault(f"cannot start {child.argv[0]}: {words}") from None


async def _until_end(process: asyncio.subprocess.Process, full: asyncio.Event) -> int:
    """Its exit code; kills what is left of its group, in any case."""
    ended = asyncio.ensure_future(process.wait())
    too_much = asyncio.ensure_future(full.wait())
    try:
        await asyncio.wait((ended, too_much), return_when=asyncio.FIRST_COMPLETED)
    finally:
        too_much.cancel()
        # Once it has ended its children are no longer known by it, and what left its group did so
        # to outlive it; where it is cut off, nobody is left to end them.
        below = [] if ended.done() else descendants(process.pid)
        kill_group(process.pid)
        for number in below:
            kill_group(number)  # it may have made itself the head of one
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        await _wait_for_end(ended)
        if not ended.done():
            ended.cancel()
    return ended.result()


async def _wait_for_end(ended: asyncio.Future[int]) -> None:
    """Wait for a process that was killed, also where that is cancelled meanwhile.

    A pool that closes cancels once more what is being stopped; nobody would take its exit code.
    """
    waiting = asyncio.ensure_future(asyncio.wait((ended,), timeout=KILLED_SECONDS))
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await waiting
        raise


def descendants(process: int) -> list[int]:
    """The processes below one, as Linux tells them; other systems tell none.

    Source: proc(5), /proc/PID/task/TID/children.
    """
    found: list[int] = []
    left = [process]
    while left:
        tasks = Path(f"/proc/{left.pop()}/task")
        with suppress(OSError):  # it ended meanwhile
            for task in tasks.iterdir():
                below = [int(word) for word in (task / "children").read_text().split()]
                found += below
                left += below
    return found


def kill_group(leader: int) -> None:
    """Kill a process group; one that is gone already is fine."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
