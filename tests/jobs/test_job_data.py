"""The data of the jobs under ``jobs/``: real rows, labelled by a reader, with fair prompts."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

JOBS = Path(__file__).resolve().parents[2] / "jobs"
NAMES = sorted(path.parent.name for path in JOBS.glob("*/job.yaml"))


def spec(job: str) -> dict[str, Any]:
    return yaml.safe_load((JOBS / job / "job.yaml").read_text(encoding="utf-8"))


def rows(job: str) -> list[dict[str, Any]]:
    path = JOBS / job / spec(job)["input"]
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("job", NAMES)
def test_every_row_has_an_id_of_its_own_and_a_reader_s_answer(job: str) -> None:
    data, name = rows(job), spec(job).get("id", "id")
    assert len({row[name] for row in data}) == len(data) >= 12
    assert all(any(key.startswith("gold") and row[key] for key in row) for row in data)


@pytest.mark.parametrize("job", NAMES)
def test_no_prompt_gives_the_reader_s_answer_away(job: str) -> None:
    for path in [JOBS / job / "job.yaml", *(JOBS / job / "prompts").iterdir()]:
        assert not re.search(r"\{[{%][^}]*(gold|row)", path.read_text(encoding="utf-8")), path


def test_the_demo_job_has_forty_sentences_half_of_them_positive() -> None:
    labels = [row["gold"] for row in rows("sentiment")]
    assert (labels.count("positive"), labels.count("negative")) == (20, 20)
