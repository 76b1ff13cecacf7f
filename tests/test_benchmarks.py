"""Numbers of the benchmarks can be traced: each raw file is named, each that is named is there."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")
RESULTS = {path.name: path for path in (FOLDER / "results").iterdir()}


def test_raw_files_that_exist_are_those_that_are_named() -> None:
    named = set(re.findall(r"[\w-]+\.(?:json|parquet|txt)\b", TEXT)) - {"OUT.json"}
    assert set(RESULTS) == named


def test_raw_files_are_whole_and_no_longer_than_they_must_be() -> None:
    paths = [path for name, path in RESULTS.items() if name.endswith(".json")]
    assert [path.name for path in paths if path.stat().st_size >= 1_000_000] == []
    assert [path.name for path in paths if not json.loads(path.read_bytes())] == []


def test_charts_are_made_from_the_raw_files() -> None:
    spec = importlib.util.spec_from_file_location("charts", FOLDER / "charts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.charts().items():
        assert path.read_text(encoding="utf-8") == text, "make it new: python benchmarks/charts.py"


def test_every_command_that_is_named_has_a_script_that_explains_itself() -> None:
    scripts = set(re.findall(r"(?:benchmarks/|`)(\w+\.py)\b", TEXT))
    assert scripts
    assert [name for name in scripts if not (FOLDER / name).is_file()] == []
    trees = {name: ast.parse((FOLDER / name).read_text(encoding="utf-8")) for name in scripts}
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == []
