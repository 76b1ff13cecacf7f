"""Themes of jobs of other kinds than one chat a row."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from worlds.drawing import (
    BROKEN,
    draw_events,
    draw_job,
    draw_rows,
    draw_windows,
    without_long_pauses,
)
from worlds.spec import EndpointSpec, Event, RowSpec, World
from worlds.stages import TOPOLOGIES, long_text

_FAULTY_CALLS = ("act:fail", "look:fail", "act:hang", "none:ok", "act:junk", "act:exit")
_CALLS = (
    "act:ok", "act:ok", "act:ok", "act:quick", "act:slow", "look:ok", "look:slow", "act:much",
    "act:object", "read:ok", "read:fail", *_FAULTY_CALLS,
)  # fmt: skip


def kinds(seed: int, random: Random) -> World:
    """Rows with a schema, or several in a request, through faults of rows and processes."""
    kind = random.choice(["schema", "lists"])
    rows = list(draw_rows(random, random.randint(1, 24), random.choice([0.1, 0.4])))
    if kind == "schema":
        for number in range(len(rows)):
            if random.random() < 0.4 and rows[number].replies != ("unreadable",):
                wrong = ("invalid",) * random.choice([1, 2, 3])
                rows[number] = replace(rows[number], replies=(*wrong, *rows[number].replies))
    endpoints = tuple(
        EndpointSpec(windows=draw_windows(random) if random.random() < 0.3 else ())
        for _ in range(random.choice([1, 1, 2]))
    )
    events = draw_events(random, random.choice([0, 0, 1, 2]))
    if kind == "lists" and random.random() < 0.15:
        at = round(random.uniform(0.0, 2.0), 2)
        events = (Event(0, "tight", at, at + 1000.0), *events)
    job = replace(draw_job(random), kind=kind)
    if kind == "schema" and random.random() < 0.4:
        job = replace(job, answers=random.choice([2, 3]), temperature=0.7)
    return World(seed, job, tuple(rows), endpoints, events, rerun=random.random() < 0.3)


def agents(seed: int, random: Random) -> World:
    """Agents with tools, through faults of rows, servers, tools and processes."""
    rows = []
    for row in draw_rows(random, random.randint(1, 12), random.choice([0.0, 0.2, 0.6])):
        replies = row.replies
        if replies != ("unreadable",):
            replies = ("ok",) * random.choice([0, 0, 1, 2]) + replies
            replies = tuple("400" if reply == "overflow" else reply for reply in replies)
        turns = random.choice([0, 1, 1, 2, 2, 3, 4, 6])
        faulty = random.random() < 0.1
        calls = tuple(
            tuple(
                random.choice(_FAULTY_CALLS if faulty else _CALLS)
                for _ in range(random.choice([1, 1, 2, 3]))
            )
            for _ in range(turns)
        )
        rows.append(replace(row, replies=replies, calls=calls))
    endpoints = tuple(
        EndpointSpec(windows=draw_windows(random) if random.random() < 0.2 else ())
        for _ in range(random.choice([1, 1, 2]))
    )
    events = draw_events(random, random.choice([0, 0, 1, 2, 3]))
    if random.random() < 0.3:  # while tools run
        events = (Event(0, "kill", round(random.uniform(0.3, 6.0), 2)), *events)
    job = replace(draw_job(random), kind="agents", stream=random.choice([None, None, False]))
    if random.random() < 0.2:
        job = replace(job, tool_rate=random.choice([0.5, 2.0]))
    return World(seed, job, tuple(rows), endpoints, events, rerun=random.random() < 0.3)


def killed_tools(seed: int, random: Random) -> World:
    """Turns that call tools with and without side effects, and kills while those run."""
    slow = ("act:ok", "act:slow", "act:slow", "act:quick", "look:slow", "read:ok", "read:ok")
    rows = tuple(
        RowSpec(
            f"r{number}",
            seconds=random.choice([0.2, 1.0]),
            replies=(random.choice(["ok", "ok", "ok", "500", "cut"]), "ok"),
            calls=tuple(
                tuple(random.choice(slow) for _ in range(random.choice([1, 2, 2, 3])))
                for _ in range(random.choice([1, 2, 3]))
            ),
        )
        for number in range(random.randint(1, 5))
    )
    events = [
        Event(start, "kill", round(random.uniform(0.2, random.choice([2.0, 6.0, 12.0])), 2))
        for start in range(random.choice([1, 1, 2, 3]))
    ]
    if random.random() < 0.4:
        at = round(random.uniform(1, 12), 2)
        until = round(random.uniform(0.1, 6.0), 2)
        events.append(Event(len(events), "kill-at-call", at, until))
    job = replace(draw_job(random), kind="agents", stream=random.choice([None, False]))
    return World(seed, job, rows, (EndpointSpec(),), tuple(events), random.choice([0.0, 5.0]))


def stages(seed: int, random: Random) -> World:
    """Rows through the stages of a topology, and faults of rows, servers and processes."""
    topology = random.choice([*TOPOLOGIES, "pipeline", "pipeline"])
    rows = tuple(
        replace(row, stage=random.choice(TOPOLOGIES[topology]))
        if row.replies != ("unreadable",)
        else replace(row, replies=("ok",))
        for row in draw_rows(random, random.randint(1, 10), random.choice([0.0, 0.2, 0.5]))
    )
    if topology == "grouped":
        rows = tuple(replace(row, text=random.choice(["a", "a", "b", ""])) for row in rows)
    if topology == "split":
        rows = tuple(
            replace(row, text=long_text(number, random.choice([1, 5, 20, 60])))
            for number, row in enumerate(rows)
        )
    endpoints = tuple(
        EndpointSpec(windows=draw_windows(random) if random.random() < 0.2 else ())
        for _ in range(random.choice([1, 2, 2]))
    )
    events = draw_events(random, random.choice([0, 0, 1, 2, 3]))
    job = replace(draw_job(random), kind="stages", topology=topology)
    if topology == "pipeline":
        job = replace(job, on_failure=random.choice(["include", "include", "drop"]))
    if random.random() < 0.5:  # a row fails, and comes out well in the next start
        job = replace(job, retries=random.choice([0, 1]))
        failures = ("500",) * (job.retries + random.choice([1, 2, 3]))
        first = replace(rows[0], replies=(*failures, "ok"), stage=TOPOLOGIES[topology][0])
        rows = (first, *rows[1:])
    return World(seed, job, rows, endpoints, events, rerun=random.random() < 0.7)


def hosted(seed: int, random: Random) -> World:
    """A provider that limits requests by the minute, and says so in its answers or not."""
    rows = draw_rows(random, random.randint(8, 50), random.choice([0.0, 0.1]), lasting=False)
    rows = without_long_pauses(rows)
    endpoint = EndpointSpec(
        windows=draw_windows(random) if random.random() < 0.3 else (),
        pace=random.choice([20, 40, 60, 120, None]),
        tells=random.choice(["limits", "limits", "limits", "after", ""]),
    )
    events = draw_events(random, random.choice([0, 0, 0, 1]))
    job = replace(draw_job(random), hosted=True, hedge="off")
    return World(
        seed, replace(job, rpm=random.choice([None] * 4 + [60])), rows, (endpoint,), events
    )


def streams(seed: int, random: Random) -> World:
    """Streamed answers that begin late or stall, and limits of these times."""
    kinds = ("ok", "ok", "late:4", "late:15", "late:40", "stall:2", "stall:12", "stall:40", "cut")
    rows = tuple(
        RowSpec(
            f"r{number}", replies=(random.choice(kinds), "ok"), seconds=random.choice([1.0, 3.0])
        )
        for number in range(random.randint(2, 16))
    )
    job = replace(
        draw_job(random),
        stream=True,
        first_token=random.choice([None, 10.0, 20.0]),
        idle=random.choice([None, 5.0, 20.0]),
        timeout=random.choice([30.0, 60.0]),
    )
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 1, 2])))
    return World(seed, job, rows, endpoints, draw_events(random, random.choice([0, 0, 0, 1])))


def grown(seed: int, random: Random) -> World:
    """Answers that are cut off, and are asked for again with more tokens."""
    rows = tuple(
        replace(row, replies=(*(["short"] * random.choice([0, 1, 1])), *row.replies))
        if row.replies != ("unreadable",)
        else row
        for row in draw_rows(random, random.randint(1, 16), random.choice([0.2, 0.5]))
    )
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 2])))
    job = replace(draw_job(random), grow=random.choice([2.0, 4.0]), hedge="off")
    return World(seed, job, rows, endpoints, draw_events(random, random.choice([0, 0, 1])))


def _with_copies(random: Random, rows: tuple[RowSpec, ...]) -> tuple[RowSpec, ...]:
    """Return rows of which many have the prompt of an earlier one."""
    leads: list[int] = []
    copies: list[RowSpec] = []
    for number, row in enumerate(rows):
        if row.replies == ("unreadable",):
            copies.append(row)
        elif leads and random.random() < 0.6:
            lead = random.choice(leads)
            copies.append(replace(row, same=lead, text=rows[lead].text))
        else:
            leads.append(number)
            copies.append(row)
    return tuple(copies)


def copies(seed: int, random: Random) -> World:
    """Rows with equal prompts, which are sent once, through faults of rows and processes."""
    rows = _with_copies(random, draw_rows(random, random.randint(2, 20), random.choice([0.2, 0.6])))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 2])))
    events = tuple(
        event
        for event in draw_events(random, random.choice([0, 1, 2]))
        if not event.kind.startswith("edit")
    )
    job = replace(draw_job(random), kind="copies", hedge="off")
    return World(seed, job, rows, endpoints, events, rerun=random.random() < 0.5)


_COURSES = (
    "ok", "ok", "slow:40", "slow:900", "expired", "lost-line", "lost-reply", "failed", "cut",
    "429", "500", "503", "quota", "full", "faults", "faults",
)  # fmt: skip


def batches(seed: int, random: Random) -> World:
    """Rows in batches of a provider, which fail, expire, are lost, and outlive the process."""
    rows = tuple(
        replace(row, replies=tuple("500" if r in BROKEN else r for r in row.replies))
        for row in draw_rows(random, random.randint(1, 16), random.choice([0.0, 0.3, 0.6]))
    )
    endpoint = EndpointSpec(windows=draw_windows(random) if random.random() < 0.2 else ())
    courses = tuple(random.choice(_COURSES) for _ in range(random.choice([0, 3, 6])))
    if random.random() < 0.6:
        rows = _with_copies(random, rows)
    events = draw_events(random, random.choice([0, 1, 2, 3]))
    if random.random() < 0.5:  # while answers are read of which many are sent again
        rows = (*rows, *(RowSpec(f"x{number}") for number in range(random.randint(3, 8))))
        rows = tuple(
            replace(row, replies=(random.choice(["500", "503", "500", "ok"]), *row.replies))
            if row.replies != ("unreadable",)
            else row
            for row in rows
        )
        kills = (
            Event(
                start,
                "kill-at-call",
                round(random.uniform(1, 40), 2),
                random.choice([random.uniform(6.0, 12.0), random.uniform(4.0, 25.0)]),
            )
            for start in range(random.choice([1, 1, 2]))
        )
        events = (*kills, *(event for event in events if event.start > 1))
    job = replace(draw_job(random), kind="batches")
    if random.random() < 0.15:
        job = replace(job, by=random.choice([320.0, 400.0, 700.0]))
    return World(seed, job, rows, (endpoint,), events, batches=courses, rerun=random.random() < 0.3)


def shards(seed: int, random: Random) -> World:
    """Shards of the rows, one after the other, through crashes."""
    rows = draw_rows(random, random.randint(1, 20), random.choice([0.0, 0.3]))
    events = tuple(
        event
        for event in draw_events(random, random.choice([0, 1, 2, 3]))
        if event.kind not in ("edit", "rival")
    )
    job = replace(draw_job(random), kind="shards", shards=random.choice([2, 2, 3]))
    return World(seed, job, rows, (EndpointSpec(),), events)
