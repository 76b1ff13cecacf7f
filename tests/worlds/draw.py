"""Drawing worlds from seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from worlds.spec import EndpointSpec, Event, JobSpec, RowSpec, Window, World
from worlds.stages import TOPOLOGIES, long_text

HEALED = 120.0
"""Seconds of a world after which all its servers are well."""

AT_WORK = 0.013
"""When servers have answered the probes of a start, and its first rows arrive."""

_PASSING = (
    "500", "502", "503", "503+4", "504", "408", "529", "529+2", "429", "429+3", "429+d4",
    "429+m1500", "cut", "reset", "junk", "error200", "blank", "nochoice", "html",
)  # fmt: skip
_PATIENT = ("503+3600", "529+3600", "429+3600")
"""Replies of servers that ask for an hour."""
_FAILING = ("500", "502", "504", "cut", "junk", "error200", "blank", "nochoice", "html")
_LASTING = ("400", "422", "overflow", "filter", "length")
_BROKEN = ("cut", "reset", "junk", "error200", "nochoice", "html")
_CRASHES = ("crash:1", "crash:3", "crash:8", "crash:20")
_GOOD = ("ok", "usage", "slow:4")
_WINDOWS = (
    "down", "silent", "hang", "500", "502", "503", "503+5", "429+7", "401", "403", "lost-model",
    "reset", "cut", "junk", "blank", "html", "error200",
)  # fmt: skip
_BAD = ("500", "429+7", "lost-model", "lost-model", "reset", "reset", "reset", "reset", "cut")
_UNANSWERED = ("silent", "hang", "hang")
_FAULTY_CALLS = ("act:fail", "look:fail", "act:hang", "none:ok", "act:junk", "act:exit")
_CALLS = (
    "act:ok", "act:ok", "act:ok", "act:quick", "act:slow", "look:ok", "look:slow", "act:much",
    "act:object", *_FAULTY_CALLS,
)  # fmt: skip
_TEXTS = (
    "stone", "", " ", "\u0000\u0007", "{{ text }}", "{% raw", "\u202eabc", "caf\u00e9 \U0001f600",
    "a\r\nb", "</script>", "' or 1=1 --", "=cmd()", "\ufeff", "x" * 3000,
)  # fmt: skip


def draw(seed: int) -> World:
    """Return the world of a seed."""
    random = Random(seed)
    names = list(_THEMES)
    theme = random.choices(names, [_WEIGHTS.get(name, 3) for name in names])[0]
    return _THEMES[theme](seed, random)


def _rows(
    random: Random, count: int, faulty: float, *, lasting: bool = True
) -> tuple[RowSpec, ...]:
    rows = []
    for number in range(count):
        replies: list[str] = []
        if random.random() < faulty:
            most = random.choice([1, 1, 1, 2, 3, 4])
            replies = [random.choice(_PASSING) for _ in range(random.randint(0, most))]
            if replies and random.random() < 0.06:
                replies[0] = random.choice(_PATIENT)
            last = random.random()
            if lasting and last < 0.25:
                replies.append(random.choice(_LASTING))
            elif last < 0.3 and lasting:
                replies = ["unreadable"]
            elif last < 0.4:
                replies.append(random.choice(_FAILING))
            else:
                replies.append(random.choice(_GOOD))
        seconds = random.choice([0.2, 1.0, 1.0, 3.0])
        rows.append(
            RowSpec(
                _id(random, number),
                random.choice(_TEXTS) if random.random() < 0.2 else "stone",
                tuple(replies) or ("ok",),
                seconds,
            )
        )
    return tuple(rows)


def _id(random: Random, number: int) -> str | int | None:
    odd = random.random()
    if odd < 0.03:
        return number
    if odd < 0.05:
        return random.choice(["same", "\u0000", "=1+1", "../x", "r1"])
    return f"r{number}"


def _windows(random: Random, *, kinds: tuple[str, ...] = _WINDOWS) -> tuple[Window, ...]:
    windows = []
    begin = random.choice([0.0, 0.5, 2.0, 5.0, 10.0])
    for _ in range(random.choice([0, 1, 1, 2])):
        end = begin + random.choice([1.0, 5.0, 20.0, 60.0])
        windows.append(Window(begin, min(end, HEALED), random.choice(kinds)))
        begin = end + random.choice([1.0, 10.0])
        if begin >= HEALED:
            break
    return tuple(windows)


def _job(random: Random) -> JobSpec:
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
    )


def _rerun_options(random: Random) -> dict[str, Any]:
    """Return more options of a command that is given after the end."""
    named = ",".join(random.sample(["rejected", "truncated", "refused", "invalid", "empty"], 2))
    return random.choice([{}, {}, {"retry": "all"}, {"retry": named}, {"skip_failed": True}])


def _faulty_rows(seed: int, random: Random) -> World:
    rows = _rows(random, random.randint(1, 24), random.choice([0.2, 0.5, 1.0]))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 1, 2, 3])))
    world = World(seed, _job(random), rows, endpoints, rerun=random.random() < 0.5)
    return replace(world, rerun_options=_rerun_options(random))


def _kinds(seed: int, random: Random) -> World:
    """Rows with a schema, or several in a request, through faults of rows and processes."""
    kind = random.choice(["schema", "lists"])
    rows = list(_rows(random, random.randint(1, 24), random.choice([0.1, 0.4])))
    if kind == "schema":
        for number in range(len(rows)):
            if random.random() < 0.4 and rows[number].replies != ("unreadable",):
                wrong = ("invalid",) * random.choice([1, 2, 3])
                rows[number] = replace(rows[number], replies=(*wrong, *rows[number].replies))
    endpoints = tuple(
        EndpointSpec(windows=_windows(random) if random.random() < 0.3 else ())
        for _ in range(random.choice([1, 1, 2]))
    )
    events = _events(random, random.choice([0, 0, 1, 2]))
    if kind == "lists" and random.random() < 0.15:
        at = round(random.uniform(0.0, 2.0), 2)
        events = (Event(0, "tight", at, at + 1000.0), *events)
    job = replace(_job(random), kind=kind)
    if kind == "schema" and random.random() < 0.4:
        job = replace(job, answers=random.choice([2, 3]), temperature=0.7)
    return World(seed, job, tuple(rows), endpoints, events, rerun=random.random() < 0.3)


def _faulty_servers(seed: int, random: Random) -> World:
    rows = _rows(random, random.randint(1, 30), random.choice([0.0, 0.1]))
    endpoints = tuple(
        EndpointSpec(
            speed=random.choice([1.0, 1.0, 3.0]),
            windows=_windows(random) if random.random() < 0.7 else (),
            capacity=random.choice([None, None, None, 2, 4]),
        )
        for _ in range(random.choice([1, 2, 3, 4]))
    )
    return World(seed, _job(random), rows, endpoints)


def _crashes(seed: int, random: Random) -> World:
    rows = _rows(random, random.randint(1, 16), random.choice([0.0, 0.3]))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 2])))
    events = _events(random, random.randint(1, 4))
    pause = random.choice([0.0, 5.0, 90.0])
    return World(seed, _job(random), rows, endpoints, events, pause, random.random() < 0.3)


def _events(random: Random, starts: int) -> tuple[Event, ...]:
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
    return tuple(events)


def _suspensions(seed: int, random: Random) -> World:
    """A process is suspended for a while, as with a laptop, and the same command given again."""
    rows = _rows(random, random.randint(1, 16), random.choice([0.0, 0.3]))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 2])))
    at = round(random.uniform(0.0, 6.0), 2)
    events = [Event(0, "suspend", at, at + random.choice([10.0, 50.0, 61.0, 75.0, 300.0]))]
    for start in (1, 3):
        kind = random.choice(["kill", "kill-at-call", "term", "power", "none", "none"])
        if kind != "none":
            events.append(Event(start, kind, round(random.uniform(0.0, 20.0), 2)))  # type: ignore[arg-type]
    return World(seed, _job(random), rows, endpoints, tuple(events))


def _late_rows(seed: int, random: Random) -> World:
    """Rows that are late at the end of a run, some for their server's sake."""
    replies = [("ok",), ("ok",), ("ok",), ("slow:15",), ("500", "ok"), ("usage",)]
    if random.random() < 0.6:
        replies = [("ok",), ("usage",), ("slow:15",)]
    rows = tuple(
        RowSpec(f"r{number}", replies=random.choice(replies), seconds=random.choice([0.2, 1.0]))
        for number in range(random.randint(1, 30))
    )
    endpoints = tuple(
        EndpointSpec(random.choice([1.0, 1.0, 18.0])) for _ in range(random.choice([2, 3]))
    )
    job = replace(_job(random), hedge=random.choice(["auto", 2.0, 3.0]), timeout=60.0)
    if random.random() < 0.6:
        job = replace(job, concurrency="auto", per_endpoint="auto")
    return World(seed, job, rows, endpoints)


