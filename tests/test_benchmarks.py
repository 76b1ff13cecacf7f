"""Numbers of the benchmarks can be traced: each raw file is named, each that is named is there."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")
RESULTS = sorted(path.name for path in (FOLDER / "results").iterdir())
NAMED = sorted(set(re.findall(r"[\w-]+\.(?:json|parquet)\b", TEXT)) - {"OUT.json"})
SCRIPTS = sorted(set(re.findall(r"(?:benchmarks/|`)(\w+\.py)\b", TEXT)))


@pytest.mark.parametrize("name", NAMED)
def test_a_raw_file_that_is_named_exists(name: str) -> None:
    assert name in RESULTS


@pytest.mark.parametrize("name", RESULTS)
def test_a_raw_file_that_exists_is_named(name: str) -> None:
    assert name in NAMED


@pytest.mark.parametrize("name", [one for one in RESULTS if one.endswith(".json")])
def test_a_raw_file_is_whole_and_no_longer_than_it_must_be(name: str) -> None:
    path = FOLDER / "results" / name
    assert json.loads(path.read_bytes())
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_that_is_named_has_its_script(name: str) -> None:
    assert (FOLDER / name).is_file()


def test_a_script_says_how_it_is_run() -> None:
    for name in SCRIPTS:
        words = ast.get_docstring(ast.parse((FOLDER / name).read_text(encoding="utf-8")))
        assert words, name
