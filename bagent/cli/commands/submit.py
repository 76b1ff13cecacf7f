"""``bagent submit``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagent.batch_env import SchedulerName
from bagent.cli import completion
from bagent.cli import options as opt
from bagent.hpc.schedulers import SCHEDULERS

if TYPE_CHECKING:
    from bagent.hpc.plan import BatchPlan

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
        autocompletion=completion.sites,
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


def submit(
    job: opt.JobFile = None,
    run_options: RunOptions = None,
    scheduler: SchedulerOption = None,
    site: SiteName = None,
    account: Account = None,
    go: Go = False,
    sets: opt.Sets = None,
    debug: opt.Debug = False,
) -> int:
    """Make or submit the batch script of a job for SLURM or PBS.

    The script starts engines on every node, waits until enough of them answer, runs the job, and
    submits itself again when the time was too short (exit code 75), a limited number of times.
    Its exit code is that of bagent run. It is printed; --go also submits it.

    Example: bagent submit job.yaml --scheduler slurm --set cluster.nodes=4 > job.sh
    """
    job = opt.find_job(job)
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