def _long_illness(seed: int, random: Random) -> World:
    """One server is ill for a long time, while another has work for longer."""
    begin = random.choice([0.0, 2.0])
    ill = Window(begin, begin + 40.0, random.choice(_WINDOWS))
    rows = tuple(RowSpec(f"r{number}", seconds=5.0) for number in range(50))
    job = JobSpec(concurrency=2)
    return World(seed, job, rows, (EndpointSpec(), EndpointSpec(windows=(ill,))))


def _everything(seed: int, random: Random) -> World:
    rows = _rows(random, random.randint(1, 24), 0.3)
    endpoints = tuple(
        EndpointSpec(random.choice([1.0, 2.0]), _windows(random) if random.random() < 0.5 else ())
        for _ in range(random.choice([1, 2, 3]))
    )
    events = list(_events(random, random.randint(0, 3)))
    if random.random() < 0.3:
        for _ in range(random.choice([1, 2])):
            numbers = range(len(endpoints))
            hosts = tuple(random.sample(numbers, random.randint(0, len(numbers))))
            events.append(Event(0, "hosts", round(random.uniform(0.0, 6.0), 2), hosts=hosts))
        events.append(Event(0, "hosts", 20.0, hosts=tuple(range(len(endpoints)))))
    return World(seed, _job(random), rows, endpoints, tuple(events), random.choice([1.0, 90.0]))


