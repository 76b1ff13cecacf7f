"""Batch scripts and launchers: what is rendered, what is packaged, and that it is good shell.

``BAGENT_WRITE_GOLDEN=1`` writes the golden files anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hatchling.builders.wheel import WheelBuilder

from bagent.batch_env import SchedulerName
from bagent.hpc.allocation import on_every_node, set_up_script
from bagent.hpc.parsl import PoolPlan, _provider
from bagent.hpc.schedulers import SCHEDULERS
from bagent.hpc.script import batch_script
from bagent.hpc.site import deploy_folder
from bagent.job.spec.cluster import ClusterSpec
from support.cli import clean_env
from support.submit_plans import CLUSTER, GPUS, plan_of

GOLDEN = Path(__file__).parent / "golden"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"

SITES = {
    "generic-slurm": (CLUSTER + GPUS, "generic", {}),
    "generic-pbs": (CLUSTER + GPUS, "generic", {"scheduler": "pbs", "account": "gene"}),
    "aurora": (
        "  nodes: 256\n  walltime: 6h\n  engine: vllm serve '{stage}/model' -tp 4\n"
        "  stage: /flare/models/model\n  exclude: [x4309c4s0b0n0]\n",
        "aurora",
        {"account": "GeneReview"},
    ),
    "polaris": (
        CLUSTER + "  engines_per_node: 4\n  api_servers: 2\n",
        "polaris",
        {"account": "GeneReview"},
    ),
    "perlmutter": (
        CLUSTER + "  nodes_per_engine: 2\n  stage: weights\n  modules: [vllm/0.25]\n",
        "perlmutter",
        {"account": "m1234", "run_options": ("--limit", "10")},
    ),
    "frontier": (
        CLUSTER + "  engines_per_node: 8\n  reserve_node: true\n  ports: 9000\n",
        "frontier",
        {"account": "BIF101"},
    ),
}


def rendered(name):
    cluster, site, options = SITES[name]
    return batch_script(plan_of(cluster, site, **options))


def test_scripts_are_as_their_golden_files():
    changed = []
    for name in SITES:
        text = rendered(name)
        # The shell parts are files of their own: what is golden is what is made.
        made = text[: text.index("# The steps of a batch job.")]
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("BAGENT_WRITE_GOLDEN"):
            path.write_text(made)
        if made != path.read_text():
            changed.append(name)
    assert changed == []


def test_scripts_are_good_shell(tmp_path):
    paths = [tmp_path / f"{name}.sh" for name in SITES]
    for path in paths:
        path.write_text(rendered(path.stem))
        subprocess.run(["bash", "-n", path], check=True)
    # All have the same shell parts: one is read whole, the others up to these.
    for path in paths[1:]:
        text = path.read_text()
        path.write_text(text[: text.index("# The steps of a batch job.")])
    command = [SHELLCHECK, "--exclude=SC2034", *paths[1:]]
    for words in ([SHELLCHECK, paths[0]], command):  # SC2034: used by the parts left out
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.stdout == ""


def test_a_slurm_script_has_no_secret_and_asks_for_a_warning_of_its_shell():
    text = rendered("generic-slurm")
    assert "#SBATCH --signal=B:USR1@20" in text
    assert not re.search(r"VLLM_API_KEY=['\"]?\w{8}", text)


def test_words_with_blanks_and_quotes_stay_what_they_are(tmp_path):
    cluster = """\
  walltime: 1h
  engine: [sh, -c, "echo '$HOME' \\"{port}\\""]
  env: {GREETING: "it's $5"}
  node_setup: ["export X=$(echo 'a b') # it's"]
