"""The options of ``bagent bench``: each a type with its flags, its placeholder and its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bagent.cli.options import Text

Preset = Annotated[
    Literal["quick", "saturation", "prefix", "agents"] | None,
    typer.Option(
        "--preset",
        help="quick: 1 minute; saturation: 5; prefix: shared beginnings; agents: two turns with a"
        " slow tool between.",
    ),
]
Concurrency = Annotated[
    Text, typer.Option("--concurrency", metavar="N,..", help="Calls in flight per endpoint.")
]
Rate = Annotated[
    Text,
    typer.Option(
        "--rate", metavar="R,..", help="Requests a second over the fleet; 2..20 is a ramp."
    ),
]
Sweep = Annotated[
    bool, typer.Option("--sweep", help="Find the saturation, measure at rates below it.")
]
Replay = Annotated[
    Path | None,
    typer.Option("--replay", metavar="RUN|FILE", help="Times and lengths as recorded there."),
]
Speed = Annotated[
    Text, typer.Option("--speed", metavar="S,..", help="Replay S times as fast as recorded.")
]
Turns = Annotated[
    int | None,
    typer.Option("--turns", min=1, metavar="N", help="Of a conversation; each holds those before."),
]
Think = Annotated[
    Text, typer.Option("--think", metavar="T", help="From an answer to the next turn; 1s.")
]
TurnTokens = Annotated[
    int | None,
    typer.Option("--turn-tokens", min=1, metavar="N", help="New in each later turn; 128."),
]
Arrival = Annotated[
    Literal["constant", "poisson", "gamma"] | None,
    typer.Option("--arrival", help="How requests of a --rate come; the default is poisson."),
]
Burstiness = Annotated[
    float | None, typer.Option("--burstiness", help="Shape of gamma; below 1 it bursts.")
]
Requests = Annotated[
    int | None, typer.Option("--requests", min=1, metavar="N", help="Requests of each load.")
]
Seconds = Annotated[
    Text, typer.Option("--duration", metavar="T", help="Of each load, such as 30s.")
]
InputTokens = Annotated[
    int | None, typer.Option("--input-tokens", min=1, metavar="N", help="Of each prompt.")
]
OutputTokens = Annotated[
    int | None, typer.Option("--output-tokens", min=1, metavar="N", help="Of each answer.")
]
PrefixTokens = Annotated[
    int | None, typer.Option("--prefix-tokens", min=0, metavar="N", help="Shared of them.")
]
Groups = Annotated[
    int | None, typer.Option("--groups", min=1, metavar="N", help="Shared prefixes there are.")
]
Skew = Annotated[
    float | None, typer.Option("--skew", min=0, help="Zipf exponent: how uneven groups are.")
]
Ways = Annotated[
    Text, typer.Option("--as", metavar="WAY,..", help="chat, completions, list, chat-batch.")
]
ListSize = Annotated[
    int | None, typer.Option("--list-size", min=1, metavar="N", help="Calls in one request.")
]
Routing = Annotated[
    Text,
    typer.Option(
        "--routing", help="balanced (spread), least-inflight, affinity, as-run, isolated."
    ),
]
Job = Annotated[
    Path | None, typer.Option("--job", metavar="JOB.yaml", help="Send this job's rows.")
]
Warmup = Annotated[
    int | None,
    typer.Option("--warmup", min=0, max=1000, metavar="N", help="Requests per endpoint."),
]
Repeats = Annotated[
    int | None, typer.Option("--repeats", min=1, metavar="N", help="Of all loads, alternated.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Of arrivals and groups.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, metavar="N", help="Processes that send.")
]
Slo = Annotated[Text, typer.Option("--slo", help="Goodput's limits: ttft=2s,tpot=100ms,e2e=30s.")]
Timeout = Annotated[
    Text, typer.Option("--timeout", metavar="T", help="Of a request; the default is 5m.")
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="DIR", help="Where results go.")
]
WriteHostfile = Annotated[
    Path | None,
    typer.Option("--write-hostfile", metavar="FILE", help="Write the endpoints that are ok."),
]
Compare = Annotated[
    Path | None, typer.Option("--compare", metavar="SUMMARY", help="An older summary.json.")
]
FailIf = Annotated[
    list[str] | None,
    typer.Option("--fail-if", metavar="EXPR", help="Exit 1 if so: 'ttft_p99_ms>2000'."),
]
