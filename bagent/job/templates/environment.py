"""The sandbox of prompt templates, and its limits of time and memory.

Text prints as it is, every other value as compact JSON. Fields come before methods: ``row.items``
is the field ``items`` where the row has one. Limits are needed because a template that loops for
hours or pads a text to a gigabyte would block the whole run, signals included.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from types import FunctionType, MethodType
from typing import Any

from jinja2 import StrictUndefined, TemplateRuntimeError, UndefinedError, nodes, pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace, missing

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


HELPERS: dict[str, Any] = {
    "range": safe_range,
    "dict": dict,
    "namespace": Namespace,
    "cycler": Cycler,
    "joiner": Joiner,
}
"""Names that every template may use; a field of the same name comes first."""

_VIEWS = (Iterator, range, KeysView, ValuesView, ItemsView)
# Marks a name in a compiled template as one that is called.
_CALLED = "\0"
_CALLED_NAMES = frozenset({"items", "keys", "values", "get"})


class MissingField(UndefinedError):
    """A template used a name that the row does not have; ``name`` may be dotted."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the row has no field {name}")
        self.name = name


class MissingValue(StrictUndefined):
    """What a missing name is: may be tested and defaulted, at any depth; never printed or used."""

    __slots__ = ()

    def __init__(
        self,
        hint: str | None = None,
        obj: Any = missing,
        name: str | None = None,
        exc: type[TemplateRuntimeError] = MissingField,
    ) -> None:
        super().__init__(hint, obj, name, exc)

    @property
    def _undefined_message(self) -> str:
        return self._undefined_hint or str(self._undefined_name)

    def child(self, name: str) -> MissingValue:
        """Return what the field ``name`` of a missing value is."""
        if self._undefined_hint:
            return self
        return MissingValue(name=f"{self._undefined_name}.{name}")


class JsonLines(list[Any]):
    """A list that prints as one compact JSON line for each item."""


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """The environment of all prompt templates."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self) -> None:
        super().__init__(
            undefined=MissingValue,
            finalize=to_text,
            autoescape=False,
            keep_trailing_newline=True,
        )
        # Helpers are handed to templates that use them, so that a row's fields come first.
        self.globals.clear()
        self.filters.update(FILTERS_WITH_LIMITS)
        self.filters["tojson"] = _tojson
        self.filters["join"] = _join
        self.filters["string"] = to_text
        # A prompt must come out the same each time that a row is sent.
        del self.filters["random"]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Fields of a mapping first, then attributes that the sandbox allows."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        name = attribute.removeprefix(_CALLED)
        if isinstance(obj, MissingValue):
            return obj.child(name)
        return super().getattr(obj, name)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item, or a missing value with its name; never an attribute of a mapping."""
        if isinstance(obj, MissingValue):
            return obj.child(str(argument))
        if isinstance(obj, dict):
            try:
                return obj[argument]
            except (KeyError, TypeError):
                return MissingValue(obj=obj, name=str(argument))
        if isinstance(obj, (list, tuple)) and isinstance(argument, int):
            if -len(obj) <= argument < len(obj):
                return obj[argument]
            hint = f"a list of {len(obj)} has no item {argument}"
            return MissingValue(hint, exc=UndefinedError)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep methods of texts from making more text than a template may."""
        check_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the method ``format`` of a text, which the sandbox wraps, with bounds."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        return limited_format(value.__self__, wrapped)

    def call_binop(self, context: Context, operator: str, lhs: Any, rhs: Any) -> Any:
        """Keep operators from making texts and numbers without bound."""
        if _size(operator, lhs, rhs) > MAX_RENDER:
            raise TooLarge("more than 64 MB")
        return super().call_binop(context, operator, lhs, rhs)


def _size(operator: str, lhs: Any, rhs: Any) -> int:
    """About how many characters the value of an operator would have."""
    if operator == "+":
        for kind, size in ((str, 1), ((list, tuple), ITEM_SIZE)):
            if isinstance(lhs, kind) and isinstance(rhs, kind):
                return (len(lhs) + len(rhs)) * size
        return 0
    if operator == "**" and isinstance(lhs, int) and isinstance(rhs, int):
        # Digits cost more time than letters do: a power of 4 million bits takes a second.
        return lhs.bit_length() * rhs * 16
    for text, count in ((lhs, rhs), (rhs, lhs)):
        if isinstance(text, (str, list, tuple)) and isinstance(count, int):
            return len(text) * count * (1 if isinstance(text, str) else ITEM_SIZE)
    return 0


def to_text(value: Any) -> str:
    """Return how a value prints: text as it is, everything else as compact JSON."""
    if isinstance(value, str):
        spend(value)
        return value
    if type(value) is int:
        # As JSON prints it, without the encoder's microseconds.
        return str(value)
    if isinstance(value, Undefined):
        return str(value)
    if isinstance(value, JsonLines):
        return joined("\n", (_encode(item) for item in value))
    if isinstance(value, (MethodType, FunctionType)) or callable(value):
        raise MissingField(getattr(value, "__name__", "?"))
    if isinstance(value, _VIEWS):
        value = list(value)
    if isinstance(value, (list, tuple, dict)):
        check_printed(value)
    return _encode(value)


def prepare(tree: nodes.Template) -> None:
    """Change a parsed template to what prompts need.

    ``~`` joins its operands as they print, instead of as Python shows them. ``row.items()``
    calls the method even where the row has a field of that name.
    """
    for concat in tree.find_all(nodes.Concat):
        concat.nodes = [
            nodes.Filter(
                node, "string", [], [], None, None, lineno=node.lineno, environment=node.environment
            )
            for node in concat.nodes
        ]
    add_ticks(tree)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _CALLED_NAMES:
            call.node.attr = _CALLED + call.node.attr


def _other(value: Any) -> Any:
    if isinstance(value, Undefined):
        str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", "replace")
    if isinstance(value, _VIEWS):
        return list(value)
    if callable(value):
        raise MissingField(getattr(value, "__name__", "?"))
    if type(value).__module__.startswith("jinja2"):
        raise TypeError(f"a {type(value).__name__} is not a value to print")
    return str(value)


_encode: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), default=_other
).encode


def _tojson(value: Any, indent: int | None = None) -> str:
    """Apply the filter ``tojson``: plain JSON, nothing escaped for HTML, keys in order."""
    if isinstance(value, Undefined):
        str(value)
    if isinstance(value, (list, tuple, dict)):
        check_printed(value)
    if indent is None:
        return _encode(value)
    return json.dumps(value, ensure_ascii=False, indent=min(indent, 16), default=_other)


def _join(value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Apply the filter ``join`` to items as they print."""
    if isinstance(value, dict):
        value = value.keys()
    if attribute is not None:
        value = (_attribute(item, attribute) for item in value)
    return joined(to_text(d), (to_text(item) for item in value))


def _attribute(item: Any, attribute: str | int) -> Any:
    environment = ENVIRONMENT
    for part in str(attribute).split("."):
        item = environment.getitem(item, int(part) if part.isdecimal() else part)
    return item


ENVIRONMENT = PromptEnvironment()
"""The one environment: it holds no state of any job."""
