"""The script that starts one process on every node, run with stand-ins for launchers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bagent.hpc.allocation import on_every_node, set_up_script
from support.cli import clean_env

SHELLCHECK = Path(sys.executable).parent / "shellcheck"
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


def test_the_scripts_are_good_shell(tmp_path):
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
