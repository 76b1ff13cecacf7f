"""Shrinking of a world that breaks an invariant, and its script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from worlds.invariants import problems
from worlds.play import play
from worlds.spec import EndpointSpec, JobSpec, RowSpec, World


def breaks(world: World, name: str) -> bool:
    """Return whether a world breaks an invariant."""
    return any(broken == name for broken, _ in problems(play(world)))


def shrink(world: World, name: str, tries: int = 400) -> World:
    """Return a smaller world that breaks the same invariant."""
    progress = True
    while progress and tries > 0:
        progress = False
        for smaller in _smaller(world):
            tries -= 1
            if breaks(smaller, name):
                world, progress = smaller, True
                break
            if tries <= 0:
                break
    return world


def _smaller(world: World) -> Iterator[World]:
    """Yield worlds with less in them, the boldest first."""
    rows = world.rows
    yield from _fewer_rows(world)
    for number in range(len(world.events)):
        yield replace(world, events=_without(world.events, number))
    if len(world.endpoints) > 1 and not any(event.hosts for event in world.events):
        for number in range(len(world.endpoints)):
            yield replace(world, endpoints=_without(world.endpoints, number))
    for number, endpoint in enumerate(world.endpoints):
        for simpler in _simpler_endpoints(endpoint):
            yield replace(world, endpoints=_with(world.endpoints, number, simpler))
    for number, row in enumerate(rows):
        for simpler_row in _simpler_rows(row, number):
            yield replace(world, rows=_with(rows, number, simpler_row))
    if world.rerun:
        yield replace(world, rerun=False)
    if world.rerun_options:
        yield replace(world, rerun_options={})
    for job in _simpler_jobs(world.job):
        yield replace(world, job=job)


def _simpler_jobs(job: JobSpec) -> Iterator[JobSpec]:
    usual = JobSpec(concurrency="auto")
    for name in ("hedge", "truncated", "allow_failures", "segment_bytes", "concurrency"):
        value = getattr(usual, name)
        if getattr(job, name) != value:
            yield replace(job, **{name: value})


def _fewer_rows(world: World) -> Iterator[World]:
    rows = world.rows
    if len(rows) > 3:
        yield _with_rows(world, range(len(rows) // 2))
        yield _with_rows(world, range(len(rows) // 2, len(rows)))
    for number in range(len(rows) if len(rows) > 1 else 0):
        yield _with_rows(world, [other for other in range(len(rows)) if other != number])


def _with_rows(world: World, numbers: Sequence[int]) -> World:
    """Return a world with some of its rows; one that was equal to another of them is its own."""
    new = {number: position for position, number in enumerate(numbers)}
    rows = (world.rows[number] for number in numbers)
    return replace(
        world,
        rows=tuple(
            row if row.same is None else replace(row, same=new.get(row.same)) for row in rows
        ),
    )


def _simpler_endpoints(endpoint: EndpointSpec) -> Iterator[EndpointSpec]:
    for index in range(len(endpoint.windows)):
        yield replace(endpoint, windows=_without(endpoint.windows, index))
    if endpoint.capacity is not None:
        yield replace(endpoint, capacity=None)
    if endpoint.speed != 1.0:
        yield replace(endpoint, speed=1.0)


def _simpler_rows(row: RowSpec, number: int) -> Iterator[RowSpec]:
    plain = RowSpec(f"r{number}", replies=row.replies)
    if row != plain:
        yield plain
    if len(row.replies) > 1:
        for index in range(len(row.replies)):
            yield replace(row, replies=_without(row.replies, index))


def _without(items: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return items[:number] + items[number + 1 :]


def _with(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    return (*items[:number], item, *items[number + 1 :])


def script(world: World, name: str) -> str:
    """Return a world as a test for one of ``tests/worlds/test_found*.py``."""
    body = _literal(world, 4)
    return f"def test_{name}_{world.seed}() -> None:\n    holds(\n{body},\n    )\n"


def _literal(value: Any, indent: int) -> str:
    """Return a value as Python, without fields that have their usual value."""
    pad = " " * (indent + 4)
    if is_dataclass(value) and not isinstance(value, type):
        parts = []
        for field in fields(value):
            item = getattr(value, field.name)
            usual = field.default_factory() if callable(field.default_factory) else field.default  # type: ignore[misc]
            if item != usual:
                parts.append(f"{field.name}={_inline(item)}")
        return f"{pad}{type(value).__name__}(" + ", ".join(parts) + ")"
    return pad + repr(value)


def _inline(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + "".join(f"{_inline(item)}, " for item in value).rstrip(" ") + ")"
    return _literal(value, -4)
