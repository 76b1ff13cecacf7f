"""bagent: batches of LLM calls and LLM agents, rows in and validated rows out.

As a library::

    from bagent import open_run, run

    async with run("job.yaml", rows=[{"id": 1, "text": "..."}]) as results:
        async for result in results:
            print(result.id, result.output)

    frame = open_run("my-job").df()
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it; importing typing takes longer than all of this
__version__ = "0.1.0"

__all__ = ["LoadedJob", "OpenedRun", "Result", "Run", "__version__", "load_job", "open_run", "run"]

if TYPE_CHECKING:
    from typing import Any

    from bagent.library.open_run import OpenedRun, Result, open_run
    from bagent.library.run import LoadedJob, Run, load_job, run

_HOMES = {
    "LoadedJob": "bagent.library.run",
    "load_job": "bagent.library.run",
    "OpenedRun": "bagent.library.open_run",
    "open_run": "bagent.library.open_run",
    "Result": "bagent.library.open_run",
    "Run": "bagent.library.run",
    "run": "bagent.library.run",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import bagent`` alone costs nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bagent' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
