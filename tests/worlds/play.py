"""Playing a world: its starts one after the other, and what they left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from bagent.errors import BagentError, OwnedError
from bagent.job.templates.template import Template
from bagent.observe.progress import NoProgress
from bagent.runs import hostfile_reload, provider_batches, session
from bagent.runs.context import RunContext, RunOptions, prepare
from bagent.runs.ending import summarize
from bagent.runs.execute import RunHost, Simulation, execute_run
from bagent.runs.run_state import describe
from bagent.runs.run_store import RunStore, open_run
from bagent.stages import stop_rules
from bagent.store.journal import segment_index
from bagent.store.journal.journal_files import JournalFiles
from bagent.store.lock import read_owner
from bagent.store.results import ResultQuery, iter_results
from bagent.store.run_dir import RunDir
from worlds import agents, provider, stdout, tables, watch
from worlds.clock import STEADY_OFFSET, Died, Stuck, WorldClock, WorldLoop
from worlds.history import History, Start
from worlds.job_file import command_options, job_file
from worlds.machine import Machine
from worlds.network import KEY, Network
from worlds.spec import Event, World

REFUSED_PAUSE = 70.0
"""Seconds after which a person tries again, where another process owned the run."""

REPAIR_SECONDS = 15.0
"""Seconds that a person needs at least to do something about what stopped a start with 76."""

TICK_SECONDS, CALM_TICK_SECONDS = 0.5, 2.0
"""Seconds between two ticks of a run, more than outside: they take a third of the CPU. Where
nothing happens to a process any more, and no row is hedged, little depends on them."""

CALM_AFTER = 30.0
"""Seconds of a start after which nothing happens at a set time."""

PROGRESS_SECONDS = 20.0
"""Seconds between two counts of the progress, for the same reason."""

TABLES_EVERY = 40
"""The tables are made in one world of so many: they take as long as some ten worlds."""

MOST_STARTS = 12
"""Starts after which a run counts as one that leads to no end."""


class Player:
    """Plays one world in ``folder``."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._clock = WorldClock()
        self._machine = Machine(folder, self._clock)
        self._network = Network(world, self._clock)
        self._network.alive = lambda: not self._machine.dead
        self._tools = agents.ToolBox(self._clock)
        self._provider = provider.Provider(self._network)
        self._stdout = stdout.Stdout()
        self._rival: RunStore | None = None
        self._loop: WorldLoop | None = None
        self._versions: Counter[int] = Counter()
        self._rerun = False
        self._contexts: dict[tuple[bool, int, bool], RunContext] = {}
        self._ended_shards: set[int] = set()
        self._starts: list[Start] = []

    def play(self) -> History:
        """Start the run until it has ended."""
        self._write_files()
        starts = self._starts
        with (
            self._clock.installed(),
            self._machine.installed(),
            self._tools.installed(),
            self._stdout.installed(),
            mock.patch.object(provider_batches, "make_service", self._make_service),
            mock.patch.object(tempfile, "tempdir", str(self._folder)),
            mock.patch.object(gc, "unfreeze", lambda: None),
            mock.patch.object(gc, "freeze", lambda: None),
            mock.patch.object(sys, "unraisablehook", lambda _: None),
            mock.patch.object(session, "TICK_SECONDS", TICK_SECONDS),
            mock.patch.object(session, "PROGRESS_INTERVAL_S", PROGRESS_SECONDS),
            mock.patch.object(NoProgress, "interval_s", PROGRESS_SECONDS),
            mock.patch.object(Template, "_compile", _compile),
            mock.patch.object(hostfile_reload, "HOSTFILE_SECONDS", self._hostfile_seconds()),
            mock.patch.object(segment_index, "SMALL", self._small_segment()),
            mock.patch.object(stop_rules, "ALIKE", self._world.job.alike),
            mock.patch.dict(_OPEN_DEFAULTS, self._segment_bytes()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # coroutines of killed processes are never awaited
            while len(starts) < MOST_STARTS:
                self._start()
                start = starts[-1]
                if start.stuck or self._is_over(start):
                    break
                self._clock.now += self._pause_after(start)
            files = self._read_files()
            self._machine.kill()
            for item in self._machine.graveyard:
                if isinstance(item, WorldLoop):
                    item.close()  # generators of tools would otherwise wait in it
            if self._machine.graveyard:
                self._machine.graveyard.clear()
                gc.collect()
        made = tables.read(self._run) if self._world.seed % TABLES_EVERY == 0 else None
        return History(
            self._world, starts, self._network, files, self._tools.runs, self._provider, made
        )

    def _lines_read(self, number: int) -> int | None:
        """Return the lines that the reader of stdout takes of a start; None: all."""
        lines = [int(e.at) for e in self._events(number) if e.kind == "reader-gone"]
        return min(lines, default=None)

    def _make_service(self, resolved: Any, services: Any) -> provider.WorldBatches:
        endpoint = resolved.servers.endpoints[0]
        return provider.WorldBatches(self._provider, endpoint, services.messages.notify)

    def _pause_after(self, start: Start) -> float:
        """Return after how many seconds the same command is given again."""
        if start.refused:
            return REFUSED_PAUSE
        return max(self._world.pause, REPAIR_SECONDS if start.code == 76 else 0.0)

    def _is_over(self, start: Start) -> bool:
        if start.code not in (0, 1, 2) or start.refused or start.limited:
            return False
        shards = self._world.job.shards
        self._ended_shards.add(start.number % shards)
        if len(self._ended_shards) < shards:
            return False
        last = max((event.start for event in self._world.events), default=0)
        if self._world.rerun and not self._rerun and start.number >= last:
            self._rerun = True
            return False
        return start.number >= last

    def _hostfile_seconds(self) -> float:
        """Return how often the hostfile is read; where nobody writes it, rarely."""
        written = any(event.kind == "hosts" for event in self._world.events)
        return hostfile_reload.HOSTFILE_SECONDS if written else 30.0

    def _small_segment(self) -> int:
        """Return how many lines a segment may have that is read as a whole: in each fourth world
        none, as for the large segments of long runs."""
        return segment_index.SMALL if self._world.seed % 4 else -1

    def _segment_bytes(self) -> dict[str, Json]:
        size = self._world.job.segment_bytes
        return {} if size is None else {"segment_bytes": size}

    # --- files ------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        world = self._world
        (self._folder / "job.yaml").write_bytes(msgspec.json.encode(job_file(world)))
        (self._folder / "tools.py").write_bytes(agents.TOOLS_FILE)
        if world.job.kind == "agents":
            (self._folder / "notes").mkdir()
            for name, text in agents.NOTES.items():
                (self._folder / "notes" / name).write_text(text)
        self._write_rows({})

    def _write_rows(self, versions: Mapping[int, int]) -> None:
        lines = [
            b"{broken"
            if row.replies == ("unreadable",)
            else msgspec.json.encode(
                {
                    "id": row.id,
                    "n": number if row.same is None else row.same,
                    "v": versions.get(number, 0),
                    "text": row.text,
                }
            )
            for number, row in enumerate(self._world.rows)
        ]
        (self._folder / "rows.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))

    def _write_hosts(self, numbers: Sequence[int], weight: float) -> None:
        lines = []
        for number in numbers:
            most = self._world.endpoints[number].most
            tags = "" if most is None else f" max_concurrency={most}"
            tags += "" if weight == 1.0 else f" weight={weight:g}"
            lines.append(f"server{number}:8000{tags}\n")
        (self._folder / "hosts").write_bytes("".join(lines).encode())

    @cached_property
    def _run(self) -> Path:
        return self._folder / "runs" / "job"

    def _read_files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self._run)): path.read_bytes()
            for path in sorted(self._run.rglob("*"))
            if path.is_file()
        }

    # --- one start --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the run, and add the start to those of the world."""
        number = len(self._starts)
        machine = self._machine
        start = Start(number, self._clock.now, answers=self._world.job.answers)
        start.limited = self._world.limit is not None and not number
        self._starts.append(start)
        machine.start_process()
        self._write_hosts(range(len(self._world.endpoints)), 1.0)
        self._edit(start)
        self._plan_calls(number, start)
        self._network.begin_process(number)
        self._tools.start = number
        try:
            self._execute(start)
        except Died:
            machine.kill()
        except Stuck as error:
            self._starts[-1].stuck = str(error)
            machine.kill()
        except BaseException as error:
            last = self._starts[-1]
            last.error = f"a fault in bagent: {error!r}"
            last.code = -1
            last.traceback = traceback.format_exc()
        if self._loop is not None:
            start.loop_errors += self._loop.errors
            machine.graveyard += [*self._loop.tasks, self._loop]
            self._loop = None
        died, machine.dead, machine.die_at = machine.dead, False, None
        machine.end_process()
        last = self._starts[-1]
        if start.suspended and not last.woken:
            return  # power was lost while it was suspended
        last.calls, last.ended = machine.calls, self._clock.now
        if died:
            last.code = None
        self._end_rival()
        self._look(last)

    def _edit(self, start: Start) -> None:
        """Edit rows of the input before a start."""
        edits = [e for e in self._events(start.number) if e.kind in ("edit", "edit-back")]
        for event in edits:
            row = int(event.at)
            if row < len(self._world.rows):
                change = 1 if event.kind == "edit" else -min(1, self._versions[row])
                self._versions[row] += change
        if edits:
            self._write_rows(self._versions)
        start.versions = {
            self._world.unit(row, answer): number
            for row, number in self._versions.items()
            for answer in range(self._world.job.answers)
        }

    def _execute(self, start: Start) -> None:
        self._watcher = watcher = watch.Watcher(RunDir(self._run), lambda: self._clock.now)
        start.moments = watcher.moments
        host = RunHost(
            watcher,
            io.BytesIO(),
            stdout=self._stdout.begin(self._lines_read(start.number)),
            simulation=Simulation(lambda: self._make_loop(start), self._network.connect),
        )
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                key = self._rerun, start.number % self._world.job.shards, start.limited
                if key not in self._contexts:
                    self._contexts[key] = prepare(self._options(start.number))
                context = replace(self._contexts[key], warnings=[])
                start.options = self._rerun_options
                ending = execute_run(context, host)
            start = self._starts[-1]
            start.ending, start.code = ending, ending.code
            start.lines = summarize(context, ending).lines
            start.printed = self._stdout.lines()
            start.endpoints = watcher.endpoints()
        except BagentError as error:
            start = self._starts[-1]
            start.code, start.error = error.exit_code, str(error)
            start.refused = isinstance(error, OwnedError)

    @property
    def _rerun_options(self) -> dict[str, Json]:
        return self._world.rerun_options if self._rerun else {}

    def _options(self, start: int) -> RunOptions:
        return RunOptions(
            limit=None if start else self._world.limit,
            job=Path("job.yaml"),
            cwd=self._folder,
            env={"WORLD_KEY": KEY},
            progress="none",
            tables=False,
            command=["bagent", "run", "job.yaml"],
            **command_options(self._world.job, start),
            **self._rerun_options,
        )

    def _make_loop(self, start: Start) -> WorldLoop:
        self._loop = loop = WorldLoop(self._clock, lambda: self._machine.dead)
        self._network.begin_loop(loop)
        self._set_ticks(loop, start)
        for event in self._events(start.number):
            action = self._action(event, start)
            if action is not None:
                at = event.until if event.kind.endswith("-at-call") else event.at
                loop.call_at(STEADY_OFFSET + start.began + at, action)
        return loop

    def _set_ticks(self, loop: WorldLoop, start: Start) -> None:
        """Make ticks rare as soon as little depends on them."""
        events = [event.kind for event in self._world.events]
        session.TICK_SECONDS = TICK_SECONDS  # type: ignore[misc]
        if self._world.job.hedge == "off" and "power-at-call" not in events:
            calm = start.began + (CALM_AFTER if events else 0.0)
            loop.call_at(STEADY_OFFSET + calm, setattr, session, "TICK_SECONDS", CALM_TICK_SECONDS)

    def _events(self, number: int) -> Iterator[Event]:
        return (event for event in self._world.events if event.start == number)

    def _plan_calls(self, number: int, start: Start) -> None:
        machine = self._machine
        machine.faults.clear()
        for event in self._events(number):
            if event.kind.endswith("-at-call"):
                if not event.until:
                    self._die_at_call(event)
            elif event.kind == "rival":
                machine.on_call = int(event.at), lambda: self._start_rival(start)
            elif event.kind in ("full", "short", "tight", "sync-fails"):
                began = start.began
                machine.faults.append((event.kind, began + event.at, began + event.until))

    def _die_at_call(self, event: Event) -> None:
        """Kill the process, or cut the power, so many system calls from now."""
        machine = self._machine
        if event.kind == "kill-at-call":
            machine.die_at = machine.calls + int(event.at)
            machine.cut = event.at % 1.0
        else:
            machine.on_call = machine.calls + int(event.at), self._lose_power

    def _action(self, event: Event, start: Start) -> Callable[[], None] | None:
        match event.kind:
            case "kill-at-call" | "power-at-call" if event.until:
                return lambda: self._die_at_call(event)
            case "term":
                return lambda: self._signal(signal.SIGTERM)
            case "int":
                return lambda: self._signal(signal.SIGINT)
            case "kill":
                return self._kill
            case "power":
                return self._lose_power
            case "hosts":
                return lambda: self._write_hosts(event.hosts, event.weight)
            case "stop-file":
                return lambda: (self._run / "stop").write_bytes(b"")  # type: ignore[return-value]
            case "look":
                return self._watcher.look
            case "suspend":
                return lambda: self._suspend(start, event.until - event.at)
        return None

    def _signal(self, number: int) -> None:
        assert self._loop is not None
        self._loop.signal(number)

    def _kill(self) -> None:
        self._machine.kill()
        raise Died

    def _lose_power(self) -> None:
        self._starts[-1].killed_by_power = True
        self._machine.lose_power()
        raise Died

    def _suspend(self, start: Start, seconds: float) -> None:
        """Stop the process of ``start``, as SIGSTOP does, and give the same command meanwhile."""
        machine, network, loop = self._machine, self._network, self._loop
        start.suspended, start.ended = True, self._clock.now
        self._look(start)
        process, connections = machine.suspend(), network.end_process()
        asyncio._set_running_loop(None)  # another process has its own
        self._clock.now += seconds
        self._start()
        asyncio._set_running_loop(loop)
        machine.wake(process)
        self._loop = loop
        if self._starts[-1].killed_by_power:
            self._lose_power()
        woken = Start(
            len(self._starts), self._clock.now, woken=True, answers=self._world.job.answers
        )
        woken.versions, woken.options = self._starts[-1].versions, start.options
        woken.limited = start.limited
        owner = read_owner(self._run / "owner.json")
        woken.lost = owner is None or owner.pid != machine.pid
        self._starts.append(woken)
        network.begin_process(woken.number, connections)

    def _start_rival(self, start: Start) -> None:
        """Start the same command in another process, which then sends nothing."""
        machine = self._machine
        first = machine.pid
        owner = read_owner(self._run / "owner.json")
        owned = owner is not None and owner.pid == first
        machine.pid = first + 1000
        machine.alive.add(machine.pid)
        try:
            self._rival = open_run(prepare(self._options(start.number)), threaded=False)
            start.two_owners = owned
        except BagentError:
            machine.alive.discard(machine.pid)
        machine.pid = first

    def _end_rival(self) -> None:
        rival, self._rival = self._rival, None
        if rival is not None:
            with contextlib.suppress(BagentError):
                rival.close(75)

    # --- what is left behind ----------------------------------------------------------------------

    def _look(self, start: Start) -> None:
        if not (self._run / "journal").is_dir():
            return
        start.results = list(
            iter_results(self._run, ResultQuery(ordered=True), report=start.reports.append)
        )
        start.attempts = self._journal_records("attempts")
        start.row_records = self._journal_records("rows")
        start.tool_records = self._journal_records("tools")
        with contextlib.suppress(OSError, msgspec.DecodeError):
            start.info = msgspec.json.decode((self._run / "run.json").read_bytes())
        start.unsynced = self._machine.unsynced()
        run = RunDir(self._run)
        start.status = describe(run, start.reports.append)

    def _journal_records(self, stream: str) -> list[dict[str, Json]]:
        return [
            record
            for path in sorted((self._run / "journal").glob(f"{stream}-*.jsonl"))
            for record in _records(path)
        ]


_OPEN_DEFAULTS = JournalFiles.open.__func__.__kwdefaults__  # type: ignore[attr-defined]
"""The default arguments of what opens a journal."""


Json = Any

_COMPILE = Template._compile
_COMPILED: dict[tuple[str, str], dict[str, Json]] = {}


def _compile(template: Template) -> None:
    """Compile a template, or take what was compiled for another world."""
    key = template.text, template.where
    if key not in _COMPILED:
        before = set(vars(template))
        _COMPILE(template)
        _COMPILED[key] = {k: v for k, v in vars(template).items() if k not in before}
        _COMPILED[key] |= {"names": template.names, "constant": template.constant}
        _COMPILED[key] |= {"_plain": template._plain}
    vars(template).update(_COMPILED[key])


def _records(path: Path) -> Iterator[dict[str, Json]]:
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(msgspec.DecodeError):
            if line:
                yield msgspec.json.decode(line)


def play(world: World) -> History:
    """Play a world from its beginning to its end."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="bagent-world-", dir=shared if shared.is_dir() else None, ignore_cleanup_errors=True
    ) as folder:
        history = Player(world, Path(folder)).play()
        # One pass left files of 2 of 150 worlds; the context removes the rest in a second one.
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
    return history
