"""What a caller sees of a run that goes on: a line that is renewed in a notebook, else lines.

A notebook is written to through IPython's own display; nothing else need be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from typing import Any, Protocol

import msgspec

from bagent.observe.snapshot import Snapshot
from bagent.observe.status_text import one_line


class Handle(Protocol):
    """One output of a cell, as ``IPython.display.display(..., display_id=True)`` gives it."""

    def update(self, obj: Any, **options: Any) -> None:
        """Show something else in its place."""


Display = Callable[..., Handle | None]
"""``IPython.display.display``."""


def make_progress() -> Callable[[dict[str, Any]], None]:
    """What shows the states of a run where the caller can see them.

    In a Jupyter notebook one output that is renewed; elsewhere a line on standard error for each.
    """
    display = notebook_display()
    return _print if display is None else NotebookProgress(display)


def notebook_display() -> Display | None:
    """IPython's ``display`` where a notebook shows what it is given; None: there is no notebook."""
    module: Any = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    # A terminal's IPython has a shell too, but nothing that could be renewed.
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    from importlib import import_module

    found: Display = import_module("IPython.display").display
    return found


class NotebookProgress:
    """Shows each state in place of the one before.

    Args:
        display: as of IPython.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._handle: Handle | None = None

    def __call__(self, state: dict[str, Any]) -> None:
        """Show ``state``, the fields of a :class:`bagent.observe.Snapshot`."""
        snapshot = _snapshot(state)
        words = one_line(snapshot)
        share = "" if snapshot.fraction is None else f' value="{snapshot.fraction:.4f}"'
        bundle = {
            "text/plain": words,
            "text/html": f'<progress max="1"{share}></progress> {escape(words)}',
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
