"""Parts of worlds that all themes draw: rows, windows of illness, jobs, events."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from worlds.spec import Event, JobSpec, RowSpec, Window

HEALED = 120.0
"""Seconds of a world after which all its servers are well."""

AT_WORK = 0.013
"""When servers have answered the probes of a start, and its first rows arrive."""

PASSING = (
    "500", "502", "503", "503+4", "504", "408", "529", "529+2", "429", "429+3", "429+d4",
    "429+m1500", "cut", "reset", "junk", "error200", "blank", "nochoice", "html",
)  # fmt: skip
PATIENT = ("503+3600", "529+3600", "429+3600")
"""Replies of servers that ask for an hour."""
FAILING = ("500", "502", "504", "cut", "junk", "error200", "blank", "nochoice", "html")
LASTING = ("400", "422", "overflow", "filter", "length")
BROKEN = ("cut", "reset", "junk", "error200", "nochoice", "html")
CRASHES = ("crash:1", "crash:3", "crash:8", "crash:20")
GOOD = ("ok", "usage", "slow:4")
WINDOWS = (
    "down", "silent", "hang", "500", "502", "503", "503+5", "429+7", "401", "403", "lost-model",
    "reset", "cut", "junk", "blank", "html", "error200",
)  # fmt: skip
BAD = ("500", "429+7", "lost-model", "lost-model", "reset", "reset", "reset", "reset", "cut")
UNANSWERED = ("silent", "hang", "hang")
TEXTS = (
    "stone", "", " ", "\u0000\u0007", "{{ text }}", "{% raw", "\u202eabc", "caf\u00e9 \U0001f600",
    "a\r\nb", "</script>", "' or 1=1 --", "=cmd()", "\ufeff", "x" * 3000,
)  # fmt: skip


def draw_rows(
    random: Random, count: int, faulty: float, *, lasting: bool = True
) -> tuple[RowSpec, ...]:
    """Return rows, of which a share get other replies than good ones first."""
    rows = []
    for number in range(count):
        replies: list[str] = []
        if random.random() < faulty:
            most = random.choice([1, 1, 1, 2, 3, 4])
            replies = [random.choice(PASSING) for _ in range(random.randint(0, most))]
            if replies and random.random() < 0.06:
                replies[0] = random.choice(PATIENT)
            last = random.random()
            if lasting and last < 0.25:
                replies.append(random.choice(LASTING))
            elif last < 0.3 and lasting:
                replies = ["unreadable"]
            elif last < 0.4:
                replies.append(random.choice(FAILING))
            else:
                replies.append(random.choice(GOOD))
        seconds = random.choice([0.2, 1.0, 1.0, 3.0])
        rows.append(
            RowSpec(
                _draw_id(random, number),
                random.choice(TEXTS) if random.random() < 0.2 else "stone",
                tuple(replies) or ("ok",),
                seconds,
            )
        )
    return tuple(rows)


def without_long_pauses(rows: tuple[RowSpec, ...]) -> tuple[RowSpec, ...]:
    """Return the rows; those for which a server would ask for an hour are ok at once."""
    return tuple(
        replace(row, replies=("ok",)) if {*row.replies} & {*PATIENT} else row for row in rows
    )


def _draw_id(random: Random, number: int) -> str | int | None:
    """Return the id of a row: a few are odd."""
    odd = random.random()
    if odd < 0.03:
        return number
    if odd < 0.05:
        return random.choice(["same", "\u0000", "=1+1", "../x", "r1"])
    return f"r{number}"


def draw_windows(random: Random) -> tuple[Window, ...]:
    """Return when a server is ill."""
    windows = []
    begin = random.choice([0.0, 0.5, 2.0, 5.0, 10.0])
    for _ in range(random.choice([0, 1, 1, 2])):
        end = begin + random.choice([1.0, 5.0, 20.0, 60.0])
        windows.append(Window(begin, min(end, HEALED), random.choice(WINDOWS)))
        begin = end + random.choice([1.0, 10.0])
        if begin >= HEALED:
            break
    return tuple(windows)


def draw_job(random: Random) -> JobSpec:
    """Return a job with one chat a row."""
    return JobSpec(
        retries=random.choice([0, 1, 2, 2, 5]),
        concurrency=random.choice([1, 2, 4, 8, 8, "auto"]),
        per_endpoint=random.choice(["auto", "auto", 1, 3]),
        temperature=random.choice([0.0, 0.0, 0.7]),
        hedge=random.choice(["off", "off", "off", "off", "auto", 2.0]),
        truncated=random.choice(["fail", "fail", "accept"]),
        allow_failures=random.choice([0, 0, 0, 2]),
        segment_bytes=random.choice([None, None, 300, 3000]),
        priced=random.random() < 0.2,
        stream=random.choice([None] * 9 + [True]),
    )


def draw_rerun(random: Random) -> dict[str, Any]:
    """Return more options of a command that is given after the end."""
    named = ",".join(random.sample(["rejected", "truncated", "refused", "invalid", "empty"], 2))
    return random.choice([{}, {}, {"retry": "all"}, {"retry": named}, {"skip_failed": True}])


def draw_events(random: Random, starts: int) -> tuple[Event, ...]:
    """Return what happens to the first starts."""
    events: list[Event] = []
    edited = random.randint(0, 12)
    for start in range(starts):
        kind = random.choice(
            ["kill", "kill-at-call", "kill-at-call", "kill-at-call", "power", "power-at-call",
             "term", "int", "full", "tight", "short", "sync-fails", "stop-file", "rival", "edit",
             "edit-back"]
        )  # fmt: skip
        at = round(random.uniform(0.0, random.choice([0.5, 6.0])), 2)
        until = 0.0
        if kind.endswith("-at-call") or kind == "rival":
            at = round(random.uniform(1, 60), 2)
            if kind != "rival" and random.random() < 0.4:  # amid what a moment of work writes
                until = round(random.uniform(0.01, random.choice([2.0, 6.0, 20.0])), 2)
        elif kind in ("full", "tight", "short", "sync-fails"):
            until = at + random.choice([0.1, 1.0, 1000.0])
        elif kind.startswith("edit"):
            at = float(edited)
            if kind == "edit" and random.random() < 0.5:
                events.append(Event(start + random.choice([1, 1, 2]), "edit-back", at))
            if start and random.random() < 0.3:
                events.append(Event(start, "kill-at-call", round(random.uniform(1, 60), 2)))
        events.append(Event(start, kind, at, until))  # type: ignore[arg-type]
        if random.random() < 0.1:
            events.append(Event(start, "rival", random.randint(1, 60)))
        if kind in ("term", "int") and random.random() < 0.3:
            events.append(Event(start, "int", round(at + random.uniform(0.1, 3.0), 2)))
        if kind in ("term", "int", "stop-file") and random.random() < 0.2:  # while it drains
            events.append(Event(start, "full", round(at + random.uniform(0.02, 2.0), 2), 1000.0))
    return tuple(events)
