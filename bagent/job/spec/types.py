"""What the sections of a job file share: types of values, and the base model.

A kind is part of an annotation, ``Annotated[int, IntegerKind(1, 1000)]``, and gives pydantic both
the validator and the JSON Schema. Messages name what was expected and what was found.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from bagent.errors import Position
from bagent.job.validation import LoadContext
from bagent.job.yaml.parser import YamlMap
from bagent.job.yaml.scalars import SourceText, parse_number, plain
from bagent.text.durations import parse_duration
from bagent.text.suggest import describe_value, did_you_mean
from bagent.types import Json

VARIABLE: Json = {"type": "string", "pattern": r"\$\{"}
"""In the JSON Schema: a ``${VAR}`` may stand where a number or a word is expected."""

TEXT: Json = {"type": ["string", "number"]}
"""In the JSON Schema: text; a number in its place is read as it was written."""


def invalid(message: str, hint: str = "", *, key: str = "") -> PydanticCustomError:
    """Make the error of a validator; ``key`` is the path of the faulty key inside the value."""
    return PydanticCustomError(
        "bagent", "{message}", {"message": message, "hint": hint, "key": key}
    )


def as_number(value: object) -> int | float | None:
    """Return the number that ``value`` is, a whole ``${VAR}`` included; None where it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, SourceText) and value.from_variable:
        return parse_number(value)
    return value if isinstance(value, (int, float)) else None


