"""Fixtures that every test may use: a scripted server, a folder for a job, the command line."""

from __future__ import annotations

import asyncio
import datetime
import gc
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

# The process that gives tests to workers runs none, and begins sooner without these modules.
if TYPE_CHECKING:
    from support.cli import Completed
    from support.fake_server import FakeServer
    from support.in_process import RunClock

# Workers of xdist inherit it, so that all have the same seed, also around midnight.
SEED = os.environ.setdefault("BAGENT_TEST_SEED", datetime.date.today().isoformat())

# Nothing here survives a power cut, so that waiting for the disk proves nothing. What takes their
# place still fails for a closed file.
os.fsync = os.fdatasync = lambda file: os.fstat(file if isinstance(file, int) else file.fileno())

# Trusting one authority takes a millisecond, all of them sixty in each process and client.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "nobody.pem")

# Importing jsonschema takes three seconds where it finds this grammar of IRIs, which no test needs.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# A shell lets what it starts in the background ignore Ctrl-C, which processes of tests inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Print the seed of the disturbed runs."""
    return f"BAGENT_TEST_SEED={SEED} (set it to repeat the disturbed runs of a day)"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from test modules and items, which stay to the end."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_finish() -> None:
    """Make tables in this process from now on."""
    from support.in_process import make_tables_here

    make_tables_here()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Report nothing of a passed test from a worker of xdist but the call.

    Messages between processes take three times as long as pytest takes to run a short test.
    """
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let tests with the marker ``process`` start processes; the others run commands here.

    Runs here make tables at their end for tests with the marker ``tables`` or ``database``.
    """
    from support.cli import ProcessUse
    from support.in_process import TablesHere

    markers = ("process", "real", "slow")
    ProcessUse.allowed = any(item.get_closest_marker(name) for name in markers)
    TablesHere.database = item.get_closest_marker("database") is not None
    TablesHere.at_once = TablesHere.database or item.get_closest_marker("tables") is not None
    TablesHere.due.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine to its end, on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def fs() -> Iterator[FakeServer]:
    """A scripted server that answers every row; ``fs.set_script({...})`` changes that."""
    from support.fake_server import FakeServer

    with FakeServer() as server:
        yield server


@pytest.fixture
def run_clock(monkeypatch: pytest.MonkeyPatch) -> RunClock:
    """The clock of a run in this process."""
    from support.in_process import RunClock

    return RunClock(monkeypatch)


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    """An empty folder for a job file, its rows and its runs."""
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


@pytest.fixture
def bagent(job_dir: Path) -> Callable[..., Completed]:
    """``bagent(["run", "job.yaml"], ...)`` in ``job_dir``; see ``run_bagent``."""
    from support.cli import run_bagent

    return partial(run_bagent, cwd=job_dir)
