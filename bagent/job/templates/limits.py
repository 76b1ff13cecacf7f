"""Time and memory limits of templates.

A template that loops for hours or pads a text to a gigabyte would block the whole run, signals
included.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.filters import FILTERS

MAX_RENDER = 64 * 1024 * 1024
"""Most characters of one rendered text."""

MAX_SECONDS = 2.0
"""Most seconds of CPU that the loops and macros of one text may take."""

MAX_SLICES = 1_000_000

MAX_SCANNED = 4 << 20
"""Longest text, in characters, for filters that scan every word."""

MAX_COPIED = 1 << 30

ITEM_SIZE = 16
"""Characters that an item of a list counts as: that is about the memory it takes."""

_LONG_NUMBER = re.compile(r"\d{8,}")
_TICK, _TICKING = "bagent_tick", "bagent_ticking"


class TooLarge(ValueError):
    """A template would make more text than :data:`MAX_RENDER`."""


class TooSlow(ValueError):
    """A template takes longer than :data:`MAX_SECONDS`."""

    def __init__(self) -> None:
        super().__init__(f"its loops take more than {MAX_SECONDS:g} s")


_LONG = 4096
"""Characters from which a text counts against the room of its template."""


class _Budget(threading.local):
    """What is left for the text that is being rendered."""

    deadline = float("inf")
    room = MAX_RENDER


_BUDGET = _Budget()


def start_budget() -> None:
    """Give the text that is rendered next in this thread its time and its room."""
    _BUDGET.deadline = time.thread_time() + MAX_SECONDS
    _BUDGET.room = 4 * MAX_RENDER  # a text may be kept in a variable and be joined to others


def end_budget() -> None:
    """Remove the time limit from this thread."""
    _BUDGET.deadline = float("inf")


def spend(text: str) -> None:
    """Count a text that a template makes.

    Raises:
        TooLarge: it, or all of them together, are larger than a template may make.
    """
    size = len(text)
    if size > _LONG:
        _BUDGET.room -= size
        if size > MAX_RENDER or _BUDGET.room < 0:
            raise TooLarge("more than 64 MB")


def add_ticks(tree: nodes.Template) -> None:
    """Change a parsed template so that its loops and macros check the time."""
    for loop in tree.find_all(nodes.For):
        loop.iter = _filtered(loop.iter, _TICKING)
    for macro in tree.find_all((nodes.Macro, nodes.CallBlock)):
        nothing = nodes.Const(None, lineno=macro.lineno, environment=macro.environment)
        tick = nodes.ExprStmt(_filtered(nothing, _TICK), lineno=macro.lineno)
        tick.environment = macro.environment
        body: list[nodes.Node] = macro.body  # type: ignore[attr-defined]
        body.insert(0, tick)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    value: Any = node
    return nodes.Filter(
        value, name, [], [], None, None, lineno=node.lineno, environment=node.environment
    )


def _tick() -> None:
    if time.thread_time() > _BUDGET.deadline:
        raise TooSlow


@pass_context  # so that Jinja computes neither of them while it compiles
def _tick_filter(context: Any, value: Any) -> Any:
    _tick()
    return value


class _Ticking:
    """An iterable that checks the time at every item."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _tick()
            yield item


@pass_context
def _ticking_filter(context: Any, value: Any) -> Any:
    return _Ticking(value)


# --- sizes --------------------------------------------------------------------------------------


def _fits(*sizes: float) -> None:
    if sum(sizes) > MAX_RENDER:
        raise TooLarge("more than 64 MB")


def check_printed(value: Any) -> None:
    """Refuse a value that is too large to be printed as JSON; a value counts at any depth.

    Raises:
        TooLarge: it is.
    """
    _room_after(value, MAX_RENDER)


def _room_after(value: Any, room: int) -> int:
    """Return what remains of ``room`` characters after a list or mapping."""
    room -= len(value) * ITEM_SIZE
    if room < 0:
        raise TooLarge("more than 64 MB")
    _tick()
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, str):
            room -= len(item)
        elif isinstance(item, (list, tuple, dict)):
            room = _room_after(item, room)
    if room < 0:
        raise TooLarge("more than 64 MB")
    return room


def joined(separator: str, items: Iterable[str]) -> str:
    """Return ``separator.join(items)``.

    Raises:
        TooLarge: that would be larger than a template may make.
    """
    parts, size = [], 0
    for item in items:
        parts.append(item)
        size += len(item) + len(separator)
        if size > MAX_RENDER + len(separator):
            raise TooLarge("more than 64 MB")
    return separator.join(parts)


