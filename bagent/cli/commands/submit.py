"""``bagent submit``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagent.batch_env import SchedulerName
from bagent.cli import options as opt
from bagent.duck import without_installs
from bagent.errors import UsageError
from bagent.hpc.schedulers import SCHEDULERS

if TYPE_CHECKING:
    from bagent.hpc.plan import BatchPlan
    from bagent.job.spec.job import Job

CLUSTER = "Cluster"
RunOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- OPTIONS]", help="Options of bagent run, after two dashes."),
]
SchedulerOption = Annotated[
    SchedulerName | None,
    typer.Option(
        "--scheduler",
        help="Write for this scheduler; the default is that of the job or of the site.",
        rich_help_panel=CLUSTER,
    ),
]
SiteName = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="NAME",
        help="Use the habits of this site: aurora, polaris, perlmutter, frontier, generic, or a"
        " .yaml file of your own.",
        autocompletion=opt.complete_sites,
        rich_help_panel=CLUSTER,
    ),
]
Account = Annotated[
    str | None,
    typer.Option(
        "-A",
        "--account",
        metavar="NAME",
        help="Charge this account or project.",
        rich_help_panel=CLUSTER,
    ),
]
_PROGRAMS = " or ".join(scheduler.submit_command[0] for scheduler in SCHEDULERS.values())
Go = Annotated[
    bool,
    typer.Option("--go", help=f"Submit the script with {_PROGRAMS}.", rich_help_panel=CLUSTER),
]
NoHostfile = Annotated[
    str | None,
    typer.Option("--hostfile", hidden=True, help="Refused: the script starts its own engines."),
]
"""Known so that the error can say what to do instead."""


def submit(
    job: opt.JobFile = None,
    run_options: RunOptions = None,
    scheduler: SchedulerOption = None,
    site: SiteName = None,
    account: Account = None,
    go: Go = False,
    hostfile: NoHostfile = None,
    sets: opt.Sets = None,
    debug: opt.Debug = False,
) -> int:
    """Make or submit the batch script of a job for SLURM or PBS.

    The script starts engines on every node, waits until enough of them answer, runs the job, and
    submits itself again when the time was too short (exit code 75), a limited number of times.
    Its exit code is that of bagent run. It is printed, or submitted with --go. The job, the first
    rows and the options of the run are checked before.

    Example: bagent submit job.yaml --scheduler slurm --set cluster.nodes=4 > job.sh
    """
    job = opt.find_job(job)
    from bagent.hpc.plan import ResourceRequest, make_plan
    from bagent.hpc.script import batch_script
    from bagent.hpc.site import GENERIC, load_site

    if hostfile is not None:
        raise _own_servers("--hostfile")
    here = Path.cwd()
    all_options = (*(w for text in sets or () for w in ("--set", text)), *(run_options or ()))
    checked = _check_run(job, all_options, account)
    site_name = site or (checked.cluster.site if checked.cluster else None) or GENERIC
    request = ResourceRequest(
        job_file=here / job,
        cwd=here,
        python=sys.executable,
        scheduler=scheduler,
        run_options=all_options,
    )
    plan = make_plan(checked, load_site(site_name), request)
    text = batch_script(plan)
    if go:
        _send(plan, text)
        return 0
    sys.stdout.write(text)
    sys.stdout.flush()
    program = SCHEDULERS[plan.scheduler].submit_command[0]
    typer.echo(f"next: {program} FILE with this script, or the same command with --go", err=True)
    return 0


@without_installs()
def _check_run(job_file: Path, options: tuple[str, ...], account: str | None) -> Job:
    """Check what the script will run as ``bagent run`` does before its first request.

    Returns:
        The job as the run will see it, without a hostfile.

    Raises:
        UsageError: the job, an option of the run, or the input is wrong.
    """
    from bagent.cli.app import parse_run_options
    from bagent.observe.formatting import visible
    from bagent.runs.context import open_input, prepare

    run = parse_run_options([str(job_file), *options], several=True)
    for key in ("hostfile", "backend"):
        if key in run.overrides:
            raise _own_servers(f"--{key}")
    prepared = prepare(
        replace(
            run,
            sets=(*run.sets, "hostfile=null"),
            overrides={**run.overrides, "cluster.account": account},
            env={name: value for name, value in run.env.items() if name != "BAGENT_HOSTFILE"},
        )
    )
    if prepared.piped:
        raise UsageError("a batch job has no standard input", hint="name a file as the input")
    open_input(prepared).close()
    for warning in prepared.warnings:
        typer.echo(f"warning: {visible(warning)}", err=True)
    return prepared.job


def _own_servers(option: str) -> UsageError:
    return UsageError(
        f"{option}: the script starts its own engines and gives their addresses to the run",
        hint=f"for servers that run already: bagent run JOB {option} ... in a script of your own",
    )


def _send(plan: BatchPlan, text: str) -> None:
    from bagent.hpc.script import submit_script, write_script

    path = write_script(plan, text)
    number = submit_script(plan, path)
    typer.echo(f"submitted job {number}: {path}\nnext: bagent status {plan.run_folder}", err=True)
