"""Drawing worlds from seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Literal

from worlds import draw_jobs
from worlds.drawing import (
    AT_WORK,
    BAD,
    CRASHES,
    FAILING,
    HEALED,
    UNANSWERED,
    WINDOWS,
    draw_events,
    draw_job,
    draw_rerun,
    draw_rows,
    draw_windows,
    without_long_pauses,
)
from worlds.spec import EndpointSpec, Event, JobSpec, RowSpec, Window, World


def draw(seed: int) -> World:
    """Return the world of a seed."""
    random = Random(seed)
    names = list(_THEMES)
    theme = random.choices(names, [_WEIGHTS.get(name, 3) for name in names])[0]
    world = _THEMES[theme](seed, random)
    if world.job.kind == "single" and random.random() < 0.08:
        size = random.choice([600, 9000])
        if theme == "contexts":
            size = 600  # a longer one decides which rows fit, and their replies are drawn
        world = replace(world, job=replace(world.job, system=size))
    if world.job.kind in ("single", "schema", "lists", "agents") and random.random() < 0.06:
        world = replace(world, limit=random.randint(1, 1 + len(world.rows)))
    if random.random() < 0.1:
        looks = [Event(0, "look", round(random.uniform(0.0, 12.0), 2)) for _ in range(3)]
        world = replace(world, events=(*world.events, *looks))
    if random.random() < 0.05:
        refuses = random.choice(["max_tokens", "temperature"])
        endpoints = (replace(world.endpoints[0], refuses=refuses), *world.endpoints[1:])
        world = replace(world, endpoints=endpoints)
    return _printed(world, random) if random.random() < 0.08 else world


def _printed(world: World, random: Random) -> World:
    """Return a world whose results go to standard output as well, to a reader that may go away."""
    options = {**world.job.options, "output": "-", "ordered": random.random() < 0.4}
    events = world.events
    if random.random() < 0.2:
        lines = random.randint(0, 1 + len(world.units))
        events = (*events, Event(random.choice([0, 0, 1]), "reader-gone", lines))
    return replace(world, job=replace(world.job, options=options), events=events)


def _faulty_rows(seed: int, random: Random) -> World:
    rows = draw_rows(random, random.randint(1, 24), random.choice([0.2, 0.5, 1.0]))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 1, 2, 3])))
    world = World(seed, draw_job(random), rows, endpoints, rerun=random.random() < 0.5)
    return replace(world, rerun_options=draw_rerun(random))


def _faulty_servers(seed: int, random: Random) -> World:
    rows = draw_rows(random, random.randint(1, 30), random.choice([0.0, 0.1]))
    endpoints = tuple(
        EndpointSpec(
            speed=random.choice([1.0, 1.0, 3.0]),
            windows=draw_windows(random) if random.random() < 0.7 else (),
            capacity=random.choice([None, None, None, 2, 4]),
        )
        for _ in range(random.choice([1, 2, 3, 4]))
    )
    return World(seed, draw_job(random), rows, endpoints)


def _crashes(seed: int, random: Random) -> World:
    rows = draw_rows(random, random.randint(1, 16), random.choice([0.0, 0.3]))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 2])))
    events = draw_events(random, random.randint(1, 4))
    pause = random.choice([0.0, 5.0, 90.0])
    return World(seed, draw_job(random), rows, endpoints, events, pause, random.random() < 0.3)


def _suspensions(seed: int, random: Random) -> World:
    """A process is suspended for a while, as with a laptop, and the same command given again."""
    rows = draw_rows(random, random.randint(1, 16), random.choice([0.0, 0.3]))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 2])))
    at = round(random.uniform(0.0, 6.0), 2)
    events = [Event(0, "suspend", at, at + random.choice([10.0, 50.0, 61.0, 75.0, 300.0]))]
    for start in (1, 3):
        kind = random.choice(["kill", "kill-at-call", "term", "power", "none", "none"])
        if kind != "none":
            events.append(Event(start, kind, round(random.uniform(0.0, 20.0), 2)))  # type: ignore[arg-type]
    return World(seed, draw_job(random), rows, endpoints, tuple(events))


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
    job = replace(draw_job(random), hedge=random.choice(["auto", 2.0, 3.0]), timeout=60.0)
    if random.random() < 0.6:
        job = replace(job, concurrency="auto", per_endpoint="auto")
    return World(seed, job, rows, endpoints)


def _long_illness(seed: int, random: Random) -> World:
    """One server is ill for a long time, while another has work for longer."""
    begin = random.choice([0.0, 2.0])
    ill = Window(begin, begin + 40.0, random.choice(WINDOWS))
    rows = tuple(RowSpec(f"r{number}", seconds=5.0) for number in range(50))
    job = JobSpec(concurrency=2)
    return World(seed, job, rows, (EndpointSpec(), EndpointSpec(windows=(ill,))))


def _everything(seed: int, random: Random) -> World:
    rows = draw_rows(random, random.randint(1, 24), 0.3)
    endpoints = tuple(
        EndpointSpec(
            random.choice([1.0, 2.0]), draw_windows(random) if random.random() < 0.5 else ()
        )
        for _ in range(random.choice([1, 2, 3]))
    )
    events = list(draw_events(random, random.randint(0, 3)))
    if random.random() < 0.3:
        for _ in range(random.choice([1, 2])):
            numbers = range(len(endpoints))
            hosts = tuple(random.sample(numbers, random.randint(0, len(numbers))))
            events.append(Event(0, "hosts", round(random.uniform(0.0, 6.0), 2), hosts=hosts))
        events.append(Event(0, "hosts", 20.0, hosts=tuple(range(len(endpoints)))))
    return World(seed, draw_job(random), rows, endpoints, tuple(events), random.choice([1.0, 90.0]))


def _outage(seed: int, random: Random) -> World:
    """All servers fail for good in the same moment; a person repairs them much later."""
    begin = random.choice([0.0, 0.0, 3.0, 10.0])
    quotas = random.choice([(), ("quota",) * 60])
    endpoints = tuple(
        EndpointSpec(windows=(Window(begin, 300.0, random.choice([*WINDOWS, *quotas])),))
        for _ in range(random.choice([1, 2, 3]))
    )
    rows = draw_rows(random, random.randint(55, 70), 0.0)
    return World(seed, draw_job(random), rows, endpoints, pause=300.0)


def _limited(seed: int, random: Random) -> World:
    """Starts with a deadline or a budget."""
    rows = draw_rows(random, random.randint(4, 24), random.choice([0.0, 0.2]))
    endpoints = tuple(
        EndpointSpec(windows=draw_windows(random) if random.random() < 0.2 else ())
        for _ in range(random.choice([1, 1, 2]))
    )
    job = draw_job(random)
    # A start with less time or money than rows that fail need for their tries never ends them, and
    # the next one begins with them again.
    failing = [row for row in rows if row.replies[-1] in FAILING]
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
    events = draw_events(random, random.choice([0, 0, 1]))
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
    rows = draw_rows(random, random.randint(4, 20), random.choice([0.2, 0.6]))
    rows = without_long_pauses(rows)
    endpoints = tuple(
        EndpointSpec(windows=draw_windows(random) if random.random() < 0.2 else ())
        for _ in range(random.choice([1, 1, 2]))
    )
    job, kind = draw_job(random), random.choice(["row", "failures", "rpm"])
    if kind == "row":
        job = replace(job, row_seconds=random.choice([2.0, 5.0, 15.0]), timeout=60.0)
    elif kind == "failures":  # rows that fail in each start leave one failure or more for others
        failing = sum(row.replies[-1] in FAILING for row in rows)
        job = replace(job, stop_after=failing * job.answers + random.choice([1, 1, 2, 4]))
    else:
        job = replace(job, rpm=random.choice([30, 60, 120, 300]))
    events = draw_events(random, random.choice([0, 0, 1]))
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
    job = replace(draw_job(random), alike=alike, concurrency=random.choice([1, 2, 4, 8]))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 1, 2])))
    events = draw_events(random, random.choice([0, 0, 0, 1]))
    return World(seed, job, rows, endpoints, events)


def _pauses(seed: int, random: Random) -> World:
    """Servers that refuse rows with pauses of several lengths, while others are in flight."""
    pauses = ("429", "429+1", "429+5", "429+12", "429+40", "429+d9", "429+m2500", "503+4", "529+20")
    share = random.choice([0.2, 0.4])
    rows = tuple(
        RowSpec(
            f"r{number}",
            replies=(random.choice(pauses) if random.random() < share else "ok", "ok"),
            seconds=random.choice([0.2, 1.0, 2.0, 3.0]),
        )
        for number in range(random.randint(6, 28))
    )
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 1, 2])))
    job = replace(draw_job(random), concurrency=random.choice([4, 8, "auto"]), hedge="off")
    return World(seed, job, rows, endpoints, draw_events(random, random.choice([0, 0, 0, 1])))


def _killers(seed: int, random: Random) -> World:
    """Rows with which servers crash, once or again and again."""
    rows = list(draw_rows(random, random.randint(2, 12), random.choice([0.0, 0.2])))
    for _ in range(random.choice([1, 1, 2, 3])):
        number = random.randrange(len(rows))
        crashes = tuple(random.choice(CRASHES) for _ in range(random.choice([1, 2, 3, 5, 6])))
        rows[number] = replace(rows[number], replies=(*crashes, *rows[number].replies))
        if "unreadable" in rows[number].replies:
            rows[number] = replace(rows[number], replies=(*crashes, "ok"))
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 2, 2, 3])))
    job = replace(draw_job(random), timeout=60.0)
    events = draw_events(random, random.choice([0, 0, 0, 1]))
    return World(seed, job, tuple(rows), endpoints, events, rerun=random.random() < 0.5)


def _leaving(seed: int, random: Random) -> World:
    """A server goes from bad to worse, leaves the hostfile meanwhile, and may come back."""
    rows = draw_rows(random, random.choice([1, 2, 3, 5, 12]), random.choice([0.0, 0.2]))
    begin = random.choice([AT_WORK, AT_WORK, AT_WORK, random.uniform(0.1, 3.0)])
    seconds = random.choice([0.1, 0.1, 0.2, 0.4, 2.0])
    worse = begin + seconds + random.choice([4.0, 15.0, 40.0])
    ill = (
        Window(begin, begin + seconds, random.choice(BAD)),
        Window(
            begin + seconds,
            worse,
            random.choice(random.choice([WINDOWS, UNANSWERED, UNANSWERED])),
        ),
    )
    count = random.choice([1, 2, 2, 3])
    endpoints = (EndpointSpec(windows=ill), *(EndpointSpec() for _ in range(count)))
    at = max(0.0, round(begin + random.uniform(-0.5, 1.0), 2))  # it is read a second later
    events = [Event(0, "hosts", at, hosts=tuple(range(1, count + 1)))]
    if random.random() < 0.4:
        back = at + random.choice([2.0, 10.0, 30.0])
        events.append(Event(0, "hosts", back, hosts=tuple(range(count + 1))))
    job = replace(draw_job(random), retries=random.choice([0, 0, 0, 1, 2]), hedge="off")
    return World(seed, job, rows, endpoints, tuple(events))


def _rejoining(seed: int, random: Random) -> World:
    """A server leaves the hostfile, comes back while it still works on rows, and leaves again; or
    its tags change, which makes it a new one beside the old."""
    count = random.choice([2, 2, 3])
    endpoints = tuple(
        EndpointSpec(
            random.choice([1.0, 1.0, 2.0]),
            draw_windows(random) if random.random() < 0.1 else (),
            most=random.choice([None, None, 2, 4]),
        )
        for _ in range(count)
    )
    seconds = random.choice([(1.0, 5.0), (5.0, 15.0), (15.0,)])
    rows = tuple(
        RowSpec(
            f"r{number}", seconds=random.choice(seconds), replies=(random.choice(_FEW_BAD), "ok")
        )
        for number in range(random.randint(6, 24))
    )
    present, weight, at = set(range(count)), 1.0, random.uniform(0.0, 3.0)
    events = []
    for _ in range(random.choice([2, 3, 3, 4, 5])):
        if random.random() < 0.25:
            weight = 3.0 - weight
        else:
            present ^= {random.choice([0, 0, 0, count - 1])}
        hosts = tuple(sorted(present)) or (1,)
        events.append(Event(0, "hosts", round(at, 2), hosts=hosts, weight=weight))
        at += random.choice([random.uniform(0.2, 2.0), random.uniform(2.1, 5.0), 12.0])
    job = replace(draw_job(random), hedge="off", timeout=60.0)
    return World(seed, job, rows, endpoints, tuple(events))


_FEW_BAD = ("ok", "ok", "ok", "ok", "ok", "500", "503", "reset")


def _contexts(seed: int, random: Random) -> World:
    """Servers with contexts of several lengths, and prompts that only some of them take."""
    lengths = random.sample([512, 1024, 4096], 2)
    endpoints = tuple(
        EndpointSpec(
            random.choice([1.0, 1.0, 2.0]),
            draw_windows(random) if random.random() < 0.25 else (),
            context=random.choice(lengths),
            tokenizes=random.random() < 0.5,
        )
        for _ in range(random.choice([1, 2, 3, 3]))
    )
    longest = max(endpoint.context for endpoint in endpoints)
    rows = []
    for row in draw_rows(random, random.randint(1, 20), random.choice([0.0, 0.2])):
        tokens = random.choice([10, 10, 250, 600, 1800, 5000])
        if row.replies != ("unreadable",):
            short = tuple(reply for reply in row.replies if reply != "overflow")
            replies = ("overflow",) if tokens > longest - 100 else (*short, "ok")
            row = replace(row, text="stone " * (tokens * 4 // 6), replies=replies)
        rows.append(row)
    events = draw_events(random, random.choice([0, 0, 0, 1]))
    job = replace(draw_job(random), hedge="off")
    return World(seed, job, tuple(rows), endpoints, events)


def _paced(seed: int, random: Random) -> World:
    """Servers that take so many requests a minute, and say so or not."""
    tells: Literal["", "after", "limits"] = random.choice(["", "", "after", "limits", "limits"])
    pace = random.choice([20, 40, 60, 120])
    endpoints = tuple(
        EndpointSpec(pace=random.choice([pace, pace, None]), tells=tells)
        for _ in range(random.choice([1, 1, 2]))
    )
    rows = draw_rows(random, random.randint(10, 70), random.choice([0.0, 0.0, 0.1]), lasting=False)
    rows = without_long_pauses(rows)
    job = replace(draw_job(random), hedge="off", concurrency=random.choice([2, 8, 16, "auto"]))
    if random.random() < 0.3:
        job = replace(job, tpm=random.choice([150, 400, 2000]), rpm=random.choice([None, 60]))
    return World(seed, job, rows, endpoints, draw_events(random, random.choice([0, 0, 0, 1])))


def _full_drain(seed: int, random: Random) -> World:
    """The disk fills while a start that was stopped still waits for what it has sent."""
    rows = tuple(
        RowSpec(
            f"r{number}",
            seconds=random.choice([1.0, 3.0, 4.0, 5.0]),
            replies=(random.choice(["ok", "ok", "ok", "400"]),),
        )
        for number in range(random.randint(8, 24))
    )
    kind = random.choice(["term", "int", "stop-file", "term", "deadline", "failures", "alike"])
    job, at, events = draw_job(random), round(random.uniform(0.05, 2.5), 2), list[Event]()
    job = replace(job, concurrency=random.choice([2, 8, "auto"]), per_endpoint="auto")
    if kind == "deadline":
        job = replace(job, deadline=random.choice([12.0, 20.0]), concurrency=1)
        at = 0.75 * (job.deadline or 0.0)
    elif kind == "failures":
        refused = sum(row.replies == ("400",) for row in rows)
        job = replace(job, stop_after=refused * random.choice([1, 2, 3]) // 3 + 1)
    elif kind == "alike":
        job = replace(job, alike=4)
        rows = tuple(replace(row, replies=("400",)) for row in rows)
    else:
        events.append(Event(0, kind, at))  # type: ignore[arg-type]
    fault = random.choice(["full", "full", "full", "full", "tight", "sync-fails"])
    begin = round(at + random.uniform(0.01, 1.5), 2)
    events.append(Event(0, fault, begin, begin + random.choice([2.0, 1000.0, 1000.0])))  # type: ignore[arg-type]
    endpoints = tuple(EndpointSpec() for _ in range(random.choice([1, 1, 2])))
    return World(seed, job, rows, endpoints, tuple(events), rerun=random.random() < 0.3)


def _relapses(seed: int, random: Random) -> World:
    """All servers are ill for a while, are well for longer, and fall ill again."""
    begin = random.choice([2.0, 10.0])
    again = begin + random.choice([90.0, 135.0, 150.0])
    count, first, second = (
        random.choice([1, 1, 2]),
        random.choice(WINDOWS),
        random.choice(WINDOWS),
    )
    windows = (
        Window(begin, begin + random.choice([5.0, 20.0, 60.0]), first),
        Window(again, again + random.choice([2.0, 10.0, 40.0]), second),
    )
    rows = tuple(
        RowSpec(f"r{number}", seconds=random.choice([5.0, 15.0])) for number in range(14 * count)
    )
    job = replace(draw_job(random), concurrency=count, timeout=60.0, hedge="off")
    return World(seed, job, rows, tuple(EndpointSpec(windows=windows) for _ in range(count)))


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
    "kinds": draw_jobs.kinds,
    "everything": _everything,
    "outage": _outage,
    "fair": _fair,
    "suspensions": _suspensions,
    "late rows": _late_rows,
    "long illness": _long_illness,
    "agents": draw_jobs.agents,
    "stages": draw_jobs.stages,
    "limited": _limited,
    "batches": draw_jobs.batches,
    "shards": draw_jobs.shards,
    "paid in vain": _paid_in_vain,
    "limits": _limits,
    "refusals": _refusals,
    "killers": _killers,
    "pauses": _pauses,
    "leaving": _leaving,
    "relapses": _relapses,
    "rejoining": _rejoining,
    "full drain": _full_drain,
    "contexts": _contexts,
    "paced": _paced,
    "killed tools": draw_jobs.killed_tools,
    "copies": draw_jobs.copies,
    "hosted": draw_jobs.hosted,
    "streams": draw_jobs.streams,
    "grown": draw_jobs.grown,
}

_WEIGHTS = {
    "rows": 5, "servers": 5, "crashes": 7, "kinds": 5, "everything": 4, "outage": 1, "fair": 1,
    "suspensions": 2, "late rows": 2, "long illness": 1, "stages": 5, "agents": 4, "batches": 4,
    "leaving": 5, "relapses": 2, "full drain": 2, "killed tools": 2, "contexts": 2, "paced": 2,
    "refusals": 2, "copies": 2, "limits": 2, "paid in vain": 1,
    "pauses": 2, "hosted": 3, "streams": 2, "grown": 1,
}  # fmt: skip
"""How often each theme is drawn; 3 for others."""