def _outage(seed: int, random: Random) -> World:
    """All servers fail for good in the same moment; a person repairs them much later."""
    begin = random.choice([0.0, 0.0, 3.0, 10.0])
    endpoints = tuple(
        EndpointSpec(windows=(Window(begin, 300.0, random.choice(_WINDOWS)),))
        for _ in range(random.choice([1, 2, 3]))
    )
    rows = _rows(random, random.randint(55, 70), 0.0)
    return World(seed, _job(random), rows, endpoints, pause=300.0)


def _agents(seed: int, random: Random) -> World:
    """Agents with tools, through faults of rows, servers, tools and processes."""
    rows = []
    for row in _rows(random, random.randint(1, 12), random.choice([0.0, 0.2, 0.6])):
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
        EndpointSpec(windows=_windows(random) if random.random() < 0.2 else ())
        for _ in range(random.choice([1, 1, 2]))
    )
    events = _events(random, random.choice([0, 0, 1, 2, 3]))
    if random.random() < 0.3:  # while tools run
        events = (Event(0, "kill", round(random.uniform(0.3, 6.0), 2)), *events)
    job = replace(_job(random), kind="agents")
    return World(seed, job, tuple(rows), endpoints, events, rerun=random.random() < 0.3)


def _stages(seed: int, random: Random) -> World:
    """Rows through the stages of a topology, and faults of rows, servers and processes."""
    topology = random.choice([*TOPOLOGIES, "pipeline", "pipeline"])
    rows = tuple(
        replace(row, stage=random.choice(TOPOLOGIES[topology]))
        if row.replies != ("unreadable",)
        else replace(row, replies=("ok",))
        for row in _rows(random, random.randint(1, 10), random.choice([0.0, 0.2, 0.5]))
    )
    if topology == "split":
        rows = tuple(
            replace(row, text=long_text(number, random.choice([1, 5, 20, 60])))
            for number, row in enumerate(rows)
        )
    endpoints = tuple(
        EndpointSpec(windows=_windows(random) if random.random() < 0.2 else ())
        for _ in range(random.choice([1, 2, 2]))
    )
    events = _events(random, random.choice([0, 0, 1, 2, 3]))
    job = replace(_job(random), kind="stages", topology=topology)
    if topology == "pipeline":
        job = replace(job, on_failure=random.choice(["include", "include", "drop"]))
    if random.random() < 0.5:  # a row fails, and comes out well in the next start
        job = replace(job, retries=random.choice([0, 1]))
        failures = ("500",) * (job.retries + random.choice([1, 2, 3]))
        first = replace(rows[0], replies=(*failures, "ok"), stage=TOPOLOGIES[topology][0])
        rows = (first, *rows[1:])
    return World(seed, job, rows, endpoints, events, rerun=random.random() < 0.7)


