"""Progress of a run for its caller: one updated line in a notebook, else lines on stderr.

Notebooks are updated by IPython's own display; no other package is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from typing import Any, Protocol

import msgspec

from bagent.observe.progress import one_line
from bagent.observe.snapshot import Snapshot


class Handle(Protocol):
    """The result of ``IPython.display.display(..., display_id=True)``."""

    def update(self, obj: Any, **options: Any) -> None:
        """Replace the output."""


Display = Callable[..., Handle | None]
"""``IPython.display.display``."""


def make_progress() -> Callable[[dict[str, Any]], None]:
    """Return the function that shows the states of a run to the caller.

    It updates one output in a Jupyter notebook, and prints lines on standard error elsewhere.
    """
    display = notebook_display()
    return _print if display is None else NotebookProgress(display)


def notebook_display() -> Display | None:
    """Return IPython's ``display`` in a notebook; None elsewhere."""
    module: Any = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    # A terminal's IPython has a shell too, but cannot update its output.
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    from importlib import import_module

    display: Display = import_module("IPython.display").display
    return display


class NotebookProgress:
    """Shows each state in place of the previous one."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._handle: Handle | None = None

    def __call__(self, state: dict[str, Any]) -> None:
        """Show ``state``, the fields of a :class:`bagent.observe.Snapshot`."""
        snapshot = _snapshot(state)
        line = one_line(snapshot)
        share = "" if snapshot.fraction is None else f' value="{snapshot.fraction:.4f}"'
        bundle = {
            "text/plain": line,
            "text/html": f'<progress max="1"{share}></progress> {escape(line)}',
        }
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _print(state: dict[str, Any]) -> None:
    sys.stderr.write(f"{one_line(_snapshot(state))}\n")
    sys.stderr.flush()


def _snapshot(state: dict[str, Any]) -> Snapshot:
    return msgspec.convert(state, Snapshot)
