"""Tools that are programs: one process per call, with a process group of its own and bounded
output.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from bagent.job.spec.agent import PLACE
from bagent.tools.types import Arguments, ToolFault
from bagent.types import Json

OUTPUT_BYTES = 1 << 20
"""Bytes of output that are kept; a program that writes more is stopped."""

TAIL_BYTES = 2_000
"""Bytes at the end of the error output that are kept."""

LAST_WORDS_SECONDS = 1.0
"""How long to wait for output after the process has ended and its group was killed."""

KILLED_SECONDS = 5.0
"""How long to wait for the end of a killed process: the kernel cannot stop one that reads from a
file server that is gone."""

PREAMBLE = re.compile(r"(?:[ \t]*x-(?:anthropic|amz)-[^\n]*(?:\n|\Z)|[ \t]*\n)*", re.I)

CLAUDE_CODE = ("claude_code",)
CLAUDE_CODE_ARGV = ("claude", "--print", "--output-format", "text")
CLAUDE_CODE_DESCRIPTION = "Give a task to Claude Code, an agent that can read and change files."
CLAUDE_CODE_SCHEMA: Mapping[str, Json] = {
    "type": "object",
    "properties": {"prompt": {"type": "string", "description": "The task, in full sentences."}},
    "required": ["prompt"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits of a process in bytes and seconds of CPU; None: no limit."""

    memory: int | None = None
    file_size: int | None = None
    cpu: int | None = None

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """Return ``argv`` in a shell that sets the limits before the program starts.

        Python code between fork and exec could deadlock in a process with threads.
        """
        commands = ["ulimit -c 0"]
        if self.memory is not None:
            commands.append(f"ulimit -v {self.memory // 1024}")
        if self.file_size is not None:
            commands.append(f"ulimit -f {self.file_size // 512}")
        if self.cpu is not None:
            commands.append(f"ulimit -t {self.cpu}")
        if len(commands) == 1:
            return list(argv)
        return ["/bin/sh", "-c", "; ".join(commands) + '; exec "$@"', "sh", *argv]


@dataclass(frozen=True, slots=True)
class CommandChild:
    """A program to run, with its input, working directory and environment."""

    argv: Sequence[str]
    stdin: bytes
    cwd: Path
    env: Mapping[str, str]
    limits: ProcessLimits = ProcessLimits()


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """How a process ended."""

    code: int
    """Its exit code; negative: the signal."""
    out: str
    err: str
    """The end of its error output."""
    cut: bool
    """It wrote more output than is kept, and was stopped."""


class _Head(asyncio.Protocol):
    """Keeps the first bytes; sets ``full`` when there are more."""

    def __init__(self, full: asyncio.Event) -> None:
        self.data = bytearray()
        self.ended = asyncio.Event()
        self._full = full

    def data_received(self, data: bytes) -> None:
        room = OUTPUT_BYTES - len(self.data)
        self.data += data[:room]
        if len(data) > room:
            self._full.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


class _Tail(asyncio.Protocol):
    """Keeps the last bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data += data
        del self.data[:-TAIL_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


async def run_child(child: CommandChild) -> ProcessResult:
    """Run a program to its end, and kill its process group then, or when this is cancelled.

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
        head.data.decode("utf-8", "replace"),
        tail.data.decode("utf-8", "replace").strip(),
        full.is_set(),
    )