def _limited(seed: int, random: Random) -> World:
    """Starts with a deadline or a budget."""
    rows = _rows(random, random.randint(4, 24), random.choice([0.0, 0.2]))
    endpoints = tuple(
        EndpointSpec(windows=_windows(random) if random.random() < 0.2 else ())
        for _ in range(random.choice([1, 1, 2]))
    )
    job = _job(random)
    # A start with less time or money than rows that fail need for their tries never ends them, and
    # the next one begins with them again.
    failing = [row for row in rows if row.replies[-1] in _FAILING]
    if random.random() < 0.5:
        job = replace(job, deadline=random.choice([12.0, 20.0, 40.0]), retries=min(job.retries, 1))
        if sum(2 * row.seconds * len(row.replies) for row in failing) > 0.5 * (job.deadline or 0.0):
            job = replace(job, concurrency="auto", per_endpoint="auto")
        if any(row.seconds >= 3.0 for row in failing):
            job = replace(job, deadline=max(20.0, job.deadline or 0.0))
    else:
        most = 2 * 64.0 * len(failing) * (1 + job.retries) + 100.0
        job = replace(job, budget=max(most, random.choice([200.0, 300.0, 600.0])))
    if random.random() < 0.3:
        job = replace(job, answers=2, temperature=0.7)
    events = _events(random, random.choice([0, 0, 1]))
    return World(seed, job, rows, endpoints, events, pause=90.0)


def _paid_in_vain(seed: int, random: Random) -> World:
    """A budget pays for requests without an answer: to a server that falls silent for a minute
    while another has work, or that time out."""
    count, slots = random.randint(44, 56), random.choice([1, 2])
    rows = tuple(RowSpec(f"r{number}", seconds=3.0 * slots) for number in range(count))
    silent = Window(random.choice([0.5, 4.0, 20.0]), HEALED, random.choice(["silent", "hang"]))
    budget = 5.0 * count + 64.0 * slots - random.choice([10.0, 40.0, 60.0])
    job = JobSpec(per_endpoint=slots, timeout=random.choice([30.0, 300.0, 300.0]), budget=budget)
    return World(seed, job, rows, (EndpointSpec(), EndpointSpec(windows=(silent,))), pause=90.0)


def _limits(seed: int, random: Random) -> World:
    """Limits of rows and failures, and a pace of requests."""
    rows = _rows(random, random.randint(4, 20), random.choice([0.2, 0.6]))
    rows = tuple(
        replace(row, replies=("ok",)) if {*row.replies} & {*_PATIENT} else row for row in rows
    )
    endpoints = tuple(
        EndpointSpec(windows=_windows(random) if random.random() < 0.2 else ())
        for _ in range(random.choice([1, 1, 2]))
    )
    job, kind = _job(random), random.choice(["row", "failures", "rpm"])
    if kind == "row":
        job = replace(job, row_seconds=random.choice([2.0, 5.0, 15.0]), timeout=60.0)
    elif kind == "failures":  # rows that fail in each start leave one failure or more for others
        failing = sum(row.replies[-1] in _FAILING for row in rows)
        job = replace(job, stop_after=failing * job.answers + random.choice([1, 1, 2, 4]))
    else:
        job = replace(job, rpm=random.choice([30, 60, 120, 300]))
    events = _events(random, random.choice([0, 0, 1]))
    return World(seed, job, rows, endpoints, events, rerun=random.random() < 0.3)


