"""Durations written as text: ``250ms``, ``10s``, ``1h30m``, or a number of seconds."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta

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
    # Without ASCII the letter "ſ" counts as a capital "s".
    flags = re.IGNORECASE | re.ASCII
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    elif re.fullmatch(rf"(?:{part}\s*)+", text, flags):
        parts = re.findall(part, text, flags)
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


_CLOCK_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)", re.ASCII)


def time_by(text: str, start: float) -> float:
    """Return the Unix time that a duration after ``start``, or the next ``HH:MM``, names.

    Args:
        text: a duration, or a time of the local clock.
        start: Unix seconds.

    Raises:
        ValueError: it is neither, or no time after ``start``.
    """
    match = _CLOCK_TIME.fullmatch(text.strip())
    if match is None:
        seconds = parse_duration(text)
        if seconds <= 0:
            raise ValueError(f"{text} is no time to come")
        return start + seconds
    began = datetime.fromtimestamp(start)
    at = began.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
    if at <= began:
        at += timedelta(days=1)
    return at.timestamp()
