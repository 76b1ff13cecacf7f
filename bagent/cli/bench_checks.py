"""Options of ``bagent bench`` that would do nothing, or contradict each other."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.bench.plan import BenchPlan

_OPTIONS = {
    "concurrency": "--concurrency",
    "rate": "--rate",
    "replay": "--replay",
    "ways": "--as",
    "input_tokens": "--input-tokens",
    "output_tokens": "--output-tokens",
    "prefix_tokens": "--prefix-tokens",
    "list_size": "--list-size",
    "groups": "--groups",
    "skew": "--skew",
    "think": "--think",
    "turn_tokens": "--turn-tokens",
    "arrival": "--arrival",
    "burstiness": "--burstiness",
}
_PROCESSES_A_CORE = 4
_FEW_PROCESSES = 8
_MADE = ("input_tokens", "output_tokens", "prefix_tokens", "ways", "list_size")


def check_options(given: dict[str, Any], plan: BenchPlan) -> None:
    """Refuse what would be passed over in silence, and settings that contradict each other.

    Args:
        given: the options by the name of their parameter; None, or False, where not given.

    Raises:
        UsageError: there is such an option.
    """
    _refuse_excluded(given)
    _refuse_idle(given, plan)
    if plan.sweep:
        _check_sweep(plan)
    if plan.prefix_tokens >= plan.input_tokens:
        raise UsageError(
            f"--prefix-tokens {plan.prefix_tokens}: not below the {plan.input_tokens} input tokens",
            hint="--input-tokens counts the prefix too",
        )
    loops = plan.concurrency or plan.rates
    if plan.speeds and loops and plan.seconds is None and plan.requests is None:
        raise UsageError(
            "a load beside --replay needs an end", hint="give --duration or --requests"
        )
    if plan.ramps and plan.seconds is None:
        raise UsageError("--rate with a ramp needs a time", hint="give --duration T")
    if not 0 < plan.burstiness < math.inf:
        raise UsageError(f"--burstiness {plan.burstiness:g}: not above 0", hint="1 is Poisson")
    if not math.isfinite(plan.skew):
        raise UsageError(f"--skew {plan.skew:g}: not a number", hint="0 is even, 1 is Zipf's")
    _check_workers(plan.workers)
    if "affinity" in plan.routings and not plan.prefix_tokens and plan.turns == 1:
        raise UsageError("--routing affinity needs groups", hint="give --prefix-tokens N")
    if plan.turns > 1 and (plan.speeds or set(plan.ways) - {"chat", "completions"}):
        raise UsageError(
            "--turns: what is recorded, rows of a job, lists and batches have no turns",
            hint="--as chat or completions",
        )


def check_writable(file: Path) -> None:
    """Refuse a file that could not be written at the end.

    Raises:
        UsageError: its folder is not there or cannot be written to, or it is a folder.
    """
    folder = file.parent
    if file.is_dir():
        raise UsageError(f"--write-hostfile {file}: this is a folder", hint="name a file")
    if not folder.is_dir():
        raise UsageError(f"--write-hostfile {file}: no folder {folder}", hint="make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--write-hostfile {file}: {folder} cannot be written to")


def _check_workers(workers: int) -> None:
    from bagent.bench.crew import cores

    most = max(_FEW_PROCESSES, _PROCESSES_A_CORE * cores())
    if workers > most:
        raise UsageError(
            f"--workers {workers}: they would wait for each other", hint=f"at most {most} here"
        )


def _refuse_idle(given: dict[str, Any], plan: BenchPlan) -> None:
    """Options that do nothing without another one."""
    in_lists = bool({"list", "chat-batch"} & set(plan.ways))
    opened = bool(plan.rates or plan.ramps or plan.sweep)
    needs = (
        (("groups", "skew"), plan.prefix_tokens > 0, "--prefix-tokens N"),
        (("think", "turn_tokens"), plan.turns > 1, "--turns N"),
        (("list_size",), in_lists, "--as list or chat-batch"),
        (("arrival",), opened, "--rate R or --sweep"),
        (("burstiness",), plan.arrival == "gamma", "--arrival gamma"),
    )
    for names, met, other in needs:
        for name in names:
            if given[name] is not None and not met:
                option = _OPTIONS[name]
                raise UsageError(
                    f"{option} does nothing without {other}", hint=f"or leave {option}"
                )


def _refuse_excluded(given: dict[str, Any]) -> None:
    """Options that take each other's place."""
    excluded = (
        ("sweep", "--sweep finds its loads by itself", ("concurrency", "rate", "replay")),
        ("job", "--job sends its own rows, each alone", _MADE),
        ("replay", "--replay sends what is recorded", ("input_tokens", "output_tokens")),
    )
    for first, why, others in excluded:
        for name in others:
            if given[first] and given[name] is not None:
                raise UsageError(f"{why}: no {_OPTIONS[name]}", hint="leave one out")


def _check_sweep(plan: BenchPlan) -> None:
    if len(plan.ways) > 1 or len(plan.routings) > 1 or plan.repeats > 1:
        raise UsageError(
            "--sweep goes one way, with one routing, once",
            hint="one word after --as and --routing, no --repeats",
        )
    if plan.routings[0] == "isolated":
        raise UsageError(
            "--sweep loads the whole fleet", hint="--routing isolated has no part in it"
        )
