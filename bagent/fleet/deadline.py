"""When a run must have ended, and what ``--deadline`` may say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

import msgspec

from bagent.errors import UsageError

MARGIN = 60.0
"""Seconds before the deadline at which a run stops feeding."""

LONGEST = 90 * 86400.0
"""A longer duration, in seconds, is surely a date or Unix time without its ``@``."""

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s?)?", re.ASCII)
_UNITS = (86400.0, 3600.0, 60.0, 1.0)


class Deadline(msgspec.Struct, frozen=True):
    """``at``: Unix seconds at which the process will be killed; ``margin``: seconds before it."""

    at: float
    margin: float = MARGIN

    @property
    def stop_feeding_at(self) -> float:
        """Unix seconds from which no new row is sent."""
        return self.at - self.margin


def read_deadline(
    text: str, env: Mapping[str, str], now: float, *, margin: float = MARGIN
) -> Deadline | None:
    """The deadline that ``text`` names: ``auto``, ``none``, ``55m``, an ISO time or ``@EPOCH``.

    ``auto`` reads BAGENT_DEADLINE (any of the other forms) and SLURM_JOB_END_TIME (Unix
    seconds). ``now`` is Unix seconds; an ISO time without offset is local time.

    Raises:
        UsageError: it is none of these forms.
    """
    text = text.strip()
    if text.lower() in ("none", ""):
        return None
    if text.lower() == "auto":
        return _from_environment(env, now, margin)
    if text.startswith("@"):
        at = _seconds(text[1:])
        if at is None:
            raise _bad(text)
        return Deadline(at, margin)
    match = _DURATION.fullmatch(text.removeprefix("+").lower())
    if match and any(match.groups()):
        seconds = sum(float(n or 0) * unit for n, unit in zip(match.groups(), _UNITS, strict=True))
        if seconds > LONGEST:
            raise _bad(text)
        return Deadline(now + seconds, margin)
    try:
        # An aware time, or one without offset: both become Unix seconds, the latter as local time.
        return Deadline(datetime.fromisoformat(text).timestamp(), margin)
    except (ValueError, OverflowError, OSError):
        raise _bad(text) from None


def _from_environment(env: Mapping[str, str], now: float, margin: float) -> Deadline | None:
    named = env.get("BAGENT_DEADLINE", "").strip()
    if named and named.lower() != "auto":
        try:
            return read_deadline(named, env, now, margin=margin)
        except UsageError as error:
            raise UsageError(f"BAGENT_DEADLINE: {error.message}", hint=error.hint) from None
    end = _seconds(env.get("SLURM_JOB_END_TIME", "").strip())
    return Deadline(end, margin) if end is not None else None


def _seconds(text: str) -> float | None:
    return float(text) if re.fullmatch(_NUMBER, text, re.ASCII) else None


def _bad(text: str) -> UsageError:
    return UsageError(
        f"not a deadline: {text!r}",
        hint="write auto, none, 55m, 1h30m, 2026-01-31T18:00 or @UNIX_SECONDS",
    )
