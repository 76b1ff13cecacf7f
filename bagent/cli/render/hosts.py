"""Called endpoints on the screen: the table on stdout, words on stderr."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bagent.backends.registry import unsupported_settings
from bagent.fleet.health_check import FleetHealthCheck, HealthResult, counts, grouped
from bagent.job.redaction import mask_command
from bagent.observe.formatting import duration, visible
from bagent.text.terminal import unguarded

COLUMNS = (
    "endpoint",
    "state",
    "engine",
    "model",
    "context",
    "can",
    "running",
    "waiting",
    "ms",
    "tags",
    "reason",
)
"""Of the table; ``can`` lists capabilities, ``ms`` is how long the real request took."""

FIRST_WORD, BETWEEN_WORDS, LONGEST_QUIET = 2.0, 2.0, 15.0
"""Seconds: until the first word of progress, between two, and at most while nothing changes."""

_LONGER_NAME = re.compile(r"[\w.-]|:[0-9]")
_GROUPS = 5
_COLOURS = {"ready": "green", "loading": "yellow", "busy": "yellow", "unasked": "dim"}
_CAN = (
    ("lists", "list"),
    ("chat_batch", "chat batch"),
    ("tokenize", "tokenize"),
    ("metrics", "metrics"),
    ("load", "load"),
)


def print_called(called: Sequence[HealthResult], form: str) -> None:
    """Print the endpoints as ``form``: ``table`` or ``json`` (one object a line)."""
    from bagent.cli.render.tables import write_rows

    if form == "json":
        rows = [as_json(one) for one in called]
        write_rows(list(rows[0]), [list(row.values()) for row in rows], "jsonl")
    elif sys.stdout.isatty():
        _print_rich(called)
    else:
        cells = [[visible(cell) for cell in as_cells(one)] for one in called]
        write_rows(COLUMNS, cells, "table")


def as_json(one: HealthResult) -> dict[str, Any]:
    """All that is known of an endpoint; null is not known."""
    known, load, proof = one.known, one.load, one.proof
    skips = unsupported_settings(known.engine if known else None)
    return {
        "endpoint": one.endpoint.name,
        "url": one.endpoint.url,
        "state": one.state,
        "reason": one.reason or None,
        "engine": known.engine if known else None,
        "version": known.version if known else None,
        "model": one.model,
        "models": list(known.models) if known else None,
        "context": known.context if known else None,
        **{field: getattr(known, field, None) for field, _ in _CAN},
        "cached_tokens": known.cached_tokens if known else None,
        "lacks": list(skips.lacks) if known else None,
        "untold": list(skips.untold) if known else None,
        "running": load.running if load else None,
        "waiting": load.waiting if load else None,
        "ms": round(proof.ms, 1) if proof else None,
        "proof": proof.route if proof else None,
        "tags": dict(one.endpoint.tags),
    }


def as_cells(one: HealthResult) -> list[str]:
    """The cells of an endpoint's line in a table, in the order of :data:`COLUMNS`."""
    known, load = one.known, one.load
    engine = " ".join(filter(None, (known.engine, known.version))) if known else ""
    can = [word for field, word in _CAN if getattr(known, field, None)]
    if one.proof is not None and one.proof.route != "chat":
        can.insert(0, f"{one.proof.route} only")
    numbers = (load.running, load.waiting) if load else (None, None)
    return [
        one.endpoint.name,
        one.state,
        engine,
        one.model or "",
        str(known.context) if known and known.context else "",
        ", ".join(can),
        *("" if number is None else str(number) for number in numbers),
        f"{one.proof.ms:.0f}" if one.proof else "",
        " ".join(f"{key}={value}" for key, value in one.endpoint.tags.items()),
        _without_name(one.reason, one.endpoint.name),
    ]


def _without_name(reason: str, name: str) -> str:
    """The reason less the endpoint's name, which stands in the same line already."""
    kept, *others = reason.split(name)  # a pattern for each of thousands of names takes seconds
    for rest in others:
        lead = next((word for word in (" to ", " from ") if kept.endswith(word)), "")
        if (kept and not lead) or _LONGER_NAME.match(rest):
            kept += name + rest
        else:
            kept = kept.removesuffix(lead) + rest
    return kept.lstrip(": ")


def _print_rich(called: Iterable[HealthResult]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        number = name in ("context", "running", "waiting", "ms")
        table.add_column(
            name,
            justify="right" if number else "left",
            no_wrap=number or name in ("endpoint", "state"),
            overflow="fold",
        )
    for one in called:
        cells = [Text(visible(cell)) for cell in as_cells(one)]
        cells[1].stylize(_COLOURS.get(one.state, "red"))
        table.add_row(*cells)
    Console(file=unguarded(sys.stdout), highlight=False).print(table)


async def tell_progress(roll_call: FleetHealthCheck, seconds: float) -> None:
    """Say on stderr how far a roll call is, each time that this changed, until cancelled."""
    began = time.monotonic()
    said, said_at, kinds = "", began, set[tuple[str, str]]()
    await asyncio.sleep(FIRST_WORD)
    while True:
        words, now = counts(roll_call.called), time.monotonic()
        if words != said or now - said_at >= LONGEST_QUIET:
            said, said_at = words, now
            _say(f"[{duration(now - began)} of {duration(seconds)}] {words}")
            for group in grouped(one for one in roll_call.called if one is not None)[:_GROUPS]:
                if group.key not in kinds:
                    kinds.add(group.key)
                    _say(f"  {group.words()}")
        await asyncio.sleep(BETWEEN_WORDS)


def tell_end(
    called: Sequence[HealthResult], written: Path | None, hostfile: str, *, enough: bool
) -> None:
    """Say on stderr how many are ready, why others are not, and what comes next."""
    _say(counts(called))
    groups = grouped(called)
    for group in groups[:_GROUPS]:
        _say(f"  {group.words()}")
    if len(groups) > _GROUPS:
        _say(f"  and {len(groups) - _GROUPS} other reasons: see the table")
    _tell_skips(called)
    ready = sum(one.ready for one in called)
    if written is not None:
        _say(
            f"wrote {ready} of them to {written}" if ready else f"none ready: {written} not written"
        )
    use = str(written) if written is not None and ready else hostfile
    if enough and use != "-":
        _say(f"next: bagent run JOB.yaml --hostfile {shlex.quote(use)}")


def tell_one(one: HealthResult, backend: str) -> None:
    """The same for the one server that ``--backend`` named."""
    _say(counts([one]))
    for group in grouped([one]):
        _say(f"  {group.words()}")
    _tell_skips([one])
    if one.ready:
        model = f" --model {shlex.quote(one.model)}" if one.model else ""
        _say(f"next: bagent run JOB.yaml --backend {mask_command([backend])}{model}")


def _tell_skips(called: Sequence[HealthResult]) -> None:
    """What jobs do without at the engines that were found."""
    engines = dict.fromkeys(one.known.engine for one in called if one.known and one.known.engine)
    for engine in engines:
        words = unsupported_settings(engine).words()
        if words:
            _say(f"  {engine}: {words}")


def _say(words: str) -> None:
    sys.stderr.write(
        f"{visible(words)}\n" if not words.startswith(" ") else f"  {visible(words)}\n"
    )
    sys.stderr.flush()
