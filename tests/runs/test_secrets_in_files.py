"""What is written about a run holds no secret, and only its owner may read it."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from support.agent_jobs import calls
from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import results_by_id, write_job
from support.replies import ok, status

NAMES = ("PGPASSWORD", "GH_PAT", "SMTP_PASS", "JWT", "SLACK_WEBHOOK", "NAMED_KEY")
ENV = {name: f"S3CR-{name}-x9" for name in NAMES}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files_with_secrets(folder: Path) -> list[tuple[str, str]]:
    return [
        (file.name, name)
        for file in folder.rglob("*")
        if file.is_file()
        for name, value in ENV.items()
        if value.encode() in file.read_bytes()
    ]


def test_no_file_of_a_run_holds_a_value_that_a_variable_put_into_the_job(job_dir, bagent):
    tool = {
        "name": "leak",
        "description": "Fail with all that it knows.",
        "command": [sys.executable, "-c", "import os, sys; sys.exit(str(dict(os.environ)))"],
        "env": {name: f"${{{name}}}" for name in NAMES[:3]},
    }
    with FakeServer({"*": [calls(("leak", "{}")), ok("done")]}) as fs:
        backend = {"url": f"{fs.url}/v1?v=${{JWT}}", "api_key_env": "NAMED_KEY"}
        backend |= {"headers": {"X-Hook": "${SLACK_WEBHOOK}", "X-Literal": "typed-by-hand"}}
        write_job(job_dir, "", 1, backend=backend, model="m", agent={"tools": [tool]})
        done = bagent(["run", "job.yaml"], env=ENV)
        assert done.code == 0, done.err
        assert bagent(["report", "job"]).code == 0
        told = str(fs.requests[1].body["messages"])
    assert "***" in told and "S3CR" not in told + done.err + done.out
    assert files_with_secrets(job_dir / "runs") == []
    assert "typed-by-hand" not in done.err
    files = [path for path in (job_dir / "runs").rglob("*") if path.is_file()]
    assert not any(b"typed-by-hand" in path.read_bytes() for path in files)


def test_a_server_that_repeats_its_key_puts_it_into_no_file(job_dir, bagent):
    secret = ENV["NAMED_KEY"]
    refused = status(400, headers={"X-Request-Id": f"Bearer {secret}"})
    (job_dir / "key.sh").write_text('echo "$NAMED_KEY"')
    with FakeServer({"*": [refused]}, models=[{"id": "m"}, {"id": f"for {secret}"}]) as fs:
        backend = {"url": f"{fs.url}/v1", "api_key_command": "sh key.sh"}
        write_job(job_dir, "", 1, backend=backend, model="m")
        bagent(["run", "job.yaml"], env=ENV)
        assert fs.requests[0].headers["authorization"] == f"Bearer {secret}"
    (line,) = (job_dir / "runs/job/journal").glob("attempts-*.jsonl")
    assert '"request_id":"***"' in line.read_text()
    assert files_with_secrets(job_dir / "runs") == []


@pytest.mark.process("programs are started")
def test_a_program_s_last_words_and_its_row_hold_no_key(job_dir):
    code = "import os, sys; sys.exit('no access with ' + os.environ['PASS'])"
    agent = {"command": [sys.executable, "-c", code], "env": {"PASS": "${SMTP_PASS}"}}
    with FakeServer() as fs:
        write_job(job_dir, fs.url, 1, agent=agent)
        done = run_bagent(["run", "job.yaml", "--progress", "plain"], job_dir, ENV)
    assert done.code == 1 and ENV["SMTP_PASS"] not in done.err
    assert results_by_id(job_dir)["r1"]["error"].endswith("no access with ***")
    assert files_with_secrets(job_dir / "runs") == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, 0o700),
        (750, 0o750),
    ],
)
def test_a_run_directory_is_for_its_owner_unless_the_job_says_more(
    job_dir, bagent, fs, given, expected
):
    more = {} if given is None else {"results": {"mode": given}}
    write_job(job_dir, fs.url, 1, **more)
    assert bagent(["run", "job.yaml"]).code == 0
    assert mode_of(job_dir / "runs/job") == expected
    assert bagent(["run", "job.yaml", "--fresh"]).code == 0
    assert {mode_of(path) for path in (job_dir / "runs").iterdir()} == {expected}


@pytest.mark.parametrize("given", ["777", "private", True])
def test_a_mode_that_lets_others_write_or_is_none_is_refused(job_dir, bagent, fs, given):
    write_job(job_dir, fs.url, 1, results={"mode": given})
    done = bagent(["run", "job.yaml"])
    assert done.code == 2
    assert "results.mode" in done.err and "750 lets the group in" in done.err


def test_a_batch_script_is_for_its_owner_also_where_one_was_readable(job_dir, bagent, fs):
    cluster = {"scheduler": "slurm", "walltime": "1h", "engine": "e", "gpus_per_node": 0}
    write_job(job_dir, "vllm", 1, cluster={**cluster, "env": {"A": "${GH_PAT}"}})
    folder = job_dir / "runs/job.batch"
    for _ in range(2):
        bagent(["submit", "job.yaml", "--go"], env=ENV)  # there is no sbatch
        script = folder / "job.slurm.sh"
        assert (mode_of(folder), mode_of(script)) == (0o700, 0o700)
        assert ENV["GH_PAT"] in script.read_text()
        script.chmod(0o755)


def test_sql_of_the_input_is_masked_and_can_still_be_read_again(job_dir, bagent, fs):
    sql = {"sql": "select i as id, '${PGPASSWORD}' <> '' as t from range(2) r(i)"}
    write_job(job_dir, fs.url, 1, input=sql, prompt="{{ t }}")
    done = bagent(["run", "job.yaml", "-o", "-"], env=ENV)
    assert done.code == 0, done.err
    assert [line["input"]["t"] for line in done.lines()] == [True, True]
    assert [line["id"] for line in bagent(["run", "job.yaml", "-o", "-"], env=ENV).lines()] == [
        0,
        1,
    ]
    assert files_with_secrets(job_dir / "runs") == []
