"""The runs that are served, by the names in addresses."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from bagent.errors import UsageError
from bagent.runs.run_state import describe
from bagent.store.run_dir import RunDir, RunInfo, list_runs
from bagent.view.row import PromptRenderer
from bagent.view.tables import RunTables, files_stamp

MOST_OPEN = 2
"""Runs whose tables are open at a time: a comparison needs two."""


class RunStates:
    """The states of runs, read again only after a file of the run has changed.

    That of a run at which a process works is always read again.
    """

    def __init__(self) -> None:
        self._states: dict[Path, tuple[Hashable, dict[str, Any]]] = {}
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)

    def of(self, run: RunDir) -> dict[str, Any]:
        """Return the state of a run, read from its directory."""
        with self._locks[run.path]:
            stamp = files_stamp(run)
            read_stamp, state = self._states.get(run.path, (None, {}))
            if stamp != read_stamp or state["state"] == "running":
                state = describe(run, _ignore)
                self._states[run.path] = stamp, state
            return state


class ViewedRun:
    """One run with its tables and prompts."""

    def __init__(self, run: RunDir, states: RunStates) -> None:
        self.run = run
        self.name = run.path.name
        self.tables = RunTables(run)
        self.prompts = PromptRenderer(run)
        self._states = states

    def state(self) -> dict[str, Any]:
        """Return the state of the run, as :class:`RunStates` does."""
        return self._states.of(self.run)

    def info(self) -> RunInfo:
        """Return the content of ``run.json``; empty if it is damaged."""
        return self.run.load_or_report(_ignore) or RunInfo(self.name)


def _ignore(_: str) -> None:
    """Drop a message for a terminal."""


class RunCatalog:
    """Finds runs by name; keeps the tables of the last ones open.

    Args:
        folder: a folder of runs.
        only: serve this run alone.
    """

    def __init__(self, folder: Path, only: RunDir | None) -> None:
        self._folder = folder
        self._only = only
        self._open: OrderedDict[str, ViewedRun] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self.states = RunStates()
        """The states of all runs, whether their tables are open or not."""

    @property
    def single(self) -> str | None:
        """The name of the only run; None if all of a folder are served."""
        return None if self._only is None else self._only.path.name

    def runs(self) -> list[RunDir]:
        """Return all runs, latest start first."""
        return [self._only] if self._only is not None else list_runs(self._folder)

    def find(self, name: str) -> ViewedRun:
        """Return a run; the tables of the run not used for longest are closed meanwhile.

        Raises:
            UsageError: there is none of that name.
        """
        viewed = self._open.get(name)
        if viewed is None:
            run = next((run for run in self.runs() if run.path.name == name), None)
            if run is None:
                raise UsageError(f"there is no run {name}")
            viewed = self._open[name] = ViewedRun(run, self.states)
        self._open.move_to_end(name)
        while len(self._open) > MOST_OPEN:
            _, oldest = self._open.popitem(last=False)
            task = asyncio.create_task(oldest.tables.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return viewed

    async def close(self) -> None:
        """Close all tables."""
        closing = [viewed.tables.close() for viewed in self._open.values()]
        await asyncio.gather(*self._closing, *closing)
        self._open.clear()