"""
    text = batch_script(plan_of(cluster))
    head = text[: text.index("# The steps of a batch job.")]
    show = 'printf "%s\\n" "${ENGINE[@]}" "${NODE_ENV[@]}" "$NODE_SETUP"'
    script = tmp_path / "show.sh"
    script.write_text(head + show)
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "sh",
        "-c",
        "echo '$HOME' \"{port}\"",
        "GREETING=it's $5",
        "export X=$(echo 'a b') # it's",
    ]


@pytest.mark.parametrize("name", get_args(SchedulerName))
def test_the_shell_functions_that_the_script_calls_are_there(name):
    functions = ("job_id", "restart_count", "broadcast_file", "go_on")
    script = f"{(deploy_folder() / name / 'job.sh').read_text()}\ndeclare -F {' '.join(functions)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(functions)


@pytest.mark.parametrize(
    ("name", "options"),
    [("slurm", "#SBATCH --no-kill\n#SBATCH --x"), ("pbs", "#PBS -l place=scatter\n#PBS --x")],
)
def test_jobs_of_workers_have_the_directives_of_their_scheduler(name, options):
    lines = SCHEDULERS[name].worker_directives(ClusterSpec())
    plan = PoolPlan(name, "python", 1, nodes=3, account="a1", queue="q", options=(*lines, "--x"))
    provider = _provider(plan)
    assert provider.scheduler_options.strip().startswith(options)
    assert (provider.nodes_per_block, provider.walltime) == (3, "01:00:00")


def test_the_wheel_has_profiles_and_shell_parts_where_the_package_looks_for_them():
    included = WheelBuilder(str(Path(__file__).parents[2])).recurse_included_files()
    packaged = {Path(file.path): file.distribution_path for file in included}
    folder = deploy_folder()
    needed = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in needed} >= {".sh", ".yaml"}
    for path in needed:
        assert packaged[path] == f"bagent/hpc/deploy/{path.relative_to(folder)}"


LAUNCHERS = {
    "srun": "while [[ $1 == --* ]]; do case $1 in --nodelist=*) nodes=${1#*=} ;; esac; shift; done",
    "pals": "nodes=$6; shift 8; [[ $1 == --no-abort-on-failure ]]; shift",
    "hydra": "nodes=$6; shift 8",
    "openmpi": "nodes=$8; shift 8",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_command_runs_on_each_good_node_with_the_path_of_the_job(tmp_path, launcher):
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / ("srun" if launcher == "srun" else "mpiexec")
    run = 'while read -r node; do NODE=$node env -u PATH "$BASH" "${@:2}"; done <"$nodes"'
    program.write_text(f"#!/bin/bash\nset -e\n{LAUNCHERS[launcher]}\n{run}\n")
    program.chmod(0o755)
    marker = programs / "marker"
    marker.symlink_to("/bin/true")
    (tmp_path / "list").write_text("n1.site\nn2.site\nn3.site\nn1.site\n")
    command = """bash -c 'echo "$NODE $PWD $(command -v marker)"'"""
    script = on_every_node(command, launcher, sys.executable, ["n2"])
    env = clean_env(tmp_path / "home", {"PBS_JOBID": "1.s", "PBS_NODEFILE": str(tmp_path / "list")})
    env |= {"PATH": f"{programs}:{env['PATH']}", "SCRIPTS": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [f"{node}.site {tmp_path} {marker}" for node in ("n1", "n3")]
    assert done.stdout.splitlines() == lines


def test_scripts_of_launchers_are_good_shell(tmp_path):
    paths = []
    for launcher in (*LAUNCHERS, "ssh"):
        script = on_every_node("true", launcher, "/opt/python", ["n'1"])
        paths.append(tmp_path / f"{launcher}.sh")
        paths[-1].write_text(f"#!/bin/bash\nSCRIPTS=/shared\n{script}")
        subprocess.run(["bash", "-n", paths[-1]], check=True)
    done = subprocess.run([SHELLCHECK, *paths], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_a_batch_job_goes_to_its_folder_before_it_loads_modules():
    text = set_up_script(Path("/a b"), ["py/3"], ["umask 077"])
    assert text.splitlines() == ["cd '/a b'", "module load py/3", "umask 077"]
