"""The batch script: what is rendered, and that it is good shell.

``BAGENT_WRITE_GOLDEN=1`` writes the golden files anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from bagent.hpc.script import batch_script
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
