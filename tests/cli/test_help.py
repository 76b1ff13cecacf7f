"""Help that can be read alone: groups, plain placeholders, completion, the first commands."""

from __future__ import annotations

import json
import re

import pytest

from bagent.cli.app import COMMANDS, GROUPS, load_command
from bagent.cli.options import (
    complete_job_files,
    complete_run_names,
    complete_sites,
    complete_topics,
)
from support.stored_runs import make_run, stored


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    commands = {name: load_command(name) for name in COMMANDS}
    return {
        name: command.get_help(command.make_context(name, [], resilient_parsing=True))
        for name, command in commands.items()
    }


def test_bagent_alone_shows_three_commands_to_begin_with(bagent):
    done = bagent([])
    assert (done.code, done.err) == (0, "")
    assert re.findall(r"^  bagent (\w+)", done.out, re.M) == ["init", "run", "guide"]


def test_help_lists_every_command_in_a_group_with_one_line(bagent):
    text = bagent(["-h"]).out
    for title, commands in GROUPS.items():
        assert f"{title}:\n" in text
        for name, line in commands.items():
            assert re.search(rf"^  {name} +{re.escape(line)}$", text, re.M)


def test_the_line_of_a_command_is_the_first_sentence_of_its_help(helps):
    for name, line in COMMANDS.items():
        first = " ".join(helps[name].split("\n\n")[1].split())
        assert first.startswith(line.split(":")[0].rstrip(".")), name


def test_placeholders_are_words_and_choices_are_choices(helps):
    for name, text in helps.items():
        assert not re.search(r"<\w|list\[|x[<>]=", text), name
    assert "--progress auto|rich|plain|json|none" in helps["run"]
    assert "--format jsonl|csv|parquet|table|openai-batch" in helps["results"]


def test_every_help_of_an_option_is_a_sentence(helps):
    for name in COMMANDS:
        for param in load_command(name).params:
            text = param.help or ""
            assert text[:1].isupper() and text.endswith((".", ")")), (name, param.opts, text)


def test_every_command_has_debug_and_an_example(helps):
    for name, text in helps.items():
        assert "--debug" in text, name
        assert name in ("hosts", "sim") or "Example: bagent" in text, name


def test_debug_before_or_behind_a_command_shows_the_traceback(job_dir, bagent):
    plain = bagent(["status", "nothing"])
    assert plain.err.startswith("bagent: error: nothing: no such run")
    for arguments in (["--debug", "status", "nothing"], ["status", "nothing", "--debug"]):
        assert "UsageError" in bagent(arguments).err


def test_an_unknown_command_names_the_nearest_one(bagent):
    assert "resluts: no such command (did you mean results?)" in bagent(["resluts"]).err
    assert "(bagent -h lists the commands)" in bagent(["xyzzy"]).err


def test_an_unknown_option_names_the_nearest_one(bagent):
    done = bagent(["run", "--backnd", "sim"])
    assert done.err == "bagent: error: no such option: --backnd (did you mean --backend?)\n"
    assert done.code == 2
    assert "(bagent check shows what would be sent)" in bagent(["run", "--dry-run"]).err
    assert "(nothing is submitted without --go)" in bagent(["submit", "--dry-run"]).err
    assert "(try: bagent run --help)" in bagent(["run", "--xyzzy"]).err


def test_wrong_values_are_named_without_words_of_libraries(bagent):
    for options, message in (
        (["--limit", "x"], "invalid value for '--limit': it must be a whole number (try: bagent"),
        (["--limit", "-1"], "invalid value for '--limit': it must be at least 0 (try: bagent"),
        (["a", "b"], "unexpected: b (try: bagent run"),
    ):
        assert message in bagent(["run", *options]).err


def test_a_job_that_is_not_there_names_the_one_that_was_meant(job_dir, bagent):
    (job_dir / "genes").mkdir()
    (job_dir / "genes" / "job.yaml").touch()
    for path, near in (("job.yaml", "genes/job.yaml"), ("genes/job.yml", "genes/job.yaml")):
        assert f"no such job file (did you mean {near}?)" in bagent(["run", path]).err
    assert "(bagent init writes a starter job)" in bagent(["run", "other.yaml"]).err


def test_run_without_a_job_runs_the_job_of_the_folder(job_dir, bagent):
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


def test_a_shell_that_asks_for_completions_gets_them(bagent):
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
