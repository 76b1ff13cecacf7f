"""Options that commands share, and the names that the shell completes for them.

An option is a type with its flags, placeholder, help and group.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from stat import S_ISFIFO
from typing import Annotated

import typer

from bagent.errors import UsageError


def complete_job_files(incomplete: str) -> list[str]:
    """Return the YAML and JSONL files, and the folders, that begin with ``incomplete``."""
    folder, _, start = incomplete.rpartition("/")
    prefix = f"{folder}/" if folder or incomplete.startswith("/") else ""
    names = []
    for path in _listed(Path(prefix or ".")):
        if not path.name.startswith(start) or path.name.startswith("."):
            continue
        if path.is_dir():
            names.append(f"{prefix}{path.name}/")
        elif path.suffix in (".yaml", ".yml", ".jsonl"):
            names.append(f"{prefix}{path.name}")
    return names


def complete_run_names(incomplete: str) -> list[str]:
    """Return the runs under ``runs`` that begin with ``incomplete``."""
    return [
        path.name
        for path in _listed(Path("runs"))
        if path.name.startswith(incomplete) and (path / "run.json").is_file()
    ]


def complete_sites(incomplete: str) -> list[str]:
    """Return the sites of batch scripts that begin with ``incomplete``."""
    from bagent.hpc.site import site_names

    return [name for name in site_names() if name.startswith(incomplete)]


def complete_topics(incomplete: str) -> list[str]:
    """Return the topics of ``bagent guide`` that begin with ``incomplete``."""
    from bagent.cli.commands.guide import topics as guide_topics

    return [name for name in guide_topics() if name.startswith(incomplete)]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


Text = str | None

INPUT = "Input"
SERVERS = "Servers"
LIMITS = "Limits"
RESUME = "Resume"
OUTPUT = "Output"
DISPLAY = "Display"
GENERAL = "General"

JobFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[JOB.yaml]",
        help="A job file, or an OpenAI batch file; - reads batch lines from standard input. The"
        " default is job.yaml in this folder.",
        autocompletion=complete_job_files,
        show_default=False,
    ),
]
RunName = Annotated[
    Text,
    typer.Argument(
        metavar="[RUN]",
        help="A run directory, or a name under runs; the default is the latest run.",
        autocompletion=complete_run_names,
        show_default=False,
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "-i",
        "--input",
        metavar="PATH",
        help="Read rows from here instead of the job's input; - is standard input. Repeatable.",
        rich_help_panel=INPUT,
    ),
]
Python = Annotated[
    str,
    typer.Option(
        "--python",
        hidden=True,
        help="Set by the Python library: job, or rows:N where a program gives N rows.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit", min=0, metavar="N", help="Send only the first N rows.", rich_help_panel=INPUT
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        "--sample",
        min=1,
        metavar="N",
        help="Send N rows drawn at random, the same ones each time.",
        rich_help_panel=INPUT,
    ),
]
Shard = Annotated[
    Text,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Send part I of N of the rows, such as 2/8; auto takes it from a job array.",
        rich_help_panel=INPUT,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the job, such as limits.concurrency=64. Repeatable.",
        rich_help_panel=INPUT,
    ),
]
Hostfile = Annotated[
    Text,
    typer.Option(
        "--hostfile",
        metavar="HOSTS",
        help="Use the endpoints in this file, one a line; the default is $BAGENT_HOSTFILE.",
        rich_help_panel=SERVERS,
    ),
]
Backend = Annotated[
    Text,
    typer.Option(
        "--backend",
        metavar="URL",
        help="Use this server: vllm://HOST:PORT, an https:// URL, openai, anthropic,"
        " bedrock://REGION, local or sim.",
        rich_help_panel=SERVERS,
    ),
]
Model = Annotated[
    Text,
    typer.Option("--model", metavar="NAME", help="Ask for this model.", rich_help_panel=SERVERS),
]
WaitHosts = Annotated[
    str,
    typer.Option(
        "--wait-hosts",
        metavar="DURATION",
        help="Wait this long for endpoints to start, such as 10m.",
        rich_help_panel=SERVERS,
    ),
]
MinHosts = Annotated[
    int,
    typer.Option(
        "--min-hosts",
        min=1,
        metavar="N",
        help="Begin when N endpoints answer.",
        rich_help_panel=SERVERS,
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Share the rows among N processes on this machine.",
        rich_help_panel=LIMITS,
    ),
]
Executor = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="local|parsl",
        help="Where workers run: local, or parsl for chunks of rows on many nodes.",
        rich_help_panel=LIMITS,
    ),
]
DeadlineText = Annotated[
    str,
    typer.Option(
        "--deadline",
        metavar="WHEN",
        help="Stop in time and exit with 75: 55m, an ISO time, @UNIX_SECONDS, none, or auto for"
        " $BAGENT_DEADLINE or the end of the SLURM or PBS job.",
        rich_help_panel=LIMITS,
    ),
]
Margin = Annotated[
    str,
    typer.Option(
        "--deadline-margin",
        metavar="DURATION",
        help="Stop sending rows this long before the deadline; the default is a quarter of the"
        " remaining time, at most 60s.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        min=0,
        metavar="USD",
        help="Stop before this start of the run costs more dollars.",
        rich_help_panel=LIMITS,
    ),
]
AllowFailures = Annotated[
    Text,
    typer.Option(
        "--allow-failures",
        metavar="N|P%",
        help="Exit with 0 although up to N rows, or P percent, failed.",
        rich_help_panel=LIMITS,
    ),
]
NoCanary = Annotated[
    bool,
    typer.Option(
        "--no-canary",
        help="Do not stop when 50 rows in a row fail with the same lasting error.",
        rich_help_panel=LIMITS,
    ),
]
Name = Annotated[
    Text,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Name the run; the default is the name of the job.",
        rich_help_panel=RESUME,
    ),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Begin again: the old run is moved aside, not deleted.",
        rich_help_panel=RESUME,
    ),
]
Retry = Annotated[
    Text,
    typer.Option(
        "--retry",
        metavar="KIND,...",
        help="Send rows that failed for these reasons again, such as truncated,timeout; or all.",
        rich_help_panel=RESUME,
    ),
]
SkipFailed = Annotated[
    bool,
    typer.Option(
        "--skip-failed",
        help="Send no failed row again, only rows without a result.",
        rich_help_panel=RESUME,
    ),
]
OnChangeText = Annotated[
    str,
    typer.Option(
        "--on-change",
        metavar="refuse|continue|fresh",
        help="What to do when the job has changed since the last start.",
        rich_help_panel=RESUME,
    ),
]
Reuse = Annotated[
    Text,
    typer.Option(
        "--reuse",
        metavar="RUN",
        help="Copy answers to equal requests from this earlier run.",
        autocompletion=complete_run_names,
        rich_help_panel=RESUME,
    ),
]
Output = Annotated[
    Text,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Use this run directory; - prints result rows on standard output.",
        rich_help_panel=OUTPUT,
    ),
]
Ordered = Annotated[
    bool,
    typer.Option(
        "--ordered",
        help="With -o -: print rows in the order of the input.",
        rich_help_panel=OUTPUT,
    ),
]
ProgressMode = Annotated[
    str,
    typer.Option(
        "--progress",
        metavar="auto|rich|plain|json|none",
        help="How progress is shown on standard error; json is for programs, none leaves only the"
        " summary.",
        rich_help_panel=DISPLAY,
    ),
]
Dashboard = Annotated[
    bool,
    typer.Option(
        "--dashboard",
        help="Show endpoints, rows and errors on the full screen.",
        rich_help_panel=DISPLAY,
    ),
]
MetricsPort = Annotated[
    Text,
    typer.Option(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="Serve Prometheus metrics at this address.",
        rich_help_panel=DISPLAY,
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show more messages, and the traceback of an error.",
        rich_help_panel=GENERAL,
    ),
]
LookRows = Annotated[
    int,
    typer.Option(
        "--rows",
        min=1,
        metavar="N",
        help="Load this many rows and count their tokens.",
        rich_help_panel=INPUT,
    ),
]
Prompts = Annotated[
    int,
    typer.Option(
        "--prompts",
        min=0,
        metavar="N",
        help="Show the prompts of the first N rows.",
        rich_help_panel=OUTPUT,
    ),
]
OpenTools = Annotated[
    bool,
    typer.Option(
        "--open",
        help="Import and start the job's tools, and send its keys.",
        rich_help_panel=SERVERS,
    ),
]
Price = Annotated[
    Text,
    typer.Option(
        "--price",
        metavar="IN,OUT",
        help="Compute the cost with these dollars per million prompt and answer tokens.",
        rich_help_panel=OUTPUT,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON, for programs.", rich_help_panel=OUTPUT),
]


def find_job(job: Path | None) -> Path:
    """Return ``job``, or ``job.yaml`` of the current folder.

    Raises:
        UsageError: there is no such file and no job is named.
    """
    if job is not None:
        return job
    default = Path("job.yaml")
    if default.is_file():
        return default
    hint = "name a job file, or make one: bagent init"
    with suppress(OSError, ValueError):  # standard input may be closed
        if S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
            hint += "; a batch file on standard input: bagent run -"
    raise UsageError("this folder has no job.yaml", hint=hint)