class Kind(ABC):
    """Base of all kinds; a subclass gives :meth:`read` and :meth:`describe`."""

    @abstractmethod
    def read(self, value: Any, context: LoadContext | None) -> Any:
        """Return the checked value.

        Raises:
            PydanticCustomError: by :func:`wrong`.
        """

    @abstractmethod
    def describe(self) -> Json:
        """Return the JSON Schema of what :meth:`read` accepts."""

    def dump(self, value: Any) -> Json:
        """Return the value, never None, as JSON; reading that again gives an equal value."""
        return value

    def dump_none(self) -> Json:
        """Return None as JSON; null stands for the default."""
        return None

    def _dump(self, value: Any) -> Json:
        return self.dump_none() if value is None else self.dump(value)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            lambda value, info: self.read(value, info.context),
            serialization=core_schema.plain_serializer_function_ser_schema(
                self._dump, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> Json:
        return self.describe()


@dataclass(frozen=True)
class Text(Kind):
    """Text. A number in its place is taken as it was written: ``08`` is the text 08."""

    empty: bool = True

    def read(self, value: Any, context: LoadContext | None) -> str:
        """Return the text, as it was written."""
        text = getattr(value, "source", value)
        if not isinstance(text, str):
            raise invalid(f"expected text, got {describe_value(value)}", _quote(value))
        if not self.empty and not text.strip():
            raise invalid("expected text, got an empty one")
        return str(text)

    def describe(self) -> Json:
        """Text; numbers are read as text."""
        return TEXT


@dataclass(frozen=True)
class TextList(Kind):
    """A list of texts, or one text for a list of one."""

    least: int = 0

    def read(self, value: Any, context: LoadContext | None) -> tuple[str, ...]:
        """Return the texts, at least ``least`` of them."""
        items = value if isinstance(value, (list, tuple)) else [value]
        texts = tuple(Text().read(item, context) for item in items)
        if len(texts) < self.least:
            raise invalid("expected at least one text, got an empty list")
        return texts

    def dump(self, value: Any) -> Json:
        """Return the list; None where it is shorter than one may be written."""
        return list(value) if len(value) >= self.least else None

    def describe(self) -> Json:
        """One text, or a list of texts."""
        return {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": self.least}]}


@dataclass(frozen=True)
class TextMap(Kind):
    """A mapping from text to text."""

    def read(self, value: Any, context: LoadContext | None) -> Mapping[str, str]:
        """Return the mapping, each value as it was written."""
        if not isinstance(value, dict):
            raise invalid(f"expected a mapping of text to text, got {describe_value(value)}")
        return {str(key): self._item(str(key), item, context) for key, item in value.items()}

    def _item(self, key: str, value: Any, context: LoadContext | None) -> str:
        text = getattr(value, "source", value)
        if not isinstance(text, str):
            raise invalid(
                f"{key}: expected text, got {describe_value(value)}", _quote(value), key=key
            )
        return str(text)

    def describe(self) -> Json:
        """Return an object whose values are text."""
        return {"type": "object", "additionalProperties": TEXT}


@dataclass(frozen=True)
class Choice(Kind):
    """One of several words; ``of`` is the Literal type that lists them."""

    of: Any

    def read(self, value: Any, context: LoadContext | None) -> str:
        """Return the word; the error for another one suggests the nearest."""
        choices = get_args(self.of)
        if isinstance(value, str) and value in choices:
            return str(value)
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise invalid(f"expected {either(choices)}, got {describe_value(value)}", hint)

    def describe(self) -> Json:
        """Return the words."""
        return {"anyOf": [{"enum": list(get_args(self.of))}, VARIABLE]}


@dataclass(frozen=True)
class Flag(Kind):
    """``true`` or ``false``, or one of ``keywords``."""

    keywords: tuple[str, ...] = ()

    def read(self, value: Any, context: LoadContext | None) -> bool | str:
        """Return true, false or the word; the error for ``yes`` and ``no`` says what to write."""
        if isinstance(value, bool):
            return value
        if isinstance(value, SourceText) and value.from_variable and value in ("true", "false"):
            return value == "true"
        if isinstance(value, str) and value in self.keywords:
            return str(value)
        word = value.lower() if isinstance(value, str) else ""
        meant = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(word, "")
        hint = f"write {meant}" if meant else did_you_mean(word, (*self.keywords, "true", "false"))
        raise invalid(
            f"expected {either((*self.keywords, 'true', 'false'))}, got {describe_value(value)}",
            hint,
        )

    def describe(self) -> Json:
        """Return the two values and the words."""
        return {"anyOf": [{"enum": [*self.keywords, True, False]}, VARIABLE]}


@dataclass(frozen=True)
class IntegerKind(Kind):
    """A whole number from ``low`` to ``high``, or one of ``keywords``; ``1e2`` is whole.

    The word ``none`` gives None.
    """

    low: int
    high: int | None = None
    keywords: tuple[str, ...] = ()

    def read(self, value: Any, context: LoadContext | None) -> int | str | None:
        """Return the number within its bounds, a word, or None for ``none``."""
        if isinstance(value, str) and value in self.keywords:
            return _word(value)
        number = as_number(value)
        if number is None:
            expected = either((*self.keywords, "a whole number"))
            raise invalid(
                f"expected {expected}, got {describe_value(value)}",
                _number_hint(value, self.keywords),
            )
        if not math.isfinite(number) or number != int(number):
            raise invalid(f"expected a whole number, got {describe_value(value)}")
        _check_range(number, self.low, self.high, value)
        return int(number)

    def describe(self) -> Json:
        """Return an integer within its bounds, or a word."""
        number: dict[str, Json] = {"type": "integer", "minimum": self.low}
        if self.high is not None:
            number["maximum"] = self.high
        choices = [{"enum": list(self.keywords)}] if self.keywords else []
        return {"anyOf": [number, *choices, VARIABLE]}


@dataclass(frozen=True)
class NumberKind(Kind):
    """A finite number from ``low`` to ``high``; with ``above`` it must be more than ``low``.

    The word ``none``, where ``keywords`` has it, gives None.
    """

    low: float
    high: float | None = None
    above: bool = False
    keywords: tuple[str, ...] = ()

    def read(self, value: Any, context: LoadContext | None) -> float | str | None:
        """Return the number within its bounds, a word, or None for ``none``."""
        if isinstance(value, str) and value in self.keywords:
            return _word(value)
        number = as_number(value)
        if number is None:
            expected = either((*self.keywords, "a number"))
            raise invalid(
                f"expected {expected}, got {describe_value(value)}",
                _number_hint(value, self.keywords),
            )
        if not math.isfinite(number):
            raise invalid(f"expected a finite number, got {describe_value(value)}")
        if self.above and number <= self.low:
            raise invalid(f"must be more than {_bound(self.low)}, got {describe_value(value)}")
        _check_range(number, self.low, self.high, value)
        return float(number)

    def describe(self) -> Json:
        """Return a number within its bounds, or a word."""
        least = "exclusiveMinimum" if self.above else "minimum"
        number: dict[str, Json] = {"type": "number", least: self.low}
        if self.high is not None:
            number["maximum"] = self.high
        choices = [{"enum": list(self.keywords)}] if self.keywords else []
        return {"anyOf": [number, *choices, VARIABLE]}


@dataclass(frozen=True)
class FreeForm(Kind):
    """Any JSON value, passed on as it is; with ``mapping`` only a mapping."""

    mapping: bool = False

    def read(self, value: Any, context: LoadContext | None) -> Json:
        """Return the value as plain JSON values."""
        if self.mapping and not isinstance(value, dict):
            raise invalid(f"expected a mapping, got {describe_value(value)}")
        for key, number in _not_finite(value):
            raise invalid(f"expected a finite number, got {describe_value(number)}", key=key)
        return plain(value)

    def describe(self) -> Json:
        """Anything, or any object."""
        return {"type": "object"} if self.mapping else {}


def _not_finite(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the infinities and NaN in ``value``, which JSON does not have, each after its path."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    items: Iterable[tuple[object, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from _not_finite(item, f"{path}.{key}" if path else str(key))


def either(options: tuple[str, ...]) -> str:
    """Return ``a, b or c``."""
    return f"{', '.join(options[:-1])} or {options[-1]}" if len(options) > 1 else options[0]


def _word(value: str) -> str | None:
    return None if value == "none" else str(value)


def _bound(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _check_range(number: float, low: float, high: float | None, value: Any) -> None:
    if number < low:
        raise invalid(f"must be at least {_bound(low)}, got {describe_value(value)}")
    if high is not None and number > high:
        raise invalid(f"must be at most {_bound(high)}, got {describe_value(value)}")


def _quote(value: Any) -> str:
    return "quote it to make it text" if isinstance(value, bool) else ""


def _number_hint(value: Any, keywords: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        return ""
    if parse_number(value) is not None:
        return "remove the quotes"
    if parse_number(value.replace("_", "").replace(",", "")) is not None:
        return f"write {value.replace('_', '').replace(',', '')}"
    return did_you_mean(value, keywords)


_MINUTES = re.compile(r"([0-9]+):([0-5][0-9])")
_CLOCK = re.compile(r"([0-9]+):([0-5][0-9]):([0-5][0-9])")
_PER_SECOND = {"s": 1.0, "m": 60.0, "h": 3600.0}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*/\s*(s|m|h)")


@dataclass(frozen=True)
class Duration(Kind):
    """Seconds, from ``10s``, ``5m``, ``1h30m``, ``250ms`` or a number; ``none`` = no limit (None).

    ``keywords`` are further words that stand for themselves. ``clock`` allows ``HH:MM:SS``, and
    ``finite`` does not allow ``none``.
    """

    keywords: tuple[str, ...] = ()
    clock: bool = False
    finite: bool = False

    def read(self, value: Any, context: LoadContext | None) -> float | str | None:
        """Seconds, more than 0; a word; None for ``none``."""
        if isinstance(value, str) and value in self.keywords:
            return str(value)
        if isinstance(value, str) and value == "none" and not self.finite:
            return None
        seconds = self._seconds(value)
        if seconds is None or not math.isfinite(seconds):
            more = () if self.finite else ("none",)
            expected = either((*self.keywords, "a duration like 10s, 5m or 1h30m", *more))
            raise invalid(f"expected {expected}, got {describe_value(value)}", self._hint(value))
        if seconds <= 0:
            hint = "" if self.finite else "none = no limit"
            raise invalid(f"must be more than 0, got {describe_value(value)}", hint)
        return seconds

    def _seconds(self, value: Any) -> float | None:
        number = as_number(value)
        if number is not None or not isinstance(value, str):
            return number if number is None else float(number)
        clock = _CLOCK.fullmatch(value.strip()) if self.clock else None
        if clock:
            hours, minutes, seconds = (int(part) for part in clock.groups())
            return float(hours * 3600 + minutes * 60 + seconds)
        # A number in quotes is as wrong here as it is for any other number.
        if parse_number(value.strip()) is not None:
            return None
        try:
            return parse_duration(value)
        except ValueError:
            return None

    def _hint(self, value: Any) -> str:
        if isinstance(value, str):
            number = parse_number(value.strip())
            if number is not None and math.isfinite(number):
                return "remove the quotes"
            if match := _MINUTES.fullmatch(value.strip()):
                return f"write {match[1]}m{match[2]}s"
        return "" if self.finite or isinstance(value, (dict, list)) else "none = no limit"

    def dump_none(self) -> Json:
        """No limit is written ``none``."""
        return "none"

    def describe(self) -> Json:
        """Return a number of seconds, a text such as ``1h30m``, or a word."""
        text = r"^(\s*[0-9]+(\.[0-9]+)?\s*(ms|s|m|h|d))+\s*$"
        patterns: list[Json] = [{"type": "string", "pattern": text}]
        if self.clock:
            patterns.append({"type": "string", "pattern": f"^{_CLOCK.pattern}$"})
        number = {"type": "number", "exclusiveMinimum": 0}
        choices = [*([] if self.finite else ["none"]), *self.keywords]
        if not choices:
            return {"anyOf": [number, *patterns, VARIABLE]}
        return {"anyOf": [number, *patterns, {"enum": choices}, VARIABLE]}


@dataclass(frozen=True)
class RateKind(Kind):
    """Events per second, from a number (per second) or ``5/s``, ``100/m``, ``1000/h``."""

    def read(self, value: Any, context: LoadContext | None) -> float:
        """Events per second, more than 0."""
        number = as_number(value)
        if isinstance(value, str) and number is None:
            match = _RATE.fullmatch(value.strip())
            number = float(match[1]) / _PER_SECOND[match[2]] if match else None
        if number is None or not math.isfinite(number):
            raise invalid(f"expected a rate like 5/s or 100/m, got {describe_value(value)}")
        if number <= 0:
            raise invalid(f"must be more than 0, got {describe_value(value)}")
        return float(number)

    def describe(self) -> Json:
        """Return a number, or a text such as ``100/m``."""
        text = {"type": "string", "pattern": f"^{_RATE.pattern}$"}
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, text, VARIABLE]}


class Section(BaseModel):
    """A frozen mapping of known keys.

    A blank key (``model:``) means its default. An unknown key is a fault with position and the
    near name; ``misplaced`` gives better hints for keys that people often try.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    misplaced: ClassVar[Mapping[str, str]] = {}
    short_form: ClassVar[list[Json]] = []

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Return the long form of a short one, such as ``prompt: TEXT``; other data as they are."""
        return data

    @classmethod
    def known_keys(cls) -> list[str]:
        """Return the keys as the user writes them."""
        return [item.alias or name for name, item in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _read_keys(cls, data: Any, info: ValidationInfo) -> Any:
        if isinstance(data, BaseModel):
            return data
        data = cls.expand(data)
        if not isinstance(data, dict):
            raise invalid(f"expected a mapping of keys, got {describe_value(data)}")
        known_keys = cls.known_keys()
        values: dict[str, Any] = {}
        for key, value in data.items():
            if key in known_keys:
                if value is not None:
                    values[key] = value
            elif not cls._note_unknown(data, key, info.context):
                values[key] = value
        return values

    @classmethod
    def _note_unknown(cls, data: Any, key: str, context: LoadContext | None) -> bool:
        """Add the error at its own position; return False without a context."""
        if context is None:
            return False
        at = data.spots[key].key_at if isinstance(data, YamlMap) else Position(context.folder)
        hint = cls.misplaced.get(key) or did_you_mean(key, cls.known_keys())
        context.problems.add(at, f"unknown key {key}", hint or f"known: {cls._known_text()}")
        return True

    @classmethod
    def _known_text(cls) -> str:
        return " ".join(cls.known_keys())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> Json:
        described = handler(schema)
        # The definition itself is changed, so that every reference to it allows both forms.
        target = handler.resolve_ref_schema(described)
        short = cls.short_forms(target)
        if short:
            long_form = dict(target)
            target.clear()
            target["anyOf"] = [*short, long_form]
        return described

    @classmethod
    def short_forms(cls, long_form: dict[str, Any]) -> list[Json]:
        """Return the JSON Schemas of the short forms, beside ``long_form``."""
        return list(cls.short_form)
