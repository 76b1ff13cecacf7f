"""Supervision of the engines of one node.

It runs on every node and imports little: a thousand nodes load it from one file system at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from bagent.errors import UsageError
from bagent.files import ensure_own_folder, write_atomic
from bagent.hpc.allocation import Allocation, ask, read_allocation, read_names, short, this_position
from bagent.hpc.schedulers import SCHEDULERS, Ask

LOOK_SECONDS = 2.0

STAGGER_SECONDS = 0.5
"""Seconds between nodes that requeue the job: the first one ends the others."""

LONGEST_STAGGER = 30.0


async def until_gone(
    alive: Path,
    seconds: float,
    clock: Callable[[], float],
    pause: Callable[[], float] = lambda: LOOK_SECONDS,
) -> None:
    """Return once the file has not changed for ``seconds`` by ``clock``.

    The clocks of a shared disk and of this node may differ, so only changes count.
    """
    last, since = None, clock()
    while clock() - since < seconds:
        await asyncio.sleep(pause())
        changed = await asyncio.to_thread(_changed, alive)
        if changed is not None and changed != last:
            last, since = changed, clock()


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


async def requeue(allocation: Allocation, position: int, ask: Ask = ask) -> None:
    """Requeue the job on other nodes where the scheduler does not do so by itself.

    Args:
        allocation: the job.
        position: of this node among the job's, from 0.
        ask: runs a program of the scheduler.
    """
    if allocation.scheduler is None or allocation.job_id is None:
        return
    command = SCHEDULERS[allocation.scheduler].requeue_command(allocation.job_id)
    if command is not None:
        await asyncio.sleep(min(LONGEST_STAGGER, position * STAGGER_SECONDS))
        await asyncio.to_thread(ask, command)


State = Literal["starting", "listening", "failed", "stopped"]


@dataclass(slots=True)
class EngineState:
    """One engine and what it does; times are Unix seconds."""

    node: str
    slot: int  # from 0
    port: int
    state: State = "starting"
    starts: int = 0
    started_at: float | None = None
    listening_at: float | None = None  # first connection after the last start
    exit_code: int | None = None  # of the last process

    @property
    def name(self) -> str:
        """``NODE.SLOT``: the name of its files."""
        return f"{self.node}.{self.slot}"

    @property
    def start_seconds(self) -> float | None:
        """Seconds from its last start to its first connection, if known."""
        if self.started_at is None or self.listening_at is None:
            return None
        return self.listening_at - self.started_at


def write_state(folder: Path, state: EngineState) -> None:
    """Write the engine's file atomically."""
    write_atomic(folder / f"{state.name}.json", json.dumps(asdict(state)) + "\n")


def read_states(folder: Path) -> Iterator[EngineState]:
    """Yield the engines that have written a readable file, by name."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield EngineState(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue


PORT_STRIDE = 100
"""Ports of each engine for communication between its processes."""

INNER_PORT = 20_000
"""The first of these ports."""

TEMPORARY = "/tmp"  # nosec B108 # ensure_own_folder checks the owner
EVERYWHERE = "0.0.0.0"  # nosec B104 # other nodes ask the engines, with a key

CACHE = "VLLM_CACHE_ROOT"
"""vLLM's variable for its cache of compiled code."""

