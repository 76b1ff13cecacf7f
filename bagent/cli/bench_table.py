"""Tables of a load test on the screen, as wide as it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bagent.observe.words import visible
from bagent.text.terminal import escape_controls, unguarded

Numbers = Mapping[str, Any]

_COLOURS = {"ok": "green", "slow": "yellow", "failing": "red", "dead": "red"}
_PERCENT = frozenset({"ok_share", "kv_max", "hit_rate", "cached_share"})
_TEXTS = frozenset({"load", "endpoint", "verdict", "reason", "name"})
_ROOM = 40
"""Characters that a reason takes at least, to be a column."""

_GAP = 2


def print_table(
    columns: Mapping[str, str], rows: Sequence[Numbers], spare: Sequence[str] = ()
) -> list[str]:
    """Print ``rows`` on stdout; returns the heads of the columns that found no room.

    Args:
        columns: heads, and the names of their numbers in the summary.
        spare: heads that a narrow screen goes without, those that go first first.
    """
    used = {
        head: name
        for head, name in columns.items()
        if head not in spare or any(row.get(name) is not None for row in rows)
    }
    if not sys.stdout.isatty():
        from bagent.cli.printing import write_rows

        shown = [[cell(row, name) for name in used.values()] for row in rows]
        write_rows(list(used), shown, "table")
        sys.stdout.write("\n")
        return []
    from rich.console import Console

    console = Console(file=unguarded(sys.stdout), highlight=False)
    widths = _fitting(used, rows, spare, console.width)
    _print_rich(console, {head: (used[head], width) for head, width in widths.items()}, rows)
    return [head for head in used if head not in widths]


def _fitting(
    columns: Mapping[str, str], rows: Sequence[Numbers], spare: Sequence[str], room: int
) -> dict[str, int]:
    """The columns for which there is room, with their widths; heads are wrapped between words."""
    widths = {
        head: _ROOM
        if name == "reason"
        else max(len(text) for text in [*head.split(), *(cell(row, name) for row in rows)])
        for head, name in columns.items()
    }
    for head in spare:
        if sum(width + _GAP for width in widths.values()) - _GAP <= room:
            break
        widths.pop(head, None)
    return widths


def _print_rich(
    console: Any, columns: Mapping[str, tuple[str, int]], rows: Sequence[Numbers]
) -> None:
    from rich.table import Table
    from rich.text import Text

    wide = any(name == "reason" for name, _ in columns.values())
    table = Table(box=None, pad_edge=False, header_style="bold", expand=wide)
    for head, (name, width) in columns.items():
        table.add_column(
            head,
            justify="left" if name in _TEXTS else "right",
            overflow="fold",
            min_width=width,
            width=None if name == "reason" else width,
            ratio=1 if name == "reason" else None,
        )
    for row in rows:
        cells = []
        for name, _ in columns.values():
            style = _COLOURS.get(row[name], "") if name == "verdict" else ""
            cells.append(Text(escape_controls(cell(row, name)), style))
        table.add_row(*cells)
    console.print(table)
    console.print()


def cell(row: Numbers, name: str) -> str:
    """One number, or text, in few letters."""
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return visible(value)
    if name in _PERCENT:
        return f"{100 * value:.3g}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
