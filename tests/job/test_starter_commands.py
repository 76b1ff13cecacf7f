"""``bagent init`` and ``bagent schema`` as functions; what they write and where."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import pytest

from bagent.cli.commands.init import FILES, init, write_starter
from bagent.cli.commands.schema import schema
from bagent.errors import UsageError
from bagent.job.load import JobRequest, load_job
from bagent.job.spec.json_schema import job_schema, job_schema_text
from bagent.job.templates.prompt import Prompt
from bagent.job.yaml.parser import read_yaml
from bagent.job.yaml.scalars import plain


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


def test_the_starter_job_fits_the_schema_of_jobs():
    data = plain(read_yaml(FILES["job.yaml"], "job.yaml").data)
    jsonschema_rs.Draft202012Validator(job_schema()).validate(data)


def test_init_says_what_comes_next(tmp_path, capsys):
    init(tmp_path / "new")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith(f"next: bagent run {tmp_path}/new/job.yaml\n")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", list(FILES))
def test_init_overwrites_nothing(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError) as caught:
        init(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/{name} is there already, nothing was written "
        "(name another folder: bagent init DIR)"
    )
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_init_in_a_file_says_why_not(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to"):
        init(tmp_path / "file")


def test_the_schema_goes_to_standard_output(capsys):
    schema()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (job_schema_text(), "")


def test_a_schema_file_that_cannot_be_written_says_why(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write .*: no such file or directory"):
        schema(tmp_path / "no" / "s.json")


@pytest.mark.parametrize("command", [init, schema])
def test_the_help_of_a_command_ends_with_an_example(command):
    assert command.__doc__.strip().splitlines()[-1].strip().startswith("Example: bagent ")
