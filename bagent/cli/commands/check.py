"""``bagent check``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from bagent.cli import options as opt
from bagent.errors import ChangedError, InputError, JobError, NeedsPerson, StoppedEarly
from bagent.job.redaction import mask_command
from bagent.text.terminal import data_stdout

if TYPE_CHECKING:
    from bagent.check.report import CheckReport
    from bagent.runs.context import RunOptions


def check(
    job: opt.JobFile = None,
    inputs: opt.Inputs = None,
    name: opt.Name = None,
    hostfile: opt.Hostfile = None,
    backend: opt.Backend = None,
    model: opt.Model = None,
    sets: opt.Sets = None,
    limit: opt.Limit = None,
    rows: opt.LookRows = 200,
    prompts: opt.Prompts = 2,
    price: opt.Price = None,
    open_: opt.OpenTools = False,
    as_json: opt.AsJson = False,
    debug: opt.Debug = False,
) -> int:
    """Show prompts, tokens and cost without generating.

    Nothing that the job brings is executed, and no key is sent. What a run would execute, and
    which variables it would send to which hosts, is listed. --open imports and starts the job's
    tools, shows their definitions and sends the keys.

    Exit codes: 0 the job is right; 2 the job, the input or an option is wrong, no endpoint
    serves the model, or no row can be sent; 75 no endpoint answers; 76 every endpoint refuses
    the key (--open).

    Example: bagent check job.yaml --rows 500 --price 0.15,0.60
    """
    from bagent.check.check import CheckOptions, run_check
    from bagent.check.estimate import read_price
    from bagent.runs.context import RunOptions

    job_keys = {"name": name, "hostfile": hostfile, "backend": backend, "model": model}
    overrides = {key: value for key, value in job_keys.items() if value is not None}
    options = RunOptions(
        job=opt.find_job(job),
        inputs=tuple(inputs or ()),
        sets=tuple(sets or ()),
        overrides=overrides,
        limit=limit,
        debug=debug,
        env=dict(os.environ),
    )
    to_check = CheckOptions(options, rows, prompts, read_price(price), open_)
    report = run_check(to_check, stdin=sys.stdin.buffer)
    if as_json:
        import msgspec

        _print(msgspec.json.encode(report) + b"\n")
    else:
        from bagent.check.text import report_text

        _print(report_text(report).encode("utf-8", "replace"))
    for warning in report.warnings:
        sys.stderr.write(f"warning: {' '.join(warning.split())}\n")
    command = _run_command(options)
    _refuse(report, command)
    sys.stderr.write(f"next: {command}\n")
    return 0


def _refuse(report: CheckReport, command: str) -> None:
    """Raise what keeps the run from sending a row, with the exit code that it would have."""
    if report.changed:
        from bagent.store.run_dir import CHANGED_HINT

        raise ChangedError(report.changed, hint=CHANGED_HINT)
    if report.unserved:
        raise JobError(report.unserved, hint="name a model that is served, or serve this one")
    if report.unsendable:
        raise InputError(report.unsendable, hint="correct the input or the prompt")
    if report.dead:
        hint = f"start it, or: {command} --wait-hosts 10m"
        if report.hosted:
            hint = "look at the network, and at the proxy of the environment"
        raise StoppedEarly(report.dead, hint=hint)
    if report.refused:
        raise NeedsPerson(report.refused, hint="give the right key: backend: {api_key_env: NAME}")


def _print(data: bytes) -> None:
    """Write to stdout in UTF-8, whatever the locale says: prompts may hold any character."""
    sys.stdout.flush()
    stream = data_stdout()
    stream.write(data)
    stream.flush()


def _run_command(options: RunOptions) -> str:
    """Return the command that runs the checked job."""
    arguments = ["bagent", "run", str(options.job)]
    for path in options.inputs:
        arguments += ["-i", path]
    for key, value in options.overrides.items():
        arguments += [f"--{key}", str(value)]
    for setting in options.sets:
        arguments += ["--set", setting]
    if options.limit is not None:
        arguments += ["--limit", str(options.limit)]
    return mask_command(arguments)
