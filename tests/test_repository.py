"""Files of the repository that no package owns, and the raw files of the benchmarks' numbers."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import tomllib
from pathlib import Path

from bagent.fleet.hostfile import read_hostfile

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PINNED = re.findall(r"(?m)^([a-z0-9.-]+)==\S+", LOCK)
SCRIPTS = sorted(
    [*(ROOT / "tests").rglob("*.sh"), *(ROOT / "deploy").rglob("*.sh"), ROOT / ".ci" / "run"]
)
SCHEMAS = sorted((ROOT / "schemas").glob("*.schema.json"))
BENCHMARKS = ROOT / "benchmarks"
TEXT = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
RESULTS = {path.name: path for path in (BENCHMARKS / "results").iterdir()}


def test_the_lock_pins_every_requirement_with_a_hash() -> None:
    blocks = re.split(r"(?m)^(?=[a-z0-9.-]+==)", LOCK)[1:]
    assert len(blocks) == len(PINNED) > 50
    assert all("--hash=sha256:" in block for block in blocks)


def test_the_lock_names_no_place_and_no_platform() -> None:
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert [line for line in lines if re.search(r"://|/|;|--(index|find|extra)", line)] == []


def test_the_lock_holds_what_the_package_and_its_extras_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [
        line
        for name in ("local", "mcp", "metrics", "fast", "test", "bench", "parsl")
        for line in extras[name]
    ]
    names = {re.split(r"[^A-Za-z0-9._-]", line)[0].lower().replace("_", "-") for line in wanted}
    assert sorted(names - set(PINNED)) == []


def test_no_text_installs_the_package_by_its_bare_name() -> None:
    """That name is another project's on the public index; hints name the dependency itself."""
    named = re.compile(
        r"(?:pip3?|pipx|uv pip|uv tool|uvx|uv)[^\n]*\s['\"]?bagent(?:\[|['\"]?\s*$|[=<>~])"
    )
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = []
    requirements = set()
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix not in (".py", ".md", ".yaml", ".toml", ".sh") or path == Path(__file__):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            found += [f"{name}: {line.strip()}"] * bool(named.search(line))
            requirements |= set(
                re.findall(r"pip install (?:'[^']*' )*'([a-z0-9-]+[<>=][^']*)'", line)
            )
    assert found == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {line for lines in project["optional-dependencies"].values() for line in lines}
    assert len(requirements) > 4
    assert requirements <= extras


def test_scripts_parse_can_be_started_and_stop_at_the_first_error() -> None:
    for path in SCRIPTS:
        subprocess.run(["bash", "-n", path], check=True)
    assert [path for path in SCRIPTS if "set -euo pipefail" not in path.read_text()] == []
    assert [path for path in SCRIPTS if not path.stat().st_mode & 0o100] == []


def test_schemas_are_schemas() -> None:
    import jsonschema

    for path in SCHEMAS:
        schema = json.loads(path.read_text())
        jsonschema.validators.validator_for(schema).check_schema(schema)


def test_the_hostfiles_can_be_read() -> None:
    counts = {path.name: len(read_hostfile(path)) for path in (ROOT / "hostfiles").iterdir()}
    assert counts == {"local.txt": 1, "examples.txt": 24, "cluster.txt": 66}


def test_every_target_of_the_makefile_is_explained() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"(?m)^\.PHONY: (.*)$", text)
    shown = subprocess.run(["make", "-C", ROOT, "help"], check=True, capture_output=True, text=True)
    for target in phony.split():
        assert re.search(rf"(?m)^{target} +\S", shown.stdout), target


def test_raw_files_that_exist_are_those_that_are_named() -> None:
    named = set(re.findall(r"[\w-]+\.(?:json|parquet|txt)\b", TEXT)) - {"OUT.json"}
    assert set(RESULTS) == named


def test_raw_files_are_whole_and_no_longer_than_they_must_be() -> None:
    paths = [path for name, path in RESULTS.items() if name.endswith(".json")]
    assert [path.name for path in paths if path.stat().st_size >= 1_000_000] == []
    assert [path.name for path in paths if not json.loads(path.read_bytes())] == []


def test_charts_are_made_from_the_raw_files() -> None:
    spec = importlib.util.spec_from_file_location("charts", BENCHMARKS / "charts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.charts().items():
        assert path.read_text(encoding="utf-8") == text, "make it new: python benchmarks/charts.py"


def test_every_command_that_is_named_has_a_script_that_explains_itself() -> None:
    scripts = set(re.findall(r"(?:benchmarks/|`)(\w+\.py)\b", TEXT))
    assert scripts
    assert [name for name in scripts if not (BENCHMARKS / name).is_file()] == []
    trees = {name: ast.parse((BENCHMARKS / name).read_text(encoding="utf-8")) for name in scripts}
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == []
