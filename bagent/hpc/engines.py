"""The engines of one node: started, watched, started again when they die.

Runs once on every node, and imports little: a thousand nodes load it from one file system at once.
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
from bagent.hpc.allocation import Allocation, read_allocation
from bagent.hpc.nodes import read_names, short, this_position
from bagent.hpc.scheduler_queries import Ask, ask

LOOK_SECONDS = 2.0

STAGGER_SECONDS = 0.5
"""Between nodes that give the job back: the first one that does ends the others."""

LONGEST_STAGGER = 30.0


async def until_gone(
    alive: Path,
    seconds: float,
    clock: Callable[[], float],
    pause: Callable[[], float] = lambda: LOOK_SECONDS,
) -> None:
    """Return once the file has not changed for ``seconds`` by ``clock``.

    Times of a shared disk and of this node need not agree, so only changes count.
    """
    seen, since = None, clock()
    while clock() - since < seconds:
        await asyncio.sleep(pause())
        now = await asyncio.to_thread(_changed, alive)
        if now is not None and now != seen:
            seen, since = now, clock()


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


async def give_back(here: Allocation, position: int, ask: Ask = ask) -> None:
    """Let SLURM start the job anew, on other nodes; PBS does so by itself.

    Args:
        here: the job.
        position: of this node among the job's, from 0.
        ask: runs a program of the scheduler.
    """
    if here.scheduler == "slurm" and here.job_id is not None:
        await asyncio.sleep(min(LONGEST_STAGGER, position * STAGGER_SECONDS))
        await asyncio.to_thread(ask, ["scontrol", "requeue", here.job_id])


State = Literal["starting", "listening", "failed", "stopped"]


@dataclass(slots=True)
class EngineState:
    """One engine: its node and slot (from 0), port, and what it does.

    ``starts`` counts how often it was started; times are Unix seconds, ``listening_at`` is when
    its port first took a connection after the last start. ``exit_code`` is the last one.
    """

    node: str
    slot: int
    port: int
    state: State = "starting"
    starts: int = 0
    started_at: float | None = None
    listening_at: float | None = None
    exit_code: int | None = None

    @property
    def name(self) -> str:
        """``NODE.SLOT``: the name of its files."""
        return f"{self.node}.{self.slot}"

    @property
    def start_seconds(self) -> float | None:
        """From its last start to its first connection; None where that is not known."""
        if self.started_at is None or self.listening_at is None:
            return None
        return self.listening_at - self.started_at


def write_state(folder: Path, state: EngineState) -> None:
    """Write the engine's file, whole or not at all."""
    write_atomic(folder / f"{state.name}.json", json.dumps(asdict(state)) + "\n")


def read_states(folder: Path) -> Iterator[EngineState]:
    """The engines that have written a file, by name; what cannot be read is left out."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield EngineState(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue


PORT_STRIDE = 100
"""Ports that each engine of a node has to itself for its own processes' talk."""

INNER_PORT = 20_000
"""The first of those."""

TEMPORARY = "/tmp"  # nosec B108 # own_folder looks whose folders in it are
EVERYWHERE = "0.0.0.0"  # nosec B104 # other nodes ask the engines, with a key

CACHE = "VLLM_CACHE_ROOT"
"""The variable by which vLLM is told its folder for compiled code."""

KILL_SECONDS = 10.0
LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What runs on each node; ``words`` is the command of one engine.

    In ``words``, ``{port} {slot} {node} {head} {rank} {span} {stage}`` are filled in; where there
    is no ``{port}``, ``--host 0.0.0.0 --port PORT`` is added, as vLLM and SGLang take it. ``span``
    nodes make one engine. ``gpus`` are the node's, ``mask`` the variable that picks some of them.
    ``suffix`` makes a short node name an address.
    """

    words: tuple[str, ...]
    ports: tuple[int, ...]
    span: int = 1
    gpus: int = 0
    mask: str = ""
    restarts: int = 2
    stage: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One engine's process on one node: its command, what its environment adds, its port.

    ``address`` is the node's for others, ``serves`` whether a port is opened here at all.
    """

    words: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    slot: int
    port: int
    serves: bool
    address: str = "127.0.0.1"


def node_engines(plan: NodePlan, nodes: Sequence[str], position: int) -> list[EngineProcess]:
    """The engines of the node at ``position``; none where it is left over from even groups."""
    first = position // plan.span * plan.span
    if first + plan.span > len(nodes):
        return []
    rank = position - first
    head, here = (_address(nodes[number], plan.suffix) for number in (first, position))
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
        words = [_filled(word, values) for word in plan.words]
        if not any("{port}" in word for word in plan.words):
            words += ["--host", EVERYWHERE, "--port", str(port)]
        if plan.span > 1 and not any("{rank}" in word for word in plan.words):
            words += ["--nnodes", str(plan.span), "--node-rank", str(rank)]
            words += ["--master-addr", head, "--master-port", str(inner)]
            words += ["--headless"] if rank else []
        env = {
            "VLLM_PORT": str(inner + 1),
            "MASTER_PORT": str(inner),
            # A cache that two engines write at once breaks: each has its own, on the node.
            CACHE: f"{caches}-{slot}",
        }
        if plan.gpus and plan.mask:
            share = plan.gpus // len(plan.ports)
            env[plan.mask] = ",".join(map(str, range(slot * share, (slot + 1) * share)))
        engines.append(EngineProcess(tuple(words), env, slot, port, rank == 0, here))
    return engines


