"""Progress on standard error: live on a terminal, lines in a log, JSON for programs.

The caller drives a display: nothing runs in the background, and time comes from an injected
clock. No method raises because standard error is broken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO, get_args

import msgspec

from bagent.errors import JobError
from bagent.observe.formatting import visible
from bagent.observe.snapshot import Snapshot
from bagent.observe.status_text import one_line
from bagent.text.terminal import SafeTextStream, unguarded

if TYPE_CHECKING:
    from bagent.observe.live_state import Live

Mode = Literal["auto", "rich", "plain", "json", "none", "dashboard"]

FIRST_S = 2.0
"""Seconds until the first line, which shows in a log that the run has started."""

INTERVAL_S = 10.0
"""Seconds between lines without a notable change."""

_CALM_S = 5.0
"""Seconds without a throttled answer after which throttling has ended."""

_GAP_S = 1.0
"""The least number of seconds between two lines."""

_NOTES_KEPT = 1000
_JSON_ERRORS = 10


class Progress(Protocol):
    """A display of a run. Call ``start``, then ``update`` about every ``interval_s``, ``stop``."""

    interval_s: float
    """How often a new snapshot is worth making, in seconds."""

    def start(self, header: str) -> None:
        """Begin; ``header`` describes the run in one line."""

    def update(self, snapshot: Snapshot) -> None:
        """Take the newest state and show it if it is due."""

    def attach(self, live: Live) -> None:
        """Take the state beyond snapshots, before the first of them."""

    def note(self, text: str, *, warning: bool = False) -> None:
        """Show a one-line message at once; an equal text is shown once.

        Args:
            warning: the job, the input or an earlier start is not what the user may expect.
        """

    def stop(self) -> None:
        """End the display and leave the terminal as it was; a second call does nothing."""


class Once:
    """Remembers the last thousand texts that were shown."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def is_new(self, text: str) -> bool:
        """Remember ``text``; returns whether it is new."""
        if text in self._seen:
            return False
        if len(self._seen) >= _NOTES_KEPT:
            del self._seen[next(iter(self._seen))]
        self._seen[text] = None
        return True


