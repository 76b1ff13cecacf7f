"""The job files in the cookbook are right as they stand."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from bagent import load_job
from bagent.remote import storage_of
from support.cli import run_bagent
from support.remote_files import file_server

TEXT = (Path(__file__).resolve().parents[2] / "jobs" / "README.md").read_text()
RECIPE = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?```yaml\n(.*?)```", re.M | re.S)
RECIPES = dict(RECIPE.findall(TEXT))
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(60)).decode()
TOOLS = '''
def price_of(ship: str) -> float:
    """The price of a ship."""
    return 1.0
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"id": n, "text": f"Anna and Ben met {n} times."} for n in range(4)]
    for row in rows:
        row["photo"] = PNG
        row["messages"] = [{"from": "human", "value": row["text"]}, {"from": "gpt", "value": "No."}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


def test_every_recipe_is_found() -> None:
    assert len(RECIPES) == TEXT.count("```yaml") > 10


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_loads(folder: Path, name: str) -> None:
    path = folder / "job.yaml"
    path.write_text(RECIPES[name])
    assert load_job(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(set(RECIPES) - {"Embed", "Rows in a bucket", "Cheapest by a time"})
)
def test_every_recipe_runs_on_a_simulated_engine(folder: Path, name: str) -> None:
    text = re.sub(r"vllm://node0\d:8000", "sim://?speedup=50", RECIPES[name])
    (folder / "job.yaml").write_text(text)
    # A simulated engine writes as long as it likes, so answers may be cut off.
    done = run_bagent(["run", "job.yaml", "--allow-failures", "100%"], folder)
    assert done.code == 0, done.err
    assert re.search(r"^rows +\d+ rows: [1-9]\d* ok", done.err, re.M), done.err


@pytest.mark.tables
def test_the_recipe_for_a_bucket_runs(folder: Path) -> None:
    text = RECIPES["Rows in a bucket"].replace("vllm://node01:8000", "sim://?speedup=50")
    (folder / "job.yaml").write_text(text)
    with file_server() as site:
        storage_of.cache_clear()
        site.files["bucket/rows/a.jsonl"] = (folder / "rows.jsonl").read_bytes()
        command = ["run", "job.yaml", "--allow-failures", "100%"]
        done = run_bagent(command, folder, env=site.env)
        storage_of.cache_clear()
        assert "bucket/runs/labels/manifest.json" in site.files
    assert done.code == 0, done.err
    assert "4 rows" in done.err
