"""Kinds of values in a job file that speak of time: durations and rates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from bagent.job.context import LoadContext
from bagent.job.kinds import VARIABLE, Kind, as_number, either, wrong
from bagent.job.scalars import parse_number, read_duration
from bagent.job.words import shown
from bagent.types import Json

_MINUTES = re.compile(r"([0-9]+):([0-5][0-9])")
_CLOCK = re.compile(r"([0-9]+):([0-5][0-9]):([0-5][0-9])")
_PER_SECOND = {"s": 1.0, "m": 60.0, "h": 3600.0}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*/\s*(s|m|h)")


@dataclass(frozen=True)
class Duration(Kind):
    """Seconds, from ``10s``, ``5m``, ``1h30m``, ``250ms`` or a number; ``none`` = no limit (None).

    ``words`` are further words that stand for themselves. ``clock`` allows ``HH:MM:SS``, and
    ``finite`` does not allow ``none``.
    """

    words: tuple[str, ...] = ()
    clock: bool = False
    finite: bool = False

    def read(self, value: Any, context: LoadContext | None) -> float | str | None:
        """Seconds, more than 0; a word; None for ``none``."""
        if isinstance(value, str) and value in self.words:
            return str(value)
        if isinstance(value, str) and value == "none" and not self.finite:
            return None
        seconds = self._seconds(value)
        if seconds is None or not math.isfinite(seconds):
            more = () if self.finite else ("none",)
            expected = either((*self.words, "a duration like 10s, 5m or 1h30m", *more))
            raise wrong(f"expected {expected}, got {shown(value)}", self._hint(value))
        if seconds <= 0:
            hint = "" if self.finite else "none = no limit"
            raise wrong(f"must be more than 0, got {shown(value)}", hint)
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
            return read_duration(value)
        except ValueError:
            return None

    def _hint(self, value: Any) -> str:
        if isinstance(value, str):
            number = parse_number(value.strip())
            if number is not None and math.isfinite(number):
                return "remove the quotes"
            if found := _MINUTES.fullmatch(value.strip()):
                return f"write {found[1]}m{found[2]}s"
        return "" if self.finite or isinstance(value, (dict, list)) else "none = no limit"

    def dump_none(self) -> Json:
        """No limit is written ``none``."""
        return "none"

    def describe(self) -> Json:
        """A number of seconds, a text such as ``1h30m``, or a word."""
        text = r"^(\s*[0-9]+(\.[0-9]+)?\s*(ms|s|m|h|d))+\s*$"
        patterns: list[Json] = [{"type": "string", "pattern": text}]
        if self.clock:
            patterns.append({"type": "string", "pattern": f"^{_CLOCK.pattern}$"})
        number = {"type": "number", "exclusiveMinimum": 0}
        words = [*([] if self.finite else ["none"]), *self.words]
        if not words:
            return {"anyOf": [number, *patterns, VARIABLE]}
        return {"anyOf": [number, *patterns, {"enum": words}, VARIABLE]}


@dataclass(frozen=True)
class Rate(Kind):
    """Events per second, from a number (per second) or ``5/s``, ``100/m``, ``1000/h``."""

    def read(self, value: Any, context: LoadContext | None) -> float:
        """Events per second, more than 0."""
        number = as_number(value)
        if isinstance(value, str) and number is None:
            found = _RATE.fullmatch(value.strip())
            number = float(found[1]) / _PER_SECOND[found[2]] if found else None
        if number is None or not math.isfinite(number):
            raise wrong(f"expected a rate like 5/s or 100/m, got {shown(value)}")
        if number <= 0:
            raise wrong(f"must be more than 0, got {shown(value)}")
        return float(number)

    def describe(self) -> Json:
        """A number, or a text such as ``100/m``."""
        text = {"type": "string", "pattern": f"^{_RATE.pattern}$"}
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, text, VARIABLE]}