def limited_format(text: str, function: Callable[..., str]) -> Callable[..., str]:
    """Return the method ``format`` of ``text`` such that it pads to no great width."""

    def limited(*args: Any, **kwargs: Any) -> str:
        _check_format(text, *args, **kwargs)
        return function(*args, **kwargs)

    return limited


def check_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse to call a method of a text or a number that would make something very large.

    Raises:
        TooLarge: it would.
    """
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, (str, bytes, int)):
        return
    arguments = (*args, *kwargs.values())
    _fits(*(abs(value) for value in arguments if isinstance(value, int)))
    if not isinstance(owner, str):
        return
    name = getattr(function, "__name__", "")
    if name == "replace" and len(args) > 1:
        _fits_replaced(owner, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _fits(len(owner) * len(args[0]), *(len(item) for item in args[0] if isinstance(item, str)))
    elif name == "expandtabs" and args and isinstance(args[0], int):
        _fits(owner.count("\t") * args[0])
    elif name == "translate" and args and isinstance(args[0], dict):
        _fits(len(owner) * max((len(v) for v in args[0].values() if isinstance(v, str)), default=0))


def _fits_replaced(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _fits(len(text), text.count(old) * len(new))


def _fits_format(text: str) -> None:
    for number in _LONG_NUMBER.findall(text):
        _fits(float(number))


def _limited(name: str, check: Callable[..., None]) -> Any:
    """Wrap a filter of Jinja so that ``check`` sees its arguments first."""
    original = FILTERS[name]
    marker = "jinja_pass_arg"  # what a filter gets before its value: a context of Jinja
    before = 1 if hasattr(original, marker) else 0

    def limited(*args: Any, **kwargs: Any) -> Any:
        check(*args[before:], **kwargs)
        return original(*args, **kwargs)

    if before:
        setattr(limited, marker, getattr(original, marker))
    return limited


def _check_number(value: Any, *args: Any, **kwargs: Any) -> None:
    for number in (*args, *kwargs.values()):
        if isinstance(number, int):
            _fits(abs(number))


def _check_indent(value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> None:
    size = width if isinstance(width, int) else len(str(width))
    _fits((str(value).count("\n") + 1) * size)


def _check_slices(value: Any, count: Any = 1, *args: Any, **kwargs: Any) -> None:
    if isinstance(count, int) and abs(count) > MAX_SLICES:
        raise TooLarge(f"more than {MAX_SLICES:,} parts")


def _check_length(value: Any, *args: Any, **kwargs: Any) -> None:
    if len(str(value)) > MAX_SCANNED:
        raise TooLarge(f"more than {MAX_SCANNED >> 20} MB for a filter")


def _check_wrap(value: Any, width: Any = 79, *args: Any, **kwargs: Any) -> None:
    """Each piece that is cut off a long word copies the rest of it."""
    _check_length(value)
    longest = max(map(len, str(value).split()), default=0)
    if isinstance(width, int) and longest * longest > MAX_COPIED * max(1, width):
        raise TooLarge("more than 1 GB of copies to cut a word")


def _check_links(value: Any, *args: Any, **kwargs: Any) -> None:
    """The attributes are written into each link."""
    _check_length(value)
    text = str(value)
    added = sum(
        len(argument) for argument in (*args, *kwargs.values()) if isinstance(argument, str)
    )
    _fits(added * sum(map(text.count, ".@:")))


def _check_round(value: Any, precision: Any = 0, *args: Any, **kwargs: Any) -> None:
    if isinstance(precision, int) and abs(precision) > 1000:
        raise TooLarge("more than 1,000 digits")


def _check_replace(value: Any, old: Any, new: Any, *args: Any, **kwargs: Any) -> None:
    _fits_replaced(str(value), old, new)


def _check_format(value: Any, *args: Any, **kwargs: Any) -> None:
    _fits_format(str(value))
    _check_number(value, *args, **kwargs)


FILTERS_WITH_LIMITS: Mapping[str, Any] = {
    _TICK: _tick_filter,
    _TICKING: _ticking_filter,
    "center": _limited("center", _check_number),
    "indent": _limited("indent", _check_indent),
    "batch": _limited("batch", _check_slices),
    "slice": _limited("slice", _check_slices),
    "round": _limited("round", _check_round),
    "replace": _limited("replace", _check_replace),
    "format": _limited("format", _check_format),
    **{name: _limited(name, _check_length) for name in ("striptags", "title", "wordcount")},
    "wordwrap": _limited("wordwrap", _check_wrap),
    "urlize": _limited("urlize", _check_links),
}