KILL_SECONDS = 10.0
LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What runs on each node.

    In ``command``, ``{port} {slot} {node} {head} {rank} {span} {stage}`` are replaced. Without a
    ``{port}``, ``--host 0.0.0.0 --port PORT`` is added, as vLLM and SGLang need it.
    """

    command: tuple[str, ...]  # of one engine
    ports: tuple[int, ...]
    span: int = 1  # nodes of one engine
    gpus: int = 0  # of the node
    mask: str = ""  # the variable that selects some of them
    restarts: int = 2
    stage: str = ""
    suffix: str = ""  # makes a short node name an address


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One engine's process on one node."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)  # additions to the environment
    slot: int
    port: int
    serves: bool  # opens a port here
    address: str = "127.0.0.1"  # of the node, for others


def node_engines(plan: NodePlan, nodes: Sequence[str], position: int) -> list[EngineProcess]:
    """Return the engines of the node at ``position``; none if it completes no group of ``span``."""
    first = position // plan.span * plan.span
    if first + plan.span > len(nodes):
        return []
    rank = position - first
    head, own = (_address(nodes[number], plan.suffix) for number in (first, position))
    engines = []
    caches = f"{os.environ.get('TMPDIR', TEMPORARY)}/bagent-vllm-{os.getuid()}"
    for slot, port in enumerate(plan.ports):
        inner = INNER_PORT + slot * PORT_STRIDE
        values = {
            "port": port,
            "slot": slot,
            "node": short(nodes[position]),
            "head": head,
            "rank": rank,
            "span": plan.span,
            "stage": os.path.expandvars(plan.stage),
        }
        command = [_filled(part, values) for part in plan.command]
        if not any("{port}" in part for part in plan.command):
            command += ["--host", EVERYWHERE, "--port", str(port)]
        if plan.span > 1 and not any("{rank}" in part for part in plan.command):
            command += ["--nnodes", str(plan.span), "--node-rank", str(rank)]
            command += ["--master-addr", head, "--master-port", str(inner)]
            command += ["--headless"] if rank else []
        env = {
            "VLLM_PORT": str(inner + 1),
            "MASTER_PORT": str(inner),
            # Two engines must not write the same cache.
            CACHE: f"{caches}-{slot}",
        }
        if plan.gpus and plan.mask:
            share = plan.gpus // len(plan.ports)
            env[plan.mask] = ",".join(map(str, range(slot * share, (slot + 1) * share)))
        engines.append(EngineProcess(tuple(command), env, slot, port, rank == 0, own))
    return engines


def with_own_cache(engine: EngineProcess) -> EngineProcess:
    """Return ``engine`` with a cache folder that only this user can write.

    Engines run the code in it. If another user has made the usual folder, use a new one.
    """
    cache = Path(engine.env[CACHE])
    try:
        ensure_own_folder(cache)
    except OSError as error:
        fresh = tempfile.mkdtemp(prefix=f"{cache.name}-", dir=cache.parent)
        sys.stderr.write(f"{cache} is not used: {error.strerror or error}; {fresh} is\n")
        return replace(engine, env={**engine.env, CACHE: fresh})
    return engine


def _address(node: str, suffix: str) -> str:
    return f"{short(node)}{suffix}" if suffix else node


def _filled(text: str, values: Mapping[str, object]) -> str:
    """Replace known ``{names}``; other braces, such as JSON, stay."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


