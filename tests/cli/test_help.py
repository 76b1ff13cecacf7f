"""Help that can be read alone: groups, plain placeholders, completion, the first commands."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from bagent.cli.app import COMMANDS, GROUPS, load_command
from bagent.cli.commands import guide
from bagent.cli.options import (
    complete_job_files,
    complete_run_names,
    complete_sites,
    complete_topics,
)
from support.pages import GUIDES
from support.stored_runs import make_run, stored


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    commands = {name: load_command(name) for name in COMMANDS}
    return {
        name: command.get_help(command.make_context(name, [], resilient_parsing=True))
        for name, command in commands.items()
    }


def test_help_lists_every_command_in_a_group_with_one_line(bagent):
    alone = bagent([])
    assert (alone.code, alone.err) == (0, "")
    assert re.findall(r"^  bagent (\w+)", alone.out, re.M) == ["init", "run", "guide"]
    text = bagent(["-h"]).out
    for title, commands in GROUPS.items():
        assert f"{title}:\n" in text
        for name, line in commands.items():
            assert re.search(rf"^  {name} +{re.escape(line)}$", text, re.M)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_can_be_read_alone(helps, name):
    text = helps[name]
    first = " ".join(text.split("\n\n")[1].split())
    assert first.startswith(COMMANDS[name].split(":")[0].rstrip("."))
    assert not re.search(r"<\w|list\[|x[<>]=", text), "placeholders are words"
    assert "--debug" in text
    assert name in ("hosts", "sim") or "Example: bagent" in text
    for param in load_command(name).params:
        sentence = param.help or ""
        assert sentence[:1].isupper() and sentence.endswith((".", ")")), param.opts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resluts"], "resluts: no such command (did you mean results?)"),
        (["xyzzy"], "(bagent -h lists the commands)"),
        (["run", "--backnd", "sim"], "no such option: --backnd (did you mean --backend?)"),
        (["run", "--dry-run"], "(bagent check shows what would be sent)"),
        (["submit", "--dry-run"], "(nothing is submitted without --go)"),
        (["run", "--xyzzy"], "(try: bagent run --help)"),
        (["run", "--limit", "x"], "invalid value for '--limit': it must be a whole number (try: b"),
        (["run", "--limit", "-1"], "invalid value for '--limit': it must be at least 0 (try: b"),
        (["run", "a", "b"], "unexpected: b (try: bagent run"),
    ],
)
def test_wrong_words_are_one_line_that_names_the_right_ones(bagent, words, message):
    done = bagent(words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert message in done.err


def test_debug_before_or_behind_a_command_shows_the_traceback(bagent):
    plain = bagent(["status", "nothing"])
    assert plain.err.startswith("bagent: error: nothing: no such run")
    for arguments in (["--debug", "status", "nothing"], ["status", "nothing", "--debug"]):
        assert "UsageError" in bagent(arguments).err


def test_a_job_that_is_not_there_names_the_one_that_was_meant(job_dir, bagent):
    (job_dir / "genes").mkdir()
    (job_dir / "genes" / "job.yaml").touch()
    for path, near in (("job.yaml", "genes/job.yaml"), ("genes/job.yml", "genes/job.yaml")):
        assert f"no such job file (did you mean {near}?)" in bagent(["run", path]).err
    assert "(bagent init writes a starter job)" in bagent(["run", "other.yaml"]).err


def test_run_without_a_job_runs_the_job_of_the_folder(bagent):
    assert "name a job file, or make one: bagent init" in bagent(["run"]).err
    bagent(["init"])
    assert bagent(["run", "--limit", "1"]).code == 0
    assert bagent(["check", "--prompts", "0"]).code == 0


def test_shells_complete_jobs_runs_sites_and_guides(job_dir, bagent, monkeypatch):
    monkeypatch.chdir(job_dir)
    assert complete_run_names("") == []
    (job_dir / "job.yaml").touch()
    make_run(job_dir / "runs" / "genes", [stored(0)])
    assert complete_run_names("ge") == ["genes"]
    assert complete_job_files("jo") == ["job.yaml"]
    assert complete_job_files(f"{job_dir}/jo") == [f"{job_dir}/job.yaml"]
    assert complete_job_files("missing/") == []
    assert complete_sites("au") == ["aurora"]
    assert complete_topics("res") == ["resume"]
    words = {"_BAGENT_COMPLETE": "complete_bash", "COMP_WORDS": "bagent qu", "COMP_CWORD": "1"}
    done = bagent([], env=words)
    assert (done.code, done.out.split()) == (0, ["query"])


def test_json_is_for_programs(job_dir, bagent):
    make_run(job_dir / "runs" / "genes", [stored(0)])
    for command in (
        ["query", "genes", "select count(*) as n from results"],
        ["compare", "genes", "genes"],
        ["report", "genes"],
    ):
        assert json.loads(bagent([*command, "--json"]).out)


def test_prices_are_a_table_with_sources(bagent):
    done = bagent(["prices"])
    assert done.code == 0
    head, line, *rows = done.out.splitlines()
    assert head.split()[:4] == ["provider", "model", "input", "output"]
    assert set(line) <= {"-", " "}
    assert len(rows) > 5
    assert all("https://" in row for row in rows)
    assert done.err == ""
    found = bagent(["prices", "--json"]).lines()
    cached = [price["cached"] for price in found]
    assert None in cached and 0 not in cached, "what a source does not tell is unknown"
    csv_rows = csv.DictReader(io.StringIO(bagent(["prices", "--csv"]).out))
    assert [row["model"] for row in csv_rows] == [price["model"] for price in found]


def test_guide_lists_every_topic_in_the_order_of_need(bagent):
    done = bagent(["guide"])
    names = [line.split()[0] for line in done.out.splitlines()]
    assert done.code == 0
    assert set(names) == {*(path.stem for path in GUIDES.glob("*.md")), "reference"}
    assert names[0] == "jobs"
    assert [line["topic"] for line in bagent(["guide", "--json"]).lines()] == names


def test_a_guide_in_a_pipe_is_its_markdown(bagent):
    assert bagent(["guide", "resume"]).out == (GUIDES / "resume.md").read_text(encoding="utf-8")
    assert bagent(["guide", "reference"]).out.startswith("# Reference")


def test_a_guide_on_a_terminal_has_styles_and_no_fences(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    guide.guide("python")
    text = capsys.readouterr().out
    assert "open_run" in text
    assert "```" not in text
