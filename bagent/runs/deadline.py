"""The deadline of a run, and the values of ``--deadline``.

:mod:`bagent.runs.shutdown` stops the run before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime

import msgspec

from bagent.errors import UsageError
from bagent.hpc.allocation import Allocation, end_variable, read_allocation

MARGIN, SHARE = 60.0, 0.25
"""A run stops feeding 60 s before the deadline, or at a quarter of the remaining time."""

VARIABLE = "BAGENT_DEADLINE"

LONGEST = 90 * 86400.0
"""Longest duration in seconds; a longer one is a date or a Unix time without its ``@``."""

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s?)?", re.ASCII)
"""Unlike other durations: units in order, no milliseconds, and ``2m30`` is 150 s."""
_UNITS = (86400.0, 3600.0, 60.0, 1.0)


class Deadline(msgspec.Struct, frozen=True):
    """The time at which the process will be killed."""

    at: float
    """Unix seconds."""
    margin: float = MARGIN
    """Seconds before the deadline at which the run stops feeding."""
    source: str = "--deadline"
    """The option, variable or scheduler that set it."""

    @property
    def stop_feeding_at(self) -> float:
        """Unix seconds from which no new row is sent."""
        return self.at - self.margin


def end_from_environment(allocation: Allocation) -> float | None:
    """Return the end of the batch job by its environment variables, in Unix seconds."""
    return allocation.end


def read_deadline(
    text: str,
    env: Mapping[str, str],
    now: float,
    *,
    margin: float | None = None,
    job_end: Callable[[Allocation], float | None] = end_from_environment,
    warn: Callable[[str], None] = lambda _: None,
) -> Deadline | None:
    """Parse a deadline: ``auto``, ``none``, ``55m``, an ISO time or ``@EPOCH``.

    ``auto`` is BAGENT_DEADLINE (any of the other forms), else the end of the batch job around
    this process, else none. An ISO time without offset is local time.

    Args:
        now: Unix seconds.
        margin: None is the default margin, which shrinks where little time remains.
        job_end: finds the end of the batch job.
        warn: called where the variables of a batch job outlived it; their end is ignored.

    Raises:
        UsageError: it is none of these forms.
    """
    text = text.strip()

    def until(at: float, source: str = "--deadline") -> Deadline:
        return Deadline(at, _margin(margin, at - now), source)

    if text.lower() in ("none", ""):
        return None
    if text.lower() == "auto":
        value = env.get(VARIABLE, "").strip()
        if value and value.lower() != "auto":
            deadline = _from_variable(value, env, now, margin)
            return deadline and msgspec.structs.replace(deadline, source=VARIABLE)
        allocation = read_allocation(env)
        if allocation.end is not None and allocation.end <= now:
            warn(
                f"{end_variable(env)} names a time that is over: its job has ended, and it is"
                " disregarded (unset it, or write --deadline none)"
            )
            return None
        end = job_end(allocation)
        return None if end is None else until(end, "the scheduler")
    if text.startswith("@"):
        at = _seconds(text[1:])
        if at is None:
            raise _error(text)
        return until(at)
    seconds = _duration(text.removeprefix("+"))
    if seconds is not None:
        if seconds > LONGEST:
            raise _error(text)
        return until(now + seconds)
    try:
        # An aware time, or one without offset: both become Unix seconds, the latter as local time.
        return until(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        raise _error(text) from None


def _margin(margin: float | None, remaining: float) -> float:
    """Return the margin of a deadline that is ``remaining`` seconds away."""
    share = SHARE * remaining if remaining > 0 else MARGIN
    if margin is None:
        return min(MARGIN, share)
    return margin if margin < remaining or remaining <= 0 else share


def _from_variable(
    text: str, env: Mapping[str, str], now: float, margin: float | None
) -> Deadline | None:
    try:
        return read_deadline(text, env, now, margin=margin)
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error.message}", hint=error.hint) from None


def _seconds(text: str) -> float | None:
    return float(text) if re.fullmatch(_NUMBER, text, re.ASCII) else None


def _duration(text: str) -> float | None:
    match = _DURATION.fullmatch(text.lower())
    if match is None or not any(match.groups()):
        return None
    return sum(float(n or 0) * unit for n, unit in zip(match.groups(), _UNITS, strict=True))


def _error(text: str) -> UsageError:
    return UsageError(
        f"not a deadline: {text!r}",
        hint="write auto, none, 55m, 1h30m, 2026-01-31T18:00 or @UNIX_SECONDS",
    )
