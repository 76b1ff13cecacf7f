"""Checked endpoints on the terminal: the table on stdout, messages on stderr."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagent.backends.registry import unsupported_settings
from bagent.cli.render import tables
from bagent.fleet.health_check import FleetHealthCheck, HealthResult, format_counts, group_failures
from bagent.job.redaction import mask_command
from bagent.observe.formatting import duration, visible

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
"""Columns of the table; ``can`` lists capabilities, ``ms`` is the time of the real request."""

FIRST_S, INTERVAL_S, LONGEST_S = 2.0, 2.0, 15.0
"""Seconds until the first message, between two, and at most while nothing changes."""

_LONGER_NAME = re.compile(r"[\w.-]|:[0-9]")
_GROUPS = 5
_COLOURS = {"ready": "green", "loading": "yellow", "busy": "yellow", "unasked": "dim", "": "red"}
_NUMBERS = ("context", "running", "waiting", "ms")
_CAN = (
    ("lists", "list"),
    ("chat_batch", "chat batch"),
    ("tokenize", "tokenize"),
    ("metrics", "metrics"),
    ("load", "load"),
)


def print_results(results: Sequence[HealthResult], form: str) -> None:
    """Print the endpoints as ``form``: ``table`` or ``json`` (one object a line)."""
    if form == "json":
        rows = [as_json(result) for result in results]
        tables.write_rows(list(rows[0]), [list(row.values()) for row in rows], "jsonl")
        return
    columns = [
        tables.TableColumn(
            name,
            right=name in _NUMBERS,
            no_wrap=name in _NUMBERS or name in ("endpoint", "state"),
            styles=_COLOURS if name == "state" else {},
        )
        for name in COLUMNS
    ]
    tables.print_table(columns, [as_cells(result) for result in results])


def as_json(result: HealthResult) -> dict[str, Any]:
    """Return everything about an endpoint; what is unknown is null."""
    capabilities, load, proof = result.capabilities, result.load, result.proof
    limits = unsupported_settings(capabilities.engine if capabilities else None)
    return {
        "endpoint": result.endpoint.name,
        "url": result.endpoint.url,
        "state": result.state,
        "reason": result.reason or None,
        "engine": capabilities.engine if capabilities else None,
        "version": capabilities.version if capabilities else None,
        "model": result.model,
        "models": list(capabilities.models) if capabilities else None,
        "context": capabilities.context if capabilities else None,
        **{field: getattr(capabilities, field, None) for field, _ in _CAN},
        "cached_tokens": capabilities.cached_tokens if capabilities else None,
        "unsupported": list(limits.unsupported) if capabilities else None,
        "not_reported": list(limits.not_reported) if capabilities else None,
        "running": load.running if load else None,
        "waiting": load.waiting if load else None,
        "ms": round(proof.ms, 1) if proof else None,
        "proof": proof.route if proof else None,
        "tags": dict(result.endpoint.tags),
    }


def as_cells(result: HealthResult) -> list[str]:
    """Return the cells of an endpoint in the order of :data:`COLUMNS`."""
    capabilities, load = result.capabilities, result.load
    engine = (
        " ".join(filter(None, (capabilities.engine, capabilities.version))) if capabilities else ""
    )
    can = [label for field, label in _CAN if getattr(capabilities, field, None)]
    if result.proof is not None and result.proof.route != "chat":
        can.insert(0, f"{result.proof.route} only")
    numbers = (load.running, load.waiting) if load else (None, None)
    return [
        result.endpoint.name,
        result.state,
        engine,
        result.model or "",
        str(capabilities.context) if capabilities and capabilities.context else "",
        ", ".join(can),
        *("" if number is None else str(number) for number in numbers),
        f"{result.proof.ms:.0f}" if result.proof else "",
        " ".join(f"{key}={value}" for key, value in result.endpoint.tags.items()),
        _without_name(result.reason, result.endpoint.name),
    ]


def _without_name(reason: str, name: str) -> str:
    """Remove the endpoint's name from the reason: it is in the same line."""
    text, *parts = reason.split(name)  # a pattern for each of thousands of names takes seconds
    for part in parts:
        lead = next((suffix for suffix in (" to ", " from ") if text.endswith(suffix)), "")
        if (text and not lead) or _LONGER_NAME.match(part):
            text += name + part
        else:
            text = text.removesuffix(lead) + part
    return text.lstrip(": ")


async def log_progress(health_check: FleetHealthCheck, seconds: float) -> None:
    """Print the progress of a check on stderr when it changes, until cancelled."""
    began = time.monotonic()
    last_message, logged_at, reported = "", began, set[tuple[str, str]]()
    await asyncio.sleep(FIRST_S)
    while True:
        message, now = format_counts(health_check.results), time.monotonic()
        if message != last_message or now - logged_at >= LONGEST_S:
            last_message, logged_at = message, now
            _log(f"[{duration(now - began)} of {duration(seconds)}] {message}")
            for group in group_failures(
                result for result in health_check.results if result is not None
            )[:_GROUPS]:
                if group.key not in reported:
                    reported.add(group.key)
                    _log(f"  {group.message()}")
        await asyncio.sleep(INTERVAL_S)


def log_end(
    results: Sequence[HealthResult], written: Path | None, hostfile: str, *, enough: bool
) -> None:
    """Print on stderr how many are ready, why others are not, and the next command."""
    _log(format_counts(results))
    groups = group_failures(results)
    for group in groups[:_GROUPS]:
        _log(f"  {group.message()}")
    if len(groups) > _GROUPS:
        _log(f"  and {len(groups) - _GROUPS} other reasons: see the table")
    _log_unsupported(results)
    ready = sum(result.ready for result in results)
    if written is not None:
        _log(
            f"wrote {ready} of them to {written}" if ready else f"none ready: {written} not written"
        )
    use = str(written) if written is not None and ready else hostfile
    if enough and use != "-":
        _log(f"next: bagent run JOB.yaml --hostfile {shlex.quote(use)}")
    elif not enough:
        _log("next: start the others, then the same command; --wait --timeout 20m waits for them")


def log_single(result: HealthResult, backend: str) -> None:
    """Do the same for the server of ``--backend``."""
    _log(format_counts([result]))
    for group in group_failures([result]):
        _log(f"  {group.message()}")
    _log_unsupported([result])
    if result.ready:
        model = f" --model {shlex.quote(result.model)}" if result.model else ""
        _log(f"next: bagent run JOB.yaml --backend {mask_command([backend])}{model}")


def _log_unsupported(results: Sequence[HealthResult]) -> None:
    """Print what the engines do not support."""
    engines = dict.fromkeys(
        result.capabilities.engine
        for result in results
        if result.capabilities and result.capabilities.engine
    )
    for engine in engines:
        message = unsupported_settings(engine).text()
        if message:
            _log(f"  {engine}: {message}")


def _log(message: str) -> None:
    sys.stderr.write(
        f"{visible(message)}\n" if not message.startswith(" ") else f"  {visible(message)}\n"
    )
    sys.stderr.flush()