def _refusals(seed: int, random: Random) -> World:
    """Rows that servers refuse for good, between others, as often as a start stops for or not."""
    alike, share = random.choice([4, 6, 8]), random.choice([0.4, 0.7, 0.9, 1.0])
    refusal = random.choice(["400", "400", "422", "filter"])
    rows = tuple(
        RowSpec(
            f"r{number}",
            replies=(refusal if random.random() < share else random.choice(["ok", "ok", "422"]),),
            seconds=random.choice([0.2, 1.0, 1.0]),
        )
        for number in range(random.randint(6, 26))
    )
    job = replace(_job(random), alike=alike, concurrency=random.choice([1, 2, 4, 8]))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 1, 2])))
    events = _events(random, random.choice([0, 0, 0, 1]))
    return World(seed, job, rows, endpoints, events)


def _killers(seed: int, random: Random) -> World:
    """Rows with which servers crash, once or again and again."""
    rows = list(_rows(random, random.randint(2, 12), random.choice([0.0, 0.2])))
    for _ in range(random.choice([1, 1, 2, 3])):
        number = random.randrange(len(rows))
        crashes = tuple(random.choice(_CRASHES) for _ in range(random.choice([1, 2, 2, 3, 4])))
        rows[number] = replace(rows[number], replies=(*crashes, *rows[number].replies))
        if "unreadable" in rows[number].replies:
            rows[number] = replace(rows[number], replies=(*crashes, "ok"))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 2, 2, 3])))
    job = replace(_job(random), timeout=60.0)
    events = _events(random, random.choice([0, 0, 0, 1]))
    return World(seed, job, tuple(rows), endpoints, events, rerun=random.random() < 0.5)


def _leaving(seed: int, random: Random) -> World:
    """A server goes from bad to worse, leaves the hostfile meanwhile, and may come back."""
    rows = _rows(random, random.choice([1, 2, 3, 5, 12]), random.choice([0.0, 0.2]))
    begin = random.choice([AT_WORK, AT_WORK, AT_WORK, random.uniform(0.1, 3.0)])
    seconds = random.choice([0.1, 0.1, 0.2, 0.4, 2.0])
    worse = begin + seconds + random.choice([4.0, 15.0, 40.0])
    ill = (
        Window(begin, begin + seconds, random.choice(_BAD)),
        Window(
            begin + seconds,
            worse,
            random.choice(random.choice([_WINDOWS, _UNANSWERED, _UNANSWERED])),
        ),
    )
    count = random.choice([1, 2, 2, 3])
    endpoints = (EndpointSpec(windows=ill), *(EndpointSpec() for _ in range(count)))
    at = max(0.0, round(begin + random.uniform(-0.5, 1.0), 2))  # it is read a second later
    events = [Event(0, "hosts", at, hosts=tuple(range(1, count + 1)))]
    if random.random() < 0.4:
        back = at + random.choice([2.0, 10.0, 30.0])
        events.append(Event(0, "hosts", back, hosts=tuple(range(count + 1))))
    job = replace(_job(random), retries=random.choice([0, 0, 0, 1, 2]), hedge="off")
    return World(seed, job, rows, endpoints, tuple(events))


def _relapses(seed: int, random: Random) -> World:
    """All servers are ill for a while, are well for longer, and fall ill again."""
    begin = random.choice([2.0, 10.0])
    again = begin + random.choice([90.0, 135.0, 150.0])
    count, first, second = (
        random.choice([1, 1, 2]),
        random.choice(_WINDOWS),
        random.choice(_WINDOWS),
    )
    windows = (
        Window(begin, begin + random.choice([5.0, 20.0, 60.0]), first),
        Window(again, again + random.choice([2.0, 10.0, 40.0]), second),
    )
    rows = tuple(
        RowSpec(f"r{number}", seconds=random.choice([5.0, 15.0])) for number in range(14 * count)
    )
    job = replace(_job(random), concurrency=count, timeout=60.0, hedge="off")
    return World(seed, job, rows, tuple(EndpointSpec(windows=windows) for _ in range(count)))


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


