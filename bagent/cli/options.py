"""Options that commands share: each a type with its flags, placeholder and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Text = str | None

JobFile = Annotated[
    Path,
    typer.Argument(
        metavar="JOB.yaml", help="A job file or OpenAI batch file; - is piped batch lines."
    ),
]
Inputs = Annotated[
    list[str] | None, typer.Option("-i", "--input", help="Rows; may be repeated; - is stdin.")
]
Output = Annotated[
    Text, typer.Option("-o", "--output", help="The run directory; - also prints the rows.")
]
Name = Annotated[Text, typer.Option("--name", help="Run name; the default is the job's.")]
Hostfile = Annotated[Text, typer.Option("--hostfile", help="Endpoints, one a line.")]
Backend = Annotated[Text, typer.Option("--backend", help="A backend's name or URL.")]
Model = Annotated[Text, typer.Option("--model", help="The model to ask for.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a dotted job key.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=0, help="Only the first N rows.")]
Sample = Annotated[int | None, typer.Option("--sample", min=1, help="N rows at random.")]
Shard = Annotated[Text, typer.Option("--shard", metavar="I/N", help="Part I of N, or auto.")]
Workers = Annotated[
    int, typer.Option("--workers", min=1, metavar="N", help="N processes here share the rows.")
]
Executor = Annotated[
    str, typer.Option("--executor", metavar="NAME", help="local, or parsl: chunks on many nodes.")
]
DeadlineText = Annotated[
    str, typer.Option("--deadline", help="auto, none, 55m, an ISO time or @UNIX_SECONDS.")
]
Margin = Annotated[
    str,
    typer.Option(
        "--deadline-margin",
        help="Stop feeding so long before it (a quarter of what is left, at most 60s).",
    ),
]
Budget = Annotated[
    float | None, typer.Option("--budget", min=0, metavar="USD", help="Stop at this cost.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move the old run aside, begin anew.")]
Retry = Annotated[
    Text,
    typer.Option("--retry", metavar="KIND,..", help="Kinds of failed rows to send again, or all."),
]
SkipFailed = Annotated[bool, typer.Option("--skip-failed", help="Leave failed rows.")]
OnChangeText = Annotated[
    str, typer.Option("--on-change", help="A changed job: refuse, continue or fresh.")
]
Reuse = Annotated[
    Text, typer.Option("--reuse", metavar="RUN", help="Take answers to equal requests.")
]
AllowFailures = Annotated[
    Text, typer.Option("--allow-failures", metavar="N|P%", help="Still exit 0 with these.")
]
NoCanary = Annotated[
    bool, typer.Option("--no-canary", help="Go on when servers refuse row after row alike.")
]
WaitHosts = Annotated[
    str, typer.Option("--wait-hosts", metavar="DURATION", help="Wait for endpoints to start.")
]
MinHosts = Annotated[
    int,
    typer.Option("--min-hosts", min=1, metavar="N", help="Begin when N endpoints answer."),
]
Ordered = Annotated[bool, typer.Option("--ordered", help="-o - in input order.")]
ProgressMode = Annotated[str, typer.Option("--progress", help="auto, rich, plain, json or none.")]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="Show the run on a full screen.")]
MetricsPort = Annotated[
    Text,
    typer.Option("--metrics-port", metavar="PORT", help="Prometheus metrics here, or HOST:PORT."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Tracebacks and more words.")]
LookRows = Annotated[
    int, typer.Option("--rows", min=1, metavar="N", help="Look at this many rows.")
]
Prompts = Annotated[
    int, typer.Option("--prompts", min=0, metavar="N", help="Show this many prompts.")
]
OpenTools = Annotated[
    bool,
    typer.Option("--open", help="Import and start the job's tools, and send its keys."),
]
Price = Annotated[
    Text,
    typer.Option("--price", metavar="IN,OUT", help="Dollars per million prompt and answer tokens."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
