"""The same load by ``bagent bench`` and by vLLM's own tool, at the same time on one real vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from real.parts import venv

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "cross_together.py"
DISTURBED = 3


def test_two_tools_measure_the_same_engine_alike(tmp_path: Path) -> None:
    venv("vllm")
    out = tmp_path / "found.json"
    done = subprocess.run([sys.executable, SCRIPT, out], capture_output=True, text=True)
    if done.returncode == DISTURBED:
        pytest.skip(f"no repeat without other work beside it: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    own, other = json.loads(out.read_text())["runs"][-2:]
    assert own["requests"] >= 10 and other["requests"] >= 10
    assert own["output_tokens"] == other["output_tokens"] == 6
    assert own["input_tokens"] == pytest.approx(other["input_tokens"], rel=0.05)
