"""``bagent init`` and ``bagent schema`` as functions; what they write and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagent.cli.commands.init import FILES, init, write_starter
from bagent.cli.commands.schema import schema
from bagent.errors import UsageError
from bagent.job.load import JobRequest, load_job
from bagent.job.spec.json_schema import job_schema_text
from bagent.job.templates.prompt import Prompt


@pytest.fixture
def starter(tmp_path):
    write_starter(tmp_path / "genes")
    return load_job(JobRequest(path=Path("genes/job.yaml"), cwd=tmp_path))


def rows_of(folder):
    text = (folder / "rows.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_starter_job_loads_and_renders_each_of_its_rows(starter, tmp_path):
    rows = rows_of(tmp_path / "genes")
    assert len(rows) == 8
    prompt = Prompt.from_job(starter)
    assert prompt.check(rows) == []
    for row in rows:
        system, user = prompt.render(row)
        assert system["role"] == "system"
        assert user["content"] == f"Gene: {row['symbol']} ({row['name']})\n{row['summary']}\n"


def test_the_schema_goes_to_standard_output(capsys):
    schema()
    assert tuple(capsys.readouterr()) == (job_schema_text(), "")


def test_init_says_what_comes_next(tmp_path, capsys):
    init(tmp_path / "new")
    captured = capsys.readouterr()
    assert captured.err.endswith(f"next: bagent run {tmp_path}/new/job.yaml\n")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", list(FILES))
def test_init_overwrites_nothing(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"{name} is there already, nothing was written"):
        init(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_init_in_a_file_says_why_not(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to"):
        init(tmp_path / "file")


def test_a_schema_file_that_cannot_be_written_says_why(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write .*: no such file or directory"):
        schema(tmp_path / "no" / "s.json")