class NoProgress:
    """Shows nothing."""

    interval_s = INTERVAL_S

    def start(self, header: str) -> None:
        """Do nothing."""

    def update(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    def attach(self, live: Live) -> None:
        """Do nothing."""

    def note(self, text: str, *, warning: bool = False) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class _Schedule:
    """When the next line is due."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shown = clock() - _GAP_S
        self._due = clock() + FIRST_S

    def due(self, notable: bool = False) -> bool:
        now = self._clock()
        if now < (self._shown + _GAP_S if notable else self._due):
            return False
        self._shown = now
        self._due = now + INTERVAL_S
        return True


class _Changes:
    """Detects changes that get a line of their own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers = 0
        self._throttled_at: float | None = None
        self._reported = (False, False)

    def describe(self, s: Snapshot) -> str:
        """Describe what changed since :meth:`mark_reported`; empty where nothing did."""
        now = self._now(s)
        if now == self._reported:
            return ""
        throttled, down = now
        parts = []
        if throttled != self._reported[0]:
            parts.append("throttling begins" if throttled else "throttling ended")
        if down != self._reported[1]:
            parts.append("no endpoint is up" if down else "endpoints are up again")
        return ", ".join(parts)

    def mark_reported(self, s: Snapshot) -> None:
        """Take the present state as reported."""
        self._reported = self._now(s)

    def _now(self, s: Snapshot) -> tuple[bool, bool]:
        now = self._clock()
        if s.fleet.throttled_s > 0 or s.throttled > self._answers:
            self._throttled_at = now
            self._answers = s.throttled
        throttled = self._throttled_at is not None and now - self._throttled_at < _CALM_S
        return throttled, s.fleet.endpoints > 0 and s.fleet.endpoints_up == 0


class PlainProgress:
    """One line per interval without control codes, and one when the state changes notably.

    Args:
        out: where the lines go.
        clock: monotonic seconds.
    """

    interval_s = 1.0

    def __init__(self, out: SafeTextStream, clock: Callable[[], float]) -> None:
        self._out = out
        self._schedule = _Schedule(clock)
        self._changes = _Changes(clock)
        self._once = Once()

    def start(self, header: str) -> None:
        """Write the header line."""
        self._out.line(visible(header))

    def update(self, snapshot: Snapshot) -> None:
        """Write a line if one is due, or if something notable changed."""
        changes = self._changes.describe(snapshot)
        if self._schedule.due(notable=bool(changes)):
            self._changes.mark_reported(snapshot)
            line = one_line(snapshot)
            self._out.line(f"{line}; {changes}" if changes else line)

    def attach(self, live: Live) -> None:
        """Do nothing."""

    def note(self, text: str, *, warning: bool = False) -> None:
        """Write the message as a line."""
        text = visible(text)
        if self._once.is_new(text):
            self._out.line(f"bagent: {text}")

    def stop(self) -> None:
        """Do nothing."""


class EventProgress:
    """Events for programs: ``event`` is ``start``, ``progress``, ``note`` or ``end``.

    ``progress`` and ``end`` carry all fields of :class:`Snapshot`, with the ten largest error
    groups, and ``rows_per_s``, the speed that ``status`` shows.

    Args:
        emit: takes the events.
        clock: monotonic seconds.
    """

    interval_s = 1.0

    def __init__(self, emit: Callable[[dict[str, Any]], None], clock: Callable[[], float]) -> None:
        self._emit = emit
        self._schedule = _Schedule(clock)
        self._once = Once()
        self._last: Snapshot | None = None

    def start(self, header: str) -> None:
        """Emit ``start`` with ``header``."""
        self._emit({"event": "start", "header": visible(header)})

    def update(self, snapshot: Snapshot) -> None:
        """Emit ``progress`` if it is due."""
        self._last = snapshot
        if self._schedule.due():
            self._emit_state("progress", snapshot)

    def attach(self, live: Live) -> None:
        """Do nothing."""

    def note(self, text: str, *, warning: bool = False) -> None:
        """Emit ``note`` with ``text`` and its ``level``."""
        text = visible(text)
        if self._once.is_new(text):
            level = "warning" if warning else "info"
            self._emit({"event": "note", "level": level, "text": text})

    def stop(self) -> None:
        """Emit ``end`` with the last state."""
        if self._last is not None:
            self._emit_state("end", self._last)
            self._last = None

    def _emit_state(self, event: str, s: Snapshot) -> None:
        left_out = sum(group.count for group in s.errors[_JSON_ERRORS:])
        fields = msgspec.structs.asdict(s)
        del fields["changes"], fields["causes"]
        fields["rows_per_s"] = s.rates.rows_per_s
        fields["errors"] = s.errors[:_JSON_ERRORS]
        fields["errors_other"] = s.errors_other + left_out
        self._emit({"event": event, **fields})


class JsonProgress(EventProgress):
    """The events as JSON, one a line.

    Args:
        out: where the lines go.
        clock: monotonic seconds.
    """

    def __init__(self, out: SafeTextStream, clock: Callable[[], float]) -> None:
        super().__init__(lambda event: out.line(msgspec.json.encode(event).decode()), clock)


def make_progress(
    mode: Mode,
    stream: TextIO | None,
    *,
    is_tty: bool,
    width: int | None = None,
    env: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Choose and make a display.

    ``dashboard`` fills the screen of a terminal; without one it is ``plain`` and says so.
    ``auto`` is ``rich`` on a terminal that can move its cursor and is not a CI log, else
    ``plain``. ``rich`` without a terminal is ``plain``, so that logs hold no control codes.

    Args:
        mode: the value of ``--progress``.
        stream: standard error; None (a process started without one) shows nothing.
        is_tty: whether ``stream`` is a terminal.
        width: columns to use; None follows the terminal, also when it is resized.
        env: read for TERM, CI and NO_COLOR; None takes the environment of the process.
        clock: monotonic seconds.

    Raises:
        JobError: ``mode`` is none of them.
    """
    if mode not in get_args(Mode):
        raise JobError(
            f"unknown progress mode {mode!r}", hint=f"one of {', '.join(get_args(Mode))}"
        )
    env = os.environ if env is None else env
    if mode == "none" or stream is None:
        return NoProgress()
    out = SafeTextStream(unguarded(stream))
    if mode == "json":
        return JsonProgress(out, clock)
    can_move = is_tty and env.get("TERM", "").lower() not in ("", "dumb", "unknown")
    if can_move and (mode == "rich" or (mode == "auto" and not _in_ci(env))):
        # rich takes 50 ms and 10 MB to import: only where there is something to see.
        from bagent.observe.terminal import RichProgress, make_console

        return RichProgress(make_console(out, env, width))
    if can_move and mode == "dashboard":
        from bagent.observe.dashboard import Dashboard
        from bagent.observe.terminal import make_console

        return Dashboard(make_console(out, env, width), clock)
    plain = PlainProgress(out, clock)
    if mode == "dashboard":
        plain.note("--dashboard needs a terminal: lines of progress instead")
    return plain


def _in_ci(env: Mapping[str, str]) -> bool:
    return env.get("CI", "").lower() not in ("", "0", "false", "no")