def with_own_cache(engine: EngineProcess) -> EngineProcess:
    """Return ``engine`` with a cache folder that is this user's alone.

    Engines run what they find compiled there. Where another user has made the usual folder, a new
    one takes its place.
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


def _filled(word: str, values: Mapping[str, object]) -> str:
    """``word`` with known ``{names}`` filled in; other braces, such as JSON, stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


class EngineSupervisor:
    """Keeps one engine running: starts it, notes what becomes of it, starts it again.

    Args:
        engine: what to run.
        state: what is told of it, in a file in ``folder`` beside its log.
        restarts: how often it may be started again.
        clock: Unix seconds.
        pause: seconds before a start, by how many there were.
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

    async def keep(self) -> bool:
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
                    *self._engine.words,
                    env={**os.environ, **self._engine.env},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{self._engine.words[0]}: {error.strerror}\n".encode())
                return 127
        if self._stopping.is_set():
            await self.stop()  # asked for while it was being started
        looking = asyncio.create_task(self._look_for_port())
        try:
            return await self._process.wait()
        finally:
            looking.cancel()
            _signal_group(self._process.pid, signal.SIGKILL)  # what it may have left behind

    async def _look_for_port(self) -> None:
        """Note when the engine first takes a connection; ready to answer it is seen to be later."""
        if not self._engine.serves:
            return
        while True:
            if await self._takes_connections():
                break
            await asyncio.sleep(1.0)
        self._state.state, self._state.listening_at = "listening", self._clock()
        write_state(self._folder, self._state)

    async def _takes_connections(self) -> bool:
        """Whether the port is open here, on the loopback address or the one for others."""
        for address in dict.fromkeys(("127.0.0.1", self._engine.address)):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(address, self._engine.port)
                writer.close()
                return True
        return False

    async def stop(self) -> None:
        """End the engine: asked first, killed after 10 s."""
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
    """The batch script: the file that it renews, and the seconds without that after which it is
    gone. ``position`` is this node's among the job's."""

    alive: Path
    seconds: float
    position: int


async def supervise(
    engines: Sequence[EngineProcess],
    folder: Path,
    node: str,
    restarts: int,
    head: HeadNode | None = None,
) -> int:
    """Keep the engines of this node until a signal (TERM, INT, HUP, USR2); 1 if all of them died.

    Files are written to ``folder``, which all nodes share. Where the ``head`` is gone the engines
    are stopped, and the job is given back.
    """
    keepers = [
        EngineSupervisor(engine, EngineState(node, engine.slot, engine.port), folder, restarts)
        for engine in engines
    ]
    stops: set[asyncio.Task[None]] = set()

    def stop() -> None:
        stops.update(asyncio.ensure_future(keeper.stop()) for keeper in keepers)

    loop = asyncio.get_running_loop()
    # srun answers TERM by killing its tasks at once; other signals it hands to them.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        loop.add_signal_handler(number, stop)
    silence = None
    if head is not None:
        silence = asyncio.create_task(until_gone(head.alive, head.seconds, time.monotonic))
        silence.add_done_callback(lambda task: None if task.cancelled() else stop())
    ended = await asyncio.gather(*(keeper.keep() for keeper in keepers))
    await asyncio.gather(*stops)
    if head is not None and silence is not None and not silence.cancel():
        sys.stderr.write(f"the first node has been silent for {head.seconds:g} s\n")
        await give_back(read_allocation(os.environ), head.position)
    return 0 if not keepers or any(ended) else 1


def supervise_step(argv: list[str]) -> int:
    """Keep the engines of this node; the command of an engine stands after ``--``."""
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
    parser.add_argument("words", nargs="+")
    given = parser.parse_args(argv)
    try:
        ports = tuple(int(port) for port in given.ports.split())
    except ValueError:
        raise UsageError(f"--ports {given.ports}: not numbers") from None
    plan = NodePlan(
        tuple(given.words),
        ports,
        given.span,
        given.gpus,
        given.mask,
        given.restarts,
        given.stage,
        given.suffix,
    )
    nodes = read_names(given.nodes)
    position = this_position(nodes)
    node = short(nodes[position]) or socket.gethostname()
    engines = [with_own_cache(engine) for engine in node_engines(plan, nodes, position)]
    head = HeadNode(given.alive, given.silence, position) if given.alive is not None else None
    return asyncio.run(supervise(engines, given.folder, node, plan.restarts, head))