async def _reading(protocol: asyncio.Protocol) -> tuple[asyncio.ReadTransport, int]:
    """Return a pipe that ``protocol`` reads, and its other end.

    With pipes of its own, asyncio regards a process as ended only when they are closed, and any
    process that the program leaves behind holds them open.
    """
    reading, writing = os.pipe()
    pipe: BinaryIO = os.fdopen(reading, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return transport, writing


async def _start(child: CommandChild, out: int, err: int) -> asyncio.subprocess.Process:
    try:
        # The input is a file: a pipe would block on a program that does not read.
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
        message = error.strerror if isinstance(error, OSError) else str(error)
        raise ToolFault(f"cannot start {child.argv[0]}: {message}") from None


async def _until_end(process: asyncio.subprocess.Process, full: asyncio.Event) -> int:
    """Wait for a process, kill what is left of its group, and return its exit code."""
    ended = asyncio.ensure_future(process.wait())
    too_much = asyncio.ensure_future(full.wait())
    try:
        await asyncio.wait((ended, too_much), return_when=asyncio.FIRST_COMPLETED)
    finally:
        too_much.cancel()
        # Of a process that is stopped early, descendants outside its group are killed too.
        below = [] if ended.done() else descendants(process.pid)
        kill_group(process.pid)
        for number in below:
            kill_group(number)  # it may lead a group of its own
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        await _wait_for_end(ended)
        if not ended.done():
            ended.cancel()
    return ended.result()


async def _wait_for_end(ended: asyncio.Future[int]) -> None:
    """Wait for a process that was killed, also when this is cancelled.

    An executor that closes cancels calls that are being stopped once more.
    """
    waiting = asyncio.ensure_future(asyncio.wait((ended,), timeout=KILLED_SECONDS))
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await waiting
        raise


def descendants(process: int) -> list[int]:
    """Return the descendants of a process on Linux, none on other systems.

    Source: proc(5), /proc/PID/task/TID/children.
    """
    processes: list[int] = []
    remaining = [process]
    while remaining:
        tasks = Path(f"/proc/{remaining.pop()}/task")
        with suppress(OSError):  # it has ended
            for task in tasks.iterdir():
                below = [int(word) for word in (task / "children").read_text().split()]
                processes += below
                remaining += below
    return processes


def kill_group(leader: int) -> None:
    """Kill a process group, if it still exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class CommandTool:
    """A program as a tool.

    Attributes:
        argv: its arguments; ``{name}`` is a property of the schema, ``{{name}}`` is ``{name}``.
        names: the arguments that the schema has.
        cwd: its working directory.
        env: its whole environment.
        prompt: the argument that is its input; empty: all arguments as one JSON object.
        strip_preamble: whether leading ``x-anthropic-*`` and ``x-amz-*`` lines are removed.
    """

    argv: Sequence[str]
    names: frozenset[str]
    cwd: Path
    env: Mapping[str, str]
    prompt: str = ""
    strip_preamble: bool = False

    async def run(self, arguments: Arguments) -> str:
        """Run the program once and return its standard output.

        Raises:
            ToolFault: it cannot be started, or ended with a code other than 0.
        """
        argv = [self._fill(word, arguments) for word in self.argv]
        if "\0" in "".join(argv):
            raise ToolFault("an argument holds a NUL character", "bad_arguments")
        stdin = arguments[self.prompt].encode() if self.prompt else msgspec.json.encode(arguments)
        text = answer_of(await run_child(CommandChild(argv, stdin, self.cwd, self.env)))
        return without_preamble(text) if self.strip_preamble else text

    def _fill(self, word: str, arguments: Arguments) -> str:
        """Return a word with its placeholders filled."""

        def value(match: re.Match[str]) -> str:
            name = match["name"]
            if name is None:
                return f"{{{match['text']}}}"
            return as_word(arguments.get(name)) if name in self.names else match[0]

        return PLACE.sub(value, word)


def as_word(value: Any) -> str:
    """Return an argument as a word: a text as it is, null as an empty word, the rest as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def answer_of(ended: ProcessResult) -> str:
    """Return the output of a program that succeeded, or that was stopped for too much output.

    Raises:
        ToolFault: it failed; the message has the ends of its error output and of its output.
    """
    if ended.code == 0:
        return ended.out
    if ended.cut:
        return f"{ended.out}\n[cut: the program wrote more and was stopped]"
    how = f"signal {-ended.code}" if ended.code < 0 else f"code {ended.code}"
    details = "; ".join(filter(None, (ended.err, ended.out[-500:].strip())))
    raise ToolFault(f"it ended with {how}" + (f": {details}" if details else ""))


def without_preamble(text: str) -> str:
    """Return ``text`` without leading ``x-anthropic-*`` and ``x-amz-*`` header lines."""
    match = PREAMBLE.match(text)
    head = match[0] if match else ""
    return text[len(head) :] if "x-" in head.lower() else text


def places_schema(argv: Sequence[str]) -> Json:
    """Return the schema of a command without one: a required text for every ``{name}``."""
    names_found = (match["name"] for word in argv for match in PLACE.finditer(word))
    names = [name for name in dict.fromkeys(names_found) if name is not None]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
