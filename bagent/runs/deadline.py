"""When a run must have ended, and what ``--deadline`` may say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime

import msgspec

from bagent.errors import UsageError
from bagent.hpc.allocation import END_VARIABLE, Allocation, read_allocation
from bagent.text.durations import parse_duration

MARGIN, SHARE = 60.0, 0.25
"""Seconds before the deadline at which a run stops feeding, at most that share of what is left."""

VARIABLE = "BAGENT_DEADLINE"

LONGEST = 90 * 86400.0
"""A longer duration, in seconds, is surely a date or Unix time without its ``@``."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


class Deadline(msgspec.Struct, frozen=True):
    """``at``: Unix seconds at which the process will be killed; ``margin``: seconds before it.

    ``source`` is the option or variable that names it, or who told it.
    """

    at: float
    margin: float = MARGIN
    source: str = "--deadline"

    @property
    def stop_feeding_at(self) -> float:
        """Unix seconds from which no new row is sent."""
        return self.at - self.margin


def end_from_environment(here: Allocation) -> float | None:
    """The end of the job as far as the environment tells it, in Unix seconds."""
    return here.end


def read_deadline(
    text: str,
    env: Mapping[str, str],
    now: float,
    *,
    margin: float | None = None,
    job_end: Callable[[Allocation], float | None] = end_from_environment,
    warn: Callable[[str], None] = lambda _: None,
) -> Deadline | None:
    """The deadline that ``text`` names: ``auto``, ``none``, ``55m``, an ISO time or ``@EPOCH``.

    ``auto`` is BAGENT_DEADLINE (any of the other forms), else the end of the batch job around
    this process as ``job_end`` finds it, else none. ``now`` is Unix seconds; an ISO time without
    offset is local time. ``margin`` None is the usual one; it shrinks where little time is left.
    A session outlives the batch job that it was begun in, with its variables: an end that is over
    there is disregarded, and ``warn`` told.

    Raises:
        UsageError: it is none of these forms.
    """
    text = text.strip()

    def until(at: float, source: str = "--deadline") -> Deadline:
        return Deadline(at, _margin(margin, at - now), source)

    if text.lower() in ("none", ""):
        return None
    if text.lower() == "auto":
        named = env.get(VARIABLE, "").strip()
        if named and named.lower() != "auto":
            found = _named(named, env, now, margin)
            return found and msgspec.structs.replace(found, source=VARIABLE)
        here = read_allocation(env)
        if here.end is not None and here.end <= now:
            warn(
                f"{END_VARIABLE} names a time that is over: its job has ended, and it is"
                " disregarded (unset it, or write --deadline none)"
            )
            return None
        end = job_end(here)
        return None if end is None else until(end, "the scheduler")
    if text.startswith("@"):
        at = _seconds(text[1:])
        if at is None:
            raise _bad(text)
        return until(at)
    seconds = _duration(text.removeprefix("+"))
    if seconds is not None:
        if seconds > LONGEST:
            raise _bad(text)
        return until(now + seconds)
    try:
        # An aware time, or one without offset: both become Unix seconds, the latter as local time.
        return until(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        raise _bad(text) from None


def _margin(wanted: float | None, left: float) -> float:
    """Return the margin of a deadline that is ``left`` seconds away: time to send rows remains."""
    share = SHARE * left if left > 0 else MARGIN
    if wanted is None:
        return min(MARGIN, share)
    return wanted if wanted < left or left <= 0 else share


def _named(text: str, env: Mapping[str, str], now: float, margin: float | None) -> Deadline | None:
    try:
        return read_deadline(text, env, now, margin=margin)
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error.message}", hint=error.hint) from None


def _seconds(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _duration(text: str) -> float | None:
    try:
        return parse_duration(text)
    except ValueError:
        return None


def _bad(text: str) -> UsageError:
    return UsageError(
        f"not a deadline: {text!r}",
        hint="write auto, none, 55m, 1h30m, 2026-01-31T18:00 or @UNIX_SECONDS",
    )
