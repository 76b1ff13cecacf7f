"""The state of a run in a notebook, without any widgets."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bagent import run
from bagent.errors import StoppedEarly
from bagent.library.progress import NotebookProgress, notebook_display
from bagent.observe.counters import RunCounters
from bagent.types import FeedStats, FleetStats
from support.jobs import rows, write_job


def state(ended: bool = False) -> dict[str, Any]:
    """A state as ``--progress json`` tells it."""
    tally = RunCounters(lambda: 0.0)
    fleet = FleetStats(**dict.fromkeys(FleetStats.__struct_fields__, 0))
    feed = FeedStats(read=4, skipped=0, position=2, size=4, ended=ended)
    return dict(msgspec.json.decode(msgspec.json.encode(tally.snapshot(fleet, feed))))


class Cell:
    """An output of a notebook: what was shown in it."""

    def __init__(self) -> None:
        self.shown = []

    def display(self, bundle: dict[str, str], **options: Any) -> Cell:
        assert options == {"raw": True, "display_id": True}
        self.shown.append(bundle)
        return self

    def update(self, bundle: dict[str, str], **options: Any) -> None:
        assert options == {"raw": True}
        self.shown[-1] = bundle


def test_every_state_takes_the_place_of_the_one_before():
    cell = Cell()
    show = NotebookProgress(cell.display)
    show(state())
    show(state(ended=True))
    assert len(cell.shown) == 1
    bundle = cell.shown[0]
    assert "0 rows" in bundle["text/plain"]
    assert bundle["text/html"].startswith('<progress max="1" value="1.0000"></progress> ')
    assert bundle["text/plain"].replace("&", "&amp;") in bundle["text/html"]


def shell(**parts: Any) -> Any:
    return SimpleNamespace(get_ipython=lambda: SimpleNamespace(**parts))


def test_only_a_notebook_is_shown_to_as_one(monkeypatch):
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=cell.display))
    for module, found in (
        (None, None),
        (SimpleNamespace(get_ipython=lambda: None), None),
        (shell(), None),  # IPython on a terminal
        (shell(kernel=object()), cell.display),
    ):
        monkeypatch.setitem(sys.modules, "IPython", module)
        assert notebook_display() == found


def test_states_count_the_rows_that_a_program_gives_before_a_server_answers():
    states = []
    job = {"backend": "http://127.0.0.1:9", "prompt": "{{ text }}"}
    options = ["--wait-hosts", "0.1s", "--limit", "3"]
    with pytest.raises(StoppedEarly):
        list(run(job, rows=rows(4), options=options, on_progress=states.append))
    assert states[-1]["total"] == 3
    assert states[-1]["ok"] == 0


def test_no_state_comes_twice(fs, job_dir, monkeypatch):
    monkeypatch.setattr("bagent.observe.progress.FIRST_S", 0.0)
    states = []
    list(run(write_job(job_dir, fs.url, 3), on_progress=states.append))
    assert states[-1]["ok"] == 3
    assert all(a != b for a, b in pairwise(states))
