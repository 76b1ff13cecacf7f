"""The runs that are served, by the names in addresses."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from bagent.errors import UsageError
from bagent.runs.run_state import describe
from bagent.store.run_dir import RunDir, RunInfo, list_runs
from bagent.view.prompts import PromptRenderer
from bagent.view.tables import RunTables, files_stamp

MOST_OPEN = 2
"""Runs whose tables are open at a time: a comparison needs two."""


class ViewedRun:
    """One run with its tables and prompts."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.name = run.path.name
        self.tables = RunTables(run)
        self.prompts = PromptRenderer(run)
        self._stamp: Hashable = None
        self._state: dict[str, Any] = {}
        self._lock = threading.Lock()

    def state(self) -> dict[str, Any]:
        """Return the state of the run as its directory tells it.

        That of a run at which no process works is read again only after a file has changed.
        """
        with self._lock:
            stamp = files_stamp(self.run)
            if stamp != self._stamp or self._state["state"] == "running":
                self._state, self._stamp = describe(self.run, _ignore), stamp
            return self._state

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
        self._listed: dict[Path, ViewedRun] = {}

    @property
    def single(self) -> str | None:
        """The name of the only run; None if all of a folder are served."""
        return None if self._only is None else self._only.path.name

    def runs(self) -> list[RunDir]:
        """Return all runs, latest start first."""
        return [self._only] if self._only is not None else list_runs(self._folder)

    def state(self, run: RunDir) -> dict[str, Any]:
        """Return the state of a run of the list."""
        return self._listed.setdefault(run.path, ViewedRun(run)).state()

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
            viewed = self._open[name] = ViewedRun(run)
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
