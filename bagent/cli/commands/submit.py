"""``bagent submit``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagent.batch_env import SchedulerName
from bagent.cli import options as opt
from bagent.hpc.schedulers import SCHEDULERS

if TYPE_CHECKING:
    from bagent.hpc.plan import BatchPlan

RunOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- OPTIONS]", help="Options for bagent run, after --."),
]
SchedulerOption = Annotated[
    SchedulerName | None,
    typer.Option(
        "--scheduler",
        help=f"{' or '.join(SCHEDULERS)}; else cluster.scheduler or the site's.",
    ),
]
SiteName = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="NAME",
        help="aurora, polaris, perlmutter, frontier, generic, or a .yaml of your own.",
    ),
]
Account = Annotated[
    str | None, typer.Option("-A", "--account", help="The account or project that pays.")
]
_PROGRAMS = " or ".join(scheduler.submit_command[0] for scheduler in SCHEDULERS.values())
Go = Annotated[bool, typer.Option("--go", help=f"Submit it by {_PROGRAMS}.")]


def submit(
    job: opt.JobFile,
    run_options: RunOptions = None,
    scheduler: SchedulerOption = None,
    site: SiteName = None,
    account: Account = None,
    go: Go = False,
    sets: opt.Sets = None,
    debug: opt.Debug = False,
) -> int:
    """Make the batch script of a job: engines on every node, their hostfile, the run, and again.

    The script is printed on stdout, with --go once it is submitted. It starts engines on all
    nodes, waits until enough of them answer, runs the job, and goes on by itself where the time
    was too short (exit code 75), a limited number of times. Its exit code is that of bagent run.

    Example: bagent submit job.yaml --scheduler slurm --set cluster.nodes=4 > job.sh
    """
    from bagent.hpc.plan import ResourceRequest, make_plan
    from bagent.hpc.script import batch_script
    from bagent.hpc.site import GENERIC, load_site
    from bagent.job.load import JobRequest, load_job

    here = Path.cwd()
    loaded = load_job(
        JobRequest(
            path=job,
            sets=tuple(sets or ()),
            options={"cluster.account": account},
            env=dict(os.environ),
            cwd=here,
        )
    )
    site_name = site or (loaded.cluster.site if loaded.cluster else None) or GENERIC
    request = ResourceRequest(
        job_file=here / job,
        cwd=here,
        python=sys.executable,
        scheduler=scheduler,
        run_options=(*(w for text in sets or () for w in ("--set", text)), *(run_options or ())),
    )
    plan = make_plan(loaded, load_site(site_name), request)
    text = batch_script(plan)
    if go:
        _send(plan, text)  # before the script is printed: an error is not lost behind it
    sys.stdout.write(text)
    sys.stdout.flush()
    if go:
        return 0
    program = SCHEDULERS[plan.scheduler].submit_command[0]
    typer.echo(f"next: {program} FILE with this script, or the same command with --go", err=True)
    return 0


def _send(plan: BatchPlan, text: str) -> None:
    from bagent.hpc.script import submit_script, write_script

    path = write_script(plan, text)
    number = submit_script(plan, path)
    typer.echo(f"submitted job {number}: {path}\nnext: bagent status {plan.run_folder}", err=True)
