"""Progress on standard error: live on a terminal, lines in a log, JSON for programs.

The caller drives a display: nothing runs in the background, and time comes from an injected
clock. No method raises because standard error is broken. Every display uses the same phrases
about a snapshot.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TextIO, get_args

import msgspec

from bagent.errors import JobError
from bagent.observe.formatting import counted, duration, kinds, money, percent, rate, visible
from bagent.observe.snapshot import Snapshot
from bagent.text.terminal import SafeTextStream, unguarded

if TYPE_CHECKING:
    from bagent.observe.live_state import Live


_QUIET_S = 60.0
"""After so long without a finished row the display says so."""

_TOP_KINDS = 3
_TOP_STAGES = 8


class Phrase(NamedTuple):
    """A phrase and its style: ``good``, ``bad``, ``wait`` or none."""

    text: str
    style: Literal["", "good", "bad", "wait"] = ""


def position(s: Snapshot) -> str:
    """How far the run is: ``1,204 of ~5,000 rows (24 %)``, or ``1,204 rows`` without a size.

    A job with several stages counts the ``results`` of all of them.
    """
    if s.to_do is None or s.fraction is None:
        return counted(max(s.totals.rows, s.this_start.done), s.unit)
    if s.total is None:
        finished = s.skipped + s.this_start.done
        return (
            f"{finished:,} of ~{counted(finished + s.to_do, s.speed_unit)} ({percent(s.fraction)})"
        )
    about = "" if s.total_is_exact else "~"
    return f"{s.total - s.to_do:,} of {about}{counted(s.total, s.unit)} ({percent(s.fraction)})"


def arrival(s: Snapshot) -> str:
    """When the run will end: ``ETA 1m20s``, or ``ETA 1m20s to 1m50s`` where the speed changed."""
    if s.eta_range is None:
        return f"ETA {duration(s.eta_s)}"
    low, high = map(duration, s.eta_range)
    return f"ETA {low} to {high}"


def results(s: Snapshot) -> list[Phrase]:
    """What came out so far, over all starts of the run; failures by kind."""
    phrases = [Phrase(f"{s.ok:,} ok", "good")]
    if s.failed:
        phrases.append(Phrase(f"{s.failed:,} failed ({kinds(s.by_kind, _TOP_KINDS)})", "bad"))
    if s.accepted:
        phrases.append(Phrase(f"{s.accepted:,} truncated (accepted)"))
    if s.this_start.copied:
        phrases.append(Phrase(f"{s.this_start.copied:,} copied"))
    if s.resumed:
        phrases.append(Phrase(f"this start: {s.this_start.sent:,} sent"))
    return phrases


def stages(s: Snapshot) -> list[Phrase]:
    """What ended in each stage: ``review 40 ok``; nothing where there is one stage."""
    if len(s.by_stage) < 2:
        return []
    phrases = []
    for name, count in list(s.by_stage.items())[:_TOP_STAGES]:
        failed = f", {count.failed:,} failed" if count.failed else ""
        phrases.append(Phrase(f"{visible(name, 30)} {count.ok:,} ok{failed}"))
    if len(s.by_stage) > _TOP_STAGES:
        phrases.append(Phrase(f"+{len(s.by_stage) - _TOP_STAGES} stages"))
    return phrases


def work(s: Snapshot) -> list[Phrase]:
    """What is in flight now, and what holds it up."""
    fleet = s.fleet
    phrases = [Phrase(f"{fleet.in_flight:,}/{fleet.limit:,} in flight")]
    if fleet.ready:
        phrases.append(Phrase(f"{fleet.ready:,} waiting"))
    if fleet.retrying:
        phrases.append(Phrase(f"{fleet.retrying:,} retrying", "wait"))
    if fleet.throttled_s > 0:
        answers = f" ({counted(s.throttled, 'answer')})" if s.throttled else ""
        phrases.append(Phrase(f"throttled for {duration(fleet.throttled_s)}{answers}", "wait"))
    elif s.throttled:
        phrases.append(Phrase(counted(s.throttled, "throttled answer"), "wait"))
    if fleet.endpoints_up < fleet.endpoints:
        up = f"{fleet.endpoints_up:,} of {counted(fleet.endpoints, 'endpoint')} up"
        phrases.append(Phrase(up, "wait" if fleet.endpoints_up else "bad"))
    if s.quiet_s >= _QUIET_S and s.to_do != 0:
        phrases.append(Phrase(f"nothing finished for {duration(s.quiet_s)}", "wait"))
    return phrases


def speed(s: Snapshot) -> list[Phrase]:
    """How fast it goes, and what it costs where prices are known."""
    rates = s.rates
    phrases = [Phrase(f"{rate(rates.rows_per_s)} {s.speed_unit}s/s")]
    if rates.completion_tokens_per_s is not None:
        phrases.append(Phrase(f"{rate(rates.completion_tokens_per_s)} tok/s"))
    if s.cost_usd is not None:
        phrases.append(Phrase(money(s.cost_usd)))
    if s.cost_at_end is not None:
        low, high = map(money, s.cost_at_end)
        phrases.append(Phrase(f"{low if low == high else f'{low} to {high}'} at the end"))
    return phrases


def one_line(s: Snapshot) -> str:
    """The whole state on one line without control codes; no speed where nothing was to do."""
    groups = [[Phrase(position(s)), *results(s)]]
    if s.to_do != 0 or s.this_start.done:
        groups += [stages(s), work(s), [*speed(s), Phrase(arrival(s))]]
    text = "; ".join(", ".join(phrase.text for phrase in group) for group in groups if group)
    return f"[{duration(s.elapsed_s)}] {text}"


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
