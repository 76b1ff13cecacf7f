"""``bagent check`` as a process: its pipes, its locale, its signals, and a run beside it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from support.cli import Completed, Running
from support.fake_server import FakeServer
from support.jobs import write_job
from support.replies import ok

Bagent = Callable[..., Completed]

SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["good", "bad"]}},
    "required": ["verdict"],
    "additionalProperties": False,
}


def test_the_prompts_shown_are_those_that_a_run_sends(bagent: Bagent, job_dir: Path) -> None:
    with FakeServer({"*": [ok('{"verdict":"good"}')]}, flavour="vllm") as fs:
        write_job(
            job_dir,
            f"vllm://{fs.address}",
            2,
            prompt={"system": "Judge.", "user": "id={{ id }} {{ text }}\n"},
            output={"schema": SCHEMA},
            sampling={"temperature": 0, "top_p": 0.9, "extra": {"priority": 5}},
        )
        report = msgspec.json.decode(bagent(["check", "job.yaml", "--json"]).out)
        ran = bagent(["run", "job.yaml"])
        assert ran.code == 0, ran.err
        sent = {seen.row_id: dict(seen.body) for seen in fs.requests}
    assert [one["id"] for one in report["prompts"]] == ["r1", "r2"]
    for one in report["prompts"]:
        body = sent[one["id"]]
        assert one["messages"] == body.pop("messages")
        assert one["max_tokens"] == body["max_tokens"]
        body.pop("stream", None)
        body.pop("stream_options", None)
        if one["id"] == "r1":
            assert report["parameters"] == body
    assert "JSON Schema" in report["prompts"][0]["messages"][0]["content"]


def test_rows_from_stdin_are_looked_at(bagent: Bagent, job_dir: Path, fs: FakeServer) -> None:
    write_job(job_dir, fs.url, input="-")
    lines = "".join(f'{{"id":"r{n}","text":"t"}}\n' for n in range(50))
    done = bagent(["check", "job.yaml", "--rows", "10"], stdin=lines)
    assert done.code == 0, done.err
    assert "rows        at least " in done.out
    assert "the first 10 looked at" in done.out
    assert not (job_dir / "runs").exists()


@pytest.mark.process("signal")
def test_ctrl_c_while_an_endpoint_is_silent_ends_quietly(job_dir: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        write_job(job_dir, f"http://127.0.0.1:{silent.getsockname()[1]}/v1", 2)
        with Running(["check", "job.yaml"], job_dir) as running:
            connection, _ = silent.accept()
            running.send(signal.SIGINT)
            done = running.finish(20)
            connection.close()
    assert done.code == 130
    assert "Traceback" not in done.err
