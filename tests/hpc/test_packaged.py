"""Profiles and shell parts are there in an installed package too."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", build, folder]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


@pytest.mark.process("environment")
def test_a_script_is_made_from_the_wheel_alone(installed, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "job.yaml").write_text(
        "input: rows.jsonl\nprompt: say {{ text }}\n"
        "cluster: {account: a, walltime: 1h, engine: vllm serve m}\n"
    )
    code = (
        "import sys, bagent; sys.path[:] = [p for p in sys.path if p != ''];"
        "from bagent.cli.app import main;"
        "print(bagent.__file__, file=sys.stderr); sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "submit", "job.yaml", "--site", "polaris"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(installed) in done.stderr
    assert "#PBS -l select=1:system=polaris" in done.stdout
    assert 'main "$@"' in done.stdout
