"""``bagent run``; :mod:`bagent.runs.ending` decides its exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagent.cli import options as opt
from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.runs.context import RunOptions


def run(
    job: opt.JobFile = None,
    inputs: opt.Inputs = None,
    output: opt.Output = None,
    name: opt.Name = None,
    hostfile: opt.Hostfile = None,
    backend: opt.Backend = None,
    model: opt.Model = None,
    sets: opt.Sets = None,
    limit: opt.Limit = None,
    sample: opt.Sample = None,
    shard: opt.Shard = None,
    workers: opt.Workers = 1,
    executor: opt.Executor = "local",
    deadline: opt.DeadlineText = "auto",
    margin: opt.Margin = "",
    budget: opt.Budget = None,
    fresh: opt.Fresh = False,
    retry: opt.Retry = None,
    skip_failed: opt.SkipFailed = False,
    on_change: opt.OnChangeText = "refuse",
    reuse: opt.Reuse = None,
    allow_failures: opt.AllowFailures = None,
    no_canary: opt.NoCanary = False,
    wait_hosts: opt.WaitHosts = "0s",
    min_hosts: opt.MinHosts = 1,
    ordered: opt.Ordered = False,
    progress: opt.ProgressMode = "auto",
    dashboard: opt.Dashboard = False,
    metrics_port: opt.MetricsPort = None,
    debug: opt.Debug = False,
    python: opt.Python = "",
) -> int:
    """Run a job, or resume it: rows in, validated rows out.

    The same command again resumes where it stopped. Finished rows are not sent again.

    Exit codes: 0 every row ok; 1 some rows failed; 2 the job, the input or an option is wrong,
    nothing was sent; 74 results cannot be written; 75 stopped early, the same command resumes;
    76 stopped early, act first (quota, key, budget); 130 second Ctrl-C.

    Example: bagent run job.yaml --limit 20

    Example: bagent run job.yaml --hostfile hosts.txt --deadline 55m

    Example: bagent run job.yaml -i rows.csv --backend openai --budget 5

    More: bagent guide jobs, bagent guide resume
    """
    job = opt.find_job(job)
    options = dict(locals())
    del options["workers"], options["executor"]
    _choice("--executor", executor, "executor", EXECUTORS)
    return _start(make_options(options, _command()), workers, executor)


def _start(options: RunOptions, workers: int, executor: str) -> int:
    if executor == "parsl":
        from bagent.runs.parallel.parsl import run_parsl

        return run_parsl(options, workers)
    if workers > 1:
        from bagent.runs.parallel.workers import run_workers

        return run_workers(options, workers)
    from bagent.runs.execute import run_job

    return run_job(options)


def _command() -> list[str]:
    return ["bagent", *sys.argv[1:]]


def make_options(options: dict[str, Any], command: list[str]) -> RunOptions:
    """Make the options of a run from the parameters of :func:`run`, but those for processes.

    Args:
        command: the whole command, shown as the one that resumes the run.
    """
    from bagent.runs.context import RunOptions

    _choice("--progress", options["progress"], "display", PROGRESS)
    _choice("--on-change", options["on_change"], "choice", ON_CHANGE)
    if options.pop("dashboard"):
        options["progress"] = "dashboard"
    if options["metrics_port"] is not None:
        from bagent.observe.prometheus import parse_address

        parse_address(options["metrics_port"])
    from bagent.job.redaction import mask_words

    job_keys = {
        "name": options.pop("name"),
        "hostfile": options.pop("hostfile"),
        "backend": options.pop("backend"),
        "model": options.pop("model"),
        "limits.budget_usd": options.pop("budget"),
        "results.allow_failures": _count(options.pop("allow_failures")),
    }
    return RunOptions(
        inputs=tuple(options.pop("inputs") or ()),
        sets=tuple(options.pop("sets") or ()),
        overrides={key: value for key, value in job_keys.items() if value is not None},
        margin=_margin(options.pop("margin")),
        fresh=options.pop("fresh") or options["on_change"] == "fresh",
        canary=not options.pop("no_canary"),
        wait_hosts=_seconds("--wait-hosts", options.pop("wait_hosts")),
        env=dict(os.environ),
        cwd=Path.cwd(),
        command=mask_words(command),
        **options,  # the others have the names and types of the fields
    )


EXECUTORS = ("local", "parsl")
PROGRESS = ("auto", "rich", "plain", "json", "none")
ON_CHANGE = ("refuse", "continue", "fresh")


def _choice(option: str, value: str, noun: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{option} {value}: no such {noun}", hint=", ".join(choices))


def _count(text: str | None) -> int | str | None:
    """Return ``10`` as a number, ``5%`` as text."""
    return int(text) if text is not None and text.isdigit() else text


def _margin(text: str) -> float | None:
    return _seconds("--deadline-margin", text) if text else None


def _seconds(option: str, text: str) -> float:
    from bagent.text.durations import parse_duration

    try:
        return 0.0 if text == "none" else parse_duration(text)
    except ValueError:
        raise UsageError(
            f"{option} {text}: not a duration", hint="write 30s, 5m or 1h30m"
        ) from None
