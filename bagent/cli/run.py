"""``bagent run``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bagent.errors import UsageError

Text = str | None


def run(
    job: Annotated[
        Path, typer.Argument(metavar="JOB.yaml", help="The job file, or an OpenAI batch file.")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option("-i", "--input", help="Rows; may be repeated; - is stdin."),
    ] = None,
    output: Annotated[
        Text, typer.Option("-o", "--output", help="The run directory; - also prints the rows.")
    ] = None,
    name: Annotated[
        Text, typer.Option("--name", help="Run name; the default is the job's.")
    ] = None,
    hostfile: Annotated[Text, typer.Option("--hostfile", help="Endpoints, one a line.")] = None,
    backend: Annotated[Text, typer.Option("--backend", help="A backend's name or URL.")] = None,
    model: Annotated[Text, typer.Option("--model", help="The model to ask for.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a dotted job key.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, help="Only the first N rows.")
    ] = None,
    sample: Annotated[int | None, typer.Option("--sample", min=1, help="N rows at random.")] = None,
    shard: Annotated[Text, typer.Option("--shard", metavar="I/N", help="Part I of N.")] = None,
    deadline: Annotated[
        str, typer.Option("--deadline", help="auto, none, 55m, an ISO time or @UNIX_SECONDS.")
    ] = "auto",
    margin: Annotated[
        str, typer.Option("--deadline-margin", help="Stop feeding this long before it.")
    ] = "60s",
    budget: Annotated[
        float | None, typer.Option("--budget", min=0, metavar="USD", help="Stop at this cost.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move the old run aside, begin anew.")
    ] = False,
    retry: Annotated[
        Text, typer.Option("--retry", metavar="KIND,..", help="Failed rows to send again, or all.")
    ] = None,
    skip_failed: Annotated[bool, typer.Option("--skip-failed", help="Leave failed rows.")] = False,
    on_change: Annotated[
        str, typer.Option("--on-change", help="A changed job: refuse, continue or fresh.")
    ] = "refuse",
    reuse: Annotated[
        Text, typer.Option("--reuse", metavar="RUN", help="Take answers to equal requests.")
    ] = None,
    allow_failures: Annotated[
        Text, typer.Option("--allow-failures", metavar="N|P%", help="Still exit 0 with these.")
    ] = None,
    no_canary: Annotated[
        bool, typer.Option("--no-canary", help="Go on when all first rows fail alike.")
    ] = False,
    wait_hosts: Annotated[
        str, typer.Option("--wait-hosts", metavar="DURATION", help="Wait for endpoints to start.")
    ] = "0s",
    ordered: Annotated[bool, typer.Option("--ordered", help="-o - in input order.")] = False,
    progress: Annotated[
        str, typer.Option("--progress", help="auto, rich, plain, json or none.")
    ] = "auto",
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks and more words.")] = False,
) -> int:
    """Run a job: rows in, validated rows out. The same command again goes on where it stopped.

    Exit codes: 0 all rows ok; 1 some failed; 2 something written is wrong, nothing was sent;
    74 results cannot be written; 75 stopped early, the same command goes on; 76 a person must
    act first; 130 interrupted twice.

    Example: bagent run job.yaml --hostfile hosts.txt --limit 100
    """
    from bagent.runs.options import RunOptions
    from bagent.runs.start import run_job

    if progress not in ("auto", "rich", "plain", "json", "none"):
        raise UsageError(
            f"--progress {progress}: no such display", hint="auto, rich, plain, json, none"
        )
    if on_change not in ("refuse", "continue", "fresh"):
        raise UsageError(f"--on-change {on_change}: no such choice", hint="refuse, continue, fresh")
    named = {
        "name": name,
        "hostfile": hostfile,
        "backend": backend,
        "model": model,
        "limits.budget_usd": budget,
        "results.allow_failures": _count(allow_failures),
    }
    return run_job(
        RunOptions(
            job=job,
            inputs=tuple(inputs or ()),
            output=output,
            sets=tuple(sets or ()),
            overrides={key: value for key, value in named.items() if value is not None},
            limit=limit,
            sample=sample,
            shard=shard,
            deadline=deadline,
            margin=_seconds("--deadline-margin", margin),
            fresh=fresh or on_change == "fresh",
            retry=retry,
            skip_failed=skip_failed,
            on_change=on_change,
            reuse=reuse,
            canary=not no_canary,
            wait_hosts=_seconds("--wait-hosts", wait_hosts),
            ordered=ordered,
            progress=progress,
            debug=debug,
            env=dict(os.environ),
            cwd=Path.cwd(),
        )
    )


def _count(text: str | None) -> int | str | None:
    """``10`` as a number, ``5%`` as it is."""
    return int(text) if text is not None and text.isdigit() else text


def _seconds(option: str, text: str) -> float:
    from bagent.job.scalars import read_duration

    try:
        return read_duration(text) or 0.0
    except ValueError:
        raise UsageError(
            f"{option} {text}: not a duration", hint="write 30s, 5m or 1h30m"
        ) from None