class EngineSupervisor:
    """Starts one engine, restarts it when it ends, and records its state.

    Args:
        engine: what to run.
        state: its state, written to a file in ``folder``.
        folder: for states and logs.
        restarts: how often it may be restarted.
        clock: Unix seconds.
        pause: seconds before a start, by the number of starts.
    """

    def __init__(
        self,
        engine: EngineProcess,
        state: EngineState,
        folder: Path,
        restarts: int,
        *,
        clock: Callable[[], float] = time.time,
        pause: Callable[[int], float] = lambda starts: min(LONGEST_PAUSE, 2.0**starts),
    ) -> None:
        self._engine = engine
        self._state = state
        self._folder = folder
        self._restarts = restarts
        self._clock = clock
        self._pause = pause
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> bool:
        """Run the engine until it is stopped (True) or has died too often (False)."""
        state = self._state
        for start in range(self._restarts + 1):
            if start:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._pause(start))
            if self._stopping.is_set():
                break
            state.exit_code = await self._run_once()
            if not self._stopping.is_set():
                sys.stderr.write(f"engine {state.name} ended with exit code {state.exit_code}\n")
        state.state = "stopped" if self._stopping.is_set() else "failed"
        write_state(self._folder, state)
        return self._stopping.is_set()

    async def _run_once(self) -> int:
        state = self._state
        state.state, state.listening_at = "starting", None
        state.starts += 1
        state.started_at = self._clock()
        write_state(self._folder, state)
        with (self._folder / f"{state.name}.log").open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._engine.command,
                    env={**os.environ, **self._engine.env},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{self._engine.command[0]}: {error.strerror}\n".encode())
                return 127
        if self._stopping.is_set():
            await self.stop()  # requested while it was starting
        waiting = asyncio.create_task(self._wait_for_port())
        try:
            return await self._process.wait()
        finally:
            waiting.cancel()
            _signal_group(self._process.pid, signal.SIGKILL)  # its remaining children

    async def _wait_for_port(self) -> None:
        """Record when the engine first accepts a connection; it may not be ready to answer yet."""
        if not self._engine.serves:
            return
        while True:
            if await self._accepts_connections():
                break
            await asyncio.sleep(1.0)
        self._state.state, self._state.listening_at = "listening", self._clock()
        write_state(self._folder, self._state)

    async def _accepts_connections(self) -> bool:
        """Return whether the port is open, on the loopback or the node's address."""
        for address in dict.fromkeys(("127.0.0.1", self._engine.address)):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(address, self._engine.port)
                writer.close()
                return True
        return False

    async def stop(self) -> None:
        """Terminate the engine, and kill it after 10 s."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), KILL_SECONDS)
        except TimeoutError:
            _signal_group(process.pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


@dataclass(frozen=True, slots=True)
class HeadNode:
    """The node that runs the batch script."""

    alive: Path  # the file that the script renews
    seconds: float  # without renewal until it is lost
    position: int  # of this node among the job's


async def supervise(
    engines: Sequence[EngineProcess],
    folder: Path,
    node: str,
    restarts: int,
    head: HeadNode | None = None,
) -> int:
    """Run the engines of this node until a signal (TERM, INT, HUP, USR2); return 1 if all failed.

    ``folder`` is shared by all nodes. If the ``head`` is lost, stop them and requeue the job.
    """
    supervisors = [
        EngineSupervisor(engine, EngineState(node, engine.slot, engine.port), folder, restarts)
        for engine in engines
    ]
    stops: set[asyncio.Task[None]] = set()

    def stop() -> None:
        stops.update(asyncio.ensure_future(supervisor.stop()) for supervisor in supervisors)

    loop = asyncio.get_running_loop()
    # srun kills its tasks at TERM; it forwards other signals.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        loop.add_signal_handler(number, stop)
    silence = None
    if head is not None:
        silence = asyncio.create_task(until_gone(head.alive, head.seconds, time.monotonic))
        silence.add_done_callback(lambda task: None if task.cancelled() else stop())
    ended = await asyncio.gather(*(supervisor.run() for supervisor in supervisors))
    await asyncio.gather(*stops)
    if head is not None and silence is not None and not silence.cancel():
        sys.stderr.write(f"the first node has been silent for {head.seconds:g} s\n")
        await requeue(read_allocation(os.environ), head.position)
    return 0 if not supervisors or any(ended) else 1


def supervise_step(argv: list[str]) -> int:
    """Run the engines of this node; the engine's command follows ``--``."""
    parser = argparse.ArgumentParser(prog="bagent.hpc supervise")
    parser.add_argument("--folder", type=Path, required=True, help="for states and logs")
    parser.add_argument("--nodes", type=Path, required=True, help="file of all engine nodes")
    parser.add_argument("--ports", required=True, help="parted by blanks, one an engine")
    parser.add_argument("--span", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--mask", default="")
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--stage", default="")
    parser.add_argument("--suffix", default="")
    parser.add_argument("--alive", type=Path, help="the file that the script renews")
    parser.add_argument("--silence", type=float, default=120.0, help="seconds without that")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    try:
        ports = tuple(int(port) for port in args.ports.split())
    except ValueError:
        raise UsageError(
            f"--ports {args.ports}: not numbers",
            hint="write numbers with commas, such as 8000,8001",
        ) from None
    plan = NodePlan(
        tuple(args.command),
        ports,
        args.span,
        args.gpus,
        args.mask,
        args.restarts,
        args.stage,
        args.suffix,
    )
    nodes = read_names(args.nodes)
    position = this_position(nodes)
    node = short(nodes[position]) or socket.gethostname()
    engines = [with_own_cache(engine) for engine in node_engines(plan, nodes, position)]
    head = HeadNode(args.alive, args.silence, position) if args.alive is not None else None
    return asyncio.run(supervise(engines, args.folder, node, plan.restarts, head))
