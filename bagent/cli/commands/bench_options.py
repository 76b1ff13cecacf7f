"""The options of ``bagent bench``, and their checks."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bagent.cli.options import Text
from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.bench.plan import BenchPlan

LOAD = "Load"
REQUESTS = "Requests"
CONVERSATIONS = "Conversations"
RESULTS = "Results"

Preset = Annotated[
    Literal["quick", "saturation", "prefix", "agents"] | None,
    typer.Option(
        "--preset",
        help="Use ready settings: quick (1 minute), saturation (5), prefix (shared "
        "beginnings), agents (two turns with a slow tool between).",
        rich_help_panel=LOAD,
    ),
]
Concurrency = Annotated[
    Text,
    typer.Option(
        "--concurrency",
        metavar="N,...",
        help="Keep this many calls in flight at each endpoint.",
        rich_help_panel=LOAD,
    ),
]
Rate = Annotated[
    Text,
    typer.Option(
        "--rate",
        metavar="R,...",
        help="Send this many requests a second to the whole fleet; 2..20 is a ramp.",
        rich_help_panel=LOAD,
    ),
]
Sweep = Annotated[
    bool,
    typer.Option(
        "--sweep", help="Find the saturation, then measure at rates below it.", rich_help_panel=LOAD
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="RUN|FILE",
        help="Send requests at the times and with the lengths recorded there.",
        rich_help_panel=LOAD,
    ),
]
Speed = Annotated[
    Text,
    typer.Option(
        "--speed",
        metavar="S,...",
        help="With --replay: send this many times as fast as recorded.",
        rich_help_panel=LOAD,
    ),
]
Turns = Annotated[
    int | None,
    typer.Option(
        "--turns",
        min=1,
        metavar="N",
        help="Make each request a conversation of N turns; each holds those before.",
        rich_help_panel=CONVERSATIONS,
    ),
]
Think = Annotated[
    Text,
    typer.Option(
        "--think",
        metavar="DURATION",
        help="Wait this long between an answer and the next turn; the default is 1s.",
        rich_help_panel=CONVERSATIONS,
    ),
]
TurnTokens = Annotated[
    int | None,
    typer.Option(
        "--turn-tokens",
        min=1,
        metavar="N",
        help="Add N tokens in each later turn; the default is 128.",
        rich_help_panel=CONVERSATIONS,
    ),
]
Arrival = Annotated[
    Literal["constant", "poisson", "gamma"] | None,
    typer.Option(
        "--arrival",
        help="Choose how requests of --rate arrive; the default is poisson.",
        rich_help_panel=LOAD,
    ),
]
Burstiness = Annotated[
    float | None,
    typer.Option(
        "--burstiness",
        metavar="X",
        help="With --arrival gamma: shape of the distribution; below 1 it comes in bursts.",
        rich_help_panel=LOAD,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests", min=1, metavar="N", help="Send N requests in each load.", rich_help_panel=LOAD
    ),
]
Seconds = Annotated[
    Text,
    typer.Option(
        "--duration",
        metavar="DURATION",
        help="Send each load for this long, such as 30s.",
        rich_help_panel=LOAD,
    ),
]
InputTokens = Annotated[
    int | None,
    typer.Option(
        "--input-tokens",
        min=1,
        metavar="N",
        help="Make each prompt N tokens long.",
        rich_help_panel=REQUESTS,
    ),
]
OutputTokens = Annotated[
    int | None,
    typer.Option(
        "--output-tokens",
        min=1,
        metavar="N",
        help="Ask for N tokens in each answer.",
        rich_help_panel=REQUESTS,
    ),
]
PrefixTokens = Annotated[
    int | None,
    typer.Option(
        "--prefix-tokens",
        min=0,
        metavar="N",
        help="Let prompts of a group share their first N tokens.",
        rich_help_panel=REQUESTS,
    ),
]
Groups = Annotated[
    int | None,
    typer.Option(
        "--groups",
        min=1,
        metavar="N",
        help="Use N different shared beginnings.",
        rich_help_panel=REQUESTS,
    ),
]
Skew = Annotated[
    float | None,
    typer.Option(
        "--skew",
        min=0,
        metavar="X",
        help="Make groups uneven by this Zipf exponent; 0 is even.",
        rich_help_panel=REQUESTS,
    ),
]
Ways = Annotated[
    Text,
    typer.Option(
        "--as",
        metavar="WAY,...",
        help="Send requests in these ways: chat, completions, list, chat-batch.",
        rich_help_panel=REQUESTS,
    ),
]
ListSize = Annotated[
    int | None,
    typer.Option(
        "--list-size",
        min=1,
        metavar="N",
        help="With --as list or chat-batch: put N calls into one request.",
        rich_help_panel=REQUESTS,
    ),
]
Routing = Annotated[
    Text,
    typer.Option(
        "--routing",
        metavar="NAME,...",
        help="Choose endpoints in these ways: balanced (or spread), least-inflight, affinity, "
        "as-run, isolated.",
        rich_help_panel=REQUESTS,
    ),
]
Job = Annotated[
    Path | None,
    typer.Option(
        "--job", metavar="JOB.yaml", help="Send the rows of this job.", rich_help_panel=REQUESTS
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        min=0,
        max=1000,
        metavar="N",
        help="Send N requests to each endpoint first; they do not count.",
        rich_help_panel=LOAD,
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        min=1,
        metavar="N",
        help="Measure all loads N times, in turns.",
        rich_help_panel=LOAD,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", help="Use this seed for arrivals and groups.", rich_help_panel=LOAD
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, metavar="N", help="Send from N processes.", rich_help_panel=LOAD
    ),
]
Slo = Annotated[
    Text,
    typer.Option(
        "--slo",
        metavar="LIMITS",
        help="Count as goodput what meets these limits: ttft=2s,tpot=100ms,e2e=30s.",
        rich_help_panel=RESULTS,
    ),
]
Timeout = Annotated[
    Text,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        help="Give up a request after this time; the default is 5m.",
        rich_help_panel=LOAD,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Write the results into this folder.",
        rich_help_panel=RESULTS,
    ),
]
WriteHostfile = Annotated[
    Path | None,
    typer.Option(
        "--write-hostfile",
        metavar="FILE",
        help="Write the endpoints that are ok as a hostfile.",
        rich_help_panel=RESULTS,
    ),
]
Compare = Annotated[
    Path | None,
    typer.Option(
        "--compare",
        metavar="FILE",
        help="Compare with this older summary.json.",
        rich_help_panel=RESULTS,
    ),
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="EXPR",
        help="Exit with 1 if this holds, such as 'ttft_p99_ms>2000'. Repeatable.",
        rich_help_panel=RESULTS,
    ),
]


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


def check_options(options: dict[str, Any], plan: BenchPlan) -> None:
    """Refuse options without effect and options that contradict each other.

    Args:
        options: by the name of their parameter; None or False where absent.

    Raises:
        UsageError: an option is refused.
    """
    _refuse_excluded(options)
    _refuse_idle(options, plan)
    if plan.sweep:
        _check_sweep(plan)
    if plan.prefix_tokens >= plan.input_tokens:
        raise UsageError(
            f"--prefix-tokens {plan.prefix_tokens}: not below the {plan.input_tokens} input tokens",
            hint="raise --input-tokens, which counts the prefix too",
        )
    loops = plan.concurrency or plan.rates
    if plan.speeds and loops and plan.seconds is None and plan.requests is None:
        raise UsageError(
            "a load beside --replay needs an end", hint="give --duration or --requests"
        )
    if plan.ramps and plan.seconds is None:
        raise UsageError("--rate with a ramp needs a time", hint="give --duration T")
    if not 0 < plan.burstiness < math.inf:
        raise UsageError(
            f"--burstiness {plan.burstiness:g}: not above 0",
            hint="write a number above 0; 1 is Poisson",
        )
    if not math.isfinite(plan.skew):
        raise UsageError(
            f"--skew {plan.skew:g}: not a number", hint="write a number; 0 is even, 1 is Zipf's law"
        )
    _check_workers(plan.workers)
    if "affinity" in plan.routings and not plan.prefix_tokens and plan.turns == 1:
        raise UsageError("--routing affinity needs groups", hint="give --prefix-tokens N")
    if plan.turns > 1 and (plan.speeds or set(plan.ways) - {"chat", "completions"}):
        raise UsageError(
            "--turns does not go with --replay, --job, lists and batches",
            hint="give --as chat or --as completions",
        )


def check_writable(file: Path) -> None:
    """Refuse a file that cannot be written.

    Raises:
        UsageError: its folder is missing or read-only, or it is a folder.
    """
    folder = file.parent
    if file.is_dir():
        raise UsageError(f"--write-hostfile {file}: this is a folder", hint="name a file")
    if not folder.is_dir():
        raise UsageError(f"--write-hostfile {file}: no folder {folder}", hint="make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(
            f"--write-hostfile {file}: {folder} cannot be written to",
            hint="name a file in another folder",
        )


def _check_workers(workers: int) -> None:
    from bagent.bench.workers import available_cores

    most = max(_FEW_PROCESSES, _PROCESSES_A_CORE * available_cores())
    if workers > most:
        raise UsageError(
            f"--workers {workers}: more processes than this machine can run at once",
            hint=f"write at most {most}",
        )


def _refuse_idle(options: dict[str, Any], plan: BenchPlan) -> None:
    """Refuse options without effect."""
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
            if options[name] is not None and not met:
                option = _OPTIONS[name]
                raise UsageError(
                    f"{option} does nothing without {other}", hint=f"or leave {option}"
                )


def _refuse_excluded(options: dict[str, Any]) -> None:
    """Refuse options that exclude each other."""
    excluded = (
        ("sweep", "--sweep finds its loads by itself", ("concurrency", "rate", "replay")),
        ("job", "--job sends its own rows, each alone", _MADE),
        ("replay", "--replay sends what is recorded", ("input_tokens", "output_tokens")),
    )
    for first, why, excluded_names in excluded:
        for name in excluded_names:
            if options[first] and options[name] is not None:
                raise UsageError(f"{why}: no {_OPTIONS[name]}", hint="leave one out")


def _check_sweep(plan: BenchPlan) -> None:
    if len(plan.ways) > 1 or len(plan.routings) > 1 or plan.repeats > 1:
        raise UsageError(
            "--sweep takes one way of sending and one routing, without repeats",
            hint="give one name to --as and to --routing, and no --repeats",
        )
    if plan.routings[0] == "isolated":
        raise UsageError(
            "--sweep loads the whole fleet, --routing isolated one endpoint", hint="leave one out"
        )
