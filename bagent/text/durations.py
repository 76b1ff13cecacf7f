"""Durations written as text: ``250ms``, ``10s``, ``1h30m``, or a number of seconds."""

from __future__ import annotations

import math
import re

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = r"([0-9]+(?:\.[0-9]+)?)\s*(ms|[smhd])"
LONG_PART = (
    r"([0-9]+(?:\.[0-9]+)?)\s*"
    r"(ms|milliseconds?|seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|[smhd])"
)
"""Pattern of a number and its unit, also written out as servers do."""

_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def parse_duration(text: str, *, long_units: bool = False) -> float:
    """Return the seconds that ``text`` names.

    Args:
        text: a number of seconds, or numbers with the units ms, s, m, h and d.
        long_units: also take units such as ``seconds`` and ``mins``.

    Raises:
        ValueError: it is no duration, or not finite.
    """
    text = text.strip()
    part = LONG_PART if long_units else _PART
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    elif re.fullmatch(rf"(?:{part}\s*)+", text, re.IGNORECASE):
        parts = re.findall(part, text, re.IGNORECASE)
        # Rounded to nanoseconds: 1.1 s is not to become 1.1000000000000001 s.
        seconds = round(sum(float(amount) * _unit_seconds(unit) for amount, unit in parts), 9)
    else:
        raise ValueError(f"{text} is no duration")
    if not math.isfinite(seconds):
        raise ValueError(f"{text} is no usable duration")
    return seconds


def _unit_seconds(unit: str) -> float:
    unit = unit.lower()
    return _SECONDS["ms" if unit.startswith(("ms", "mil")) else unit[0]]
