"""The sandbox of prompt templates.

Text prints as it is, every other value as compact JSON. Fields come before methods: ``row.items``
is the field ``items`` where the row has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from types import FunctionType, MethodType
from typing import Any

from jinja2 import StrictUndefined, TemplateRuntimeError, UndefinedError, nodes
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace, missing

from bagent.job.templates.limits import (
    FILTERS_WITH_LIMITS,
    ITEM_SIZE,
    MAX_RENDER,
    TooLarge,
    add_ticks,
    check_call,
    check_printed,
    joined,
    limited_format,
    spend,
)

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
