"""The batch script: directives, settings, then the shell parts of ``deploy/`` as they are."""

from __future__ import annotations

import math
import shlex
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from bagent.errors import UsageError, WriteError
from bagent.files import PRIVATE, make_private_folder, write_atomic
from bagent.hpc.plan import (
    MIN_FRACTION,
    REQUEUES,
    RESTARTS,
    START_SECONDS,
    BatchPlan,
    engine_command,
)
from bagent.hpc.schedulers import SCHEDULERS
from bagent.hpc.site import deploy_folder

_HEAD = "#!/bin/bash"


STAGE_TO = "/tmp/bagent-$USER"  # nosec B108 # own_folder looks whose it is
"""Where files are staged on a node; the script puts the user's name in."""


def batch_script(plan: BatchPlan) -> str:
    """The whole script: one file that can be read, changed and submitted by hand."""
    parts = [
        _HEAD,
        *_directives(plan),
        "",
        *_header(plan),
        "set -euo pipefail",
        "",
        *_settings(plan),
        "",
        _shell("lib.sh"),
        _shell(f"{plan.scheduler}/job.sh"),
        'main "$@"',
    ]
    return "\n".join(parts) + "\n"


def _header(plan: BatchPlan) -> Iterator[str]:
    # PBS allows no comment between its directives, so these come after them.
    yield f"# Made by bagent submit for {plan.site.name}."
    for text in (plan.site.about, *(f"Not tried: {text}" for text in plan.site.untried)):
        yield from textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="#   ")
    # Functions are called by name, and the nodes expand what settings quote.
    yield "# shellcheck disable=SC2329,SC2016"


def _directives(plan: BatchPlan) -> Iterator[str]:
    scheduler = SCHEDULERS[plan.scheduler]
    for line in (*scheduler.directives(plan), *plan.cluster.directives):
        yield f"{scheduler.directive} {line}"


def _settings(plan: BatchPlan) -> Iterator[str]:
    cluster, request = plan.cluster, plan.request
    engines = cluster.engines_per_node or 1
    gpus = cluster.gpus_per_node or 0
    yield "# --- settings: all that was chosen stands here; what follows is the same for every job"
    yield f'PYTHON="${{BAGENT_PYTHON:-{request.python}}}"'
    plain: dict[str, object] = {
        "WORK_DIR": request.cwd,
        "JOB_FILE": request.job_file,
        "BATCH_DIR": plan.batch_folder,
        "RUN_DIR": plan.run_folder,
        "LAUNCHER": plan.launcher,
        "HOST_SUFFIX": plan.site.host_suffix,
        "WALLTIME": math.floor(plan.walltime),
        "RESERVE_NODE": int(cluster.reserve_node),
        "EXCLUDE": " ".join(cluster.exclude),
        "NODES_PER_ENGINE": cluster.nodes_per_engine or 1,
        "GPUS_PER_NODE": gpus,
        "GPU_MASK": (cluster.gpu_mask or "") if gpus else "",
        "RESTARTS": _or(cluster.restarts, RESTARTS),
        "REQUEUES": _or(cluster.requeues, REQUEUES),
        "MIN_FRACTION": f"{_or(cluster.min_fraction, MIN_FRACTION):g}",
        "START_TIMEOUT": f"{_or(cluster.start_timeout, START_SECONDS):g}s",
        "STAGE_BY": (cluster.stage_by or "copy") if cluster.stage else "none",
        "STAGE_TO": cluster.stage_to or STAGE_TO,
        "TAGS": _tags(plan, gpus // engines if gpus else 0),
    }
    for name, value in plain.items():
        yield f"{name}={shlex.quote(str(value))}"
    yield _array("PORTS", [str(port) for port in plan.ports])
    yield _array("ENGINE", _engine(plan))
    yield _array("STAGE", [_beside_job(plan, item) for item in cluster.stage])
    yield _array("RUN_OPTIONS", request.run_options)
    yield _array("NODE_ENV", [f"{key}={value}" for key, value in sorted(cluster.env.items())])
    yield ""
    yield "# Once, in the shell of the batch job."
    yield "set_up() {"
    yield from (f"    module load {shlex.quote(name)}" for name in cluster.modules)
    yield from (f"    {line}" for line in cluster.setup)
    yield "    :"
    yield "}"
    yield "# On every node, before its engines start."
    yield "read -r -d '' NODE_SETUP <<'END_OF_NODE_SETUP' || true"
    yield from cluster.node_setup
    yield "END_OF_NODE_SETUP"


def _engine(plan: BatchPlan) -> list[str]:
    command = engine_command(plan.cluster)
    if plan.cluster.api_servers is not None:
        command += ["--api-server-count", str(plan.cluster.api_servers)]
    return command


def _beside_job(plan: BatchPlan, item: str) -> str:
    """Return a path that is relative to the job file."""
    return str(plan.job.source.folder / item)


def _tags(plan: BatchPlan, gpus: int) -> str:
    model = plan.job.model
    tags = [] if model == "auto" or any(c.isspace() for c in model) else [f"model={model}"]
    tags.append("role=worker")
    if gpus:
        tags.append(f"gpus={gpus * (plan.cluster.nodes_per_engine or 1)}")
    return "\t".join(tags)


def _array(name: str, values: Sequence[str]) -> str:
    return f"{name}=({' '.join(map(shlex.quote, values))})"


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _shell(name: str) -> str:
    """Return a shell part without the first lines, which the script has already."""
    text = (deploy_folder() / name).read_text(encoding="utf-8")
    lines = text.splitlines()
    body = [line for line in lines if line not in (_HEAD, "set -euo pipefail")]
    return "\n".join(body).strip("\n") + "\n"


def write_script(plan: BatchPlan, text: str) -> Path:
    """Write the script beside the run directory.

    It may contain secrets of ``cluster.env``, so only its owner may read it.

    Raises:
        WriteError: it cannot be written.
    """
    path = plan.batch_folder / f"job.{plan.scheduler}.sh"
    try:
        make_private_folder(path.parent)
        write_atomic(path, text, mode=PRIVATE)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise WriteError(f"cannot write {path}: {reason}") from None
    return path


def submit_script(plan: BatchPlan, path: Path) -> str:
    """Submit the script from the folder in which the job will run; return the job's id.

    Raises:
        UsageError: the scheduler's program is missing or refuses.
    """
    program = SCHEDULERS[plan.scheduler].submit_command
    try:
        done = subprocess.run(
            [*program, str(path)],
            cwd=plan.request.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise UsageError(
            f"{program[0]} cannot be run: {(error.strerror or str(error)).lower()}",
            hint=f"submit by hand where it is: {program[0]} {path}",
        ) from None
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UsageError(f"{program[0]} refused: {reason}", hint=f"the script is {path}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