def _copies(seed: int, random: Random) -> World:
    """Rows with equal prompts, which are sent once, through faults of rows and processes."""
    rows = _with_copies(random, _rows(random, random.randint(2, 20), random.choice([0.2, 0.6])))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 2])))
    events = tuple(
        event
        for event in _events(random, random.choice([0, 1, 2]))
        if not event.kind.startswith("edit")
    )
    job = replace(_job(random), kind="copies", hedge="off")
    return World(seed, job, rows, endpoints, events, rerun=random.random() < 0.5)


_COURSES = (
    "ok", "ok", "slow:40", "slow:900", "expired", "lost-line", "lost-reply", "failed", "cut",
    "429", "500", "503",
)  # fmt: skip


def _batches(seed: int, random: Random) -> World:
    """Rows in batches of a provider, which fail, expire, are lost, and outlive the process."""
    rows = tuple(
        replace(row, replies=tuple("500" if r in _BROKEN else r for r in row.replies))
        for row in _rows(random, random.randint(1, 16), random.choice([0.0, 0.3, 0.6]))
    )
    endpoint = EndpointSpec(windows=_windows(random) if random.random() < 0.2 else ())
    courses = tuple(random.choice(_COURSES) for _ in range(random.choice([0, 3, 6])))
    if random.random() < 0.6:
        rows = _with_copies(random, rows)
    events = _events(random, random.choice([0, 1, 2, 3]))
    job = replace(_job(random), kind="batches")
    return World(seed, job, rows, (endpoint,), events, batches=courses, rerun=random.random() < 0.3)


def _shards(seed: int, random: Random) -> World:
    """Shards of the rows, one after the other, through crashes."""
    rows = _rows(random, random.randint(1, 20), random.choice([0.0, 0.3]))
    events = tuple(
        event
        for event in _events(random, random.choice([0, 1, 2, 3]))
        if event.kind not in ("edit", "rival")
    )
    job = replace(_job(random), kind="shards", shards=random.choice([2, 2, 3]))
    return World(seed, job, rows, (EndpointSpec(),), events)


def _fair(seed: int, random: Random) -> World:
    """Servers without a fault, and enough rows that each has to get its share."""
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([2, 3, 4])))
    rows = tuple(RowSpec(f"r{number}") for number in range(25 * len(endpoints)))
    job = JobSpec(
        concurrency=random.choice([4, 8, "auto"]), per_endpoint=random.choice(["auto", 2])
    )
    return World(seed, job, rows, endpoints)


_THEMES: dict[str, Callable[[int, Random], World]] = {
    "rows": _faulty_rows,
    "servers": _faulty_servers,
    "crashes": _crashes,
    "kinds": _kinds,
    "everything": _everything,
    "outage": _outage,
    "fair": _fair,
    "suspensions": _suspensions,
    "late rows": _late_rows,
    "long illness": _long_illness,
    "agents": _agents,
    "stages": _stages,
    "limited": _limited,
    "batches": _batches,
    "shards": _shards,
    "paid in vain": _paid_in_vain,
    "limits": _limits,
    "refusals": _refusals,
    "killers": _killers,
    "leaving": _leaving,
    "relapses": _relapses,
    "copies": _copies,
}

_WEIGHTS = {
    "rows": 5, "servers": 5, "crashes": 7, "kinds": 5, "everything": 4, "outage": 1, "fair": 1,
    "suspensions": 2, "late rows": 2, "long illness": 1, "stages": 5, "agents": 4, "batches": 3,
    "leaving": 5, "relapses": 2, "refusals": 2, "copies": 2, "limits": 2,
    "paid in vain": 1,
}  # fmt: skip
"""How often each theme is drawn; 3 for others."""
