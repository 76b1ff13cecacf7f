"""``bagent check``."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagent.errors import NeedsPerson, StoppedEarly

if TYPE_CHECKING:
    from bagent.runs.options import RunOptions

Text = str | None


def check(
    job: Annotated[
        Path, typer.Argument(metavar="JOB.yaml", help="The job file, or an OpenAI batch file.")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option("-i", "--input", help="Rows; may be repeated; - is stdin."),
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
    rows: Annotated[
        int, typer.Option("--rows", min=1, metavar="N", help="Look at this many rows.")
    ] = 200,
    prompts: Annotated[
        int, typer.Option("--prompts", min=0, metavar="N", help="Show this many prompts.")
    ] = 2,
    price: Annotated[
        Text,
        typer.Option(
            "--price", metavar="IN,OUT", help="Dollars per million prompt and answer tokens."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks.")] = False,
) -> int:
    """Look at a job without generating: prompts, tokens, cost, and what a prefix cache reuses.

    Exit codes: 0 the job is right, also with warnings; 2 something written is wrong; 75 no
    endpoint answers; 76 every endpoint refuses the key.

    Example: bagent check job.yaml --rows 500 --price 0.15,0.60
    """
    from bagent.checks.estimate import read_price
    from bagent.checks.look import CheckOptions, look
    from bagent.runs.options import RunOptions

    named = {"hostfile": hostfile, "backend": backend, "model": model}
    given = {key: value for key, value in named.items() if value is not None}
    options = RunOptions(
        job=job,
        inputs=tuple(inputs or ()),
        sets=tuple(sets or ()),
        overrides=given,
        limit=limit,
        debug=debug,
        env=dict(os.environ),
        cwd=Path.cwd(),
    )
    report = look(CheckOptions(options, rows, prompts, read_price(price)))
    if as_json:
        import msgspec

        _print(msgspec.json.encode(report) + b"\n")
    else:
        from bagent.checks.text import report_text

        _print(report_text(report).encode("utf-8", "replace"))
    for warning in report.warnings:
        sys.stderr.write(f"warning: {' '.join(warning.split())}\n")
    command = _run_command(options)
    if report.dead:
        raise StoppedEarly(report.dead, hint=f"start it, or: {command} --wait-hosts 10m")
    if report.refused:
        raise NeedsPerson(report.refused, hint="give the right key: backend: {api_key_env: NAME}")
    sys.stderr.write(f"next: {command}\n")
    return 0


def _print(data: bytes) -> None:
    """Write to stdout in UTF-8, whatever the locale says: prompts may hold any character."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _run_command(options: RunOptions) -> str:
    """The command that runs what was looked at."""
    words = ["bagent", "run", str(options.job)]
    for path in options.inputs:
        words += ["-i", path]
    for key, value in options.overrides.items():
        words += [f"--{key}", str(value)]
    for one in options.sets:
        words += ["--set", one]
    if options.limit is not None:
        words += ["--limit", str(options.limit)]
    return re.sub(r"(?<=//)[^/@\s]*@", "", shlex.join(words))  # a login is not for the screen
