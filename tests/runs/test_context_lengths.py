"""Rows that are long for the servers' contexts, through the real command."""

from __future__ import annotations

from pathlib import Path

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import results_by_id, write_job
from support.replies import canned, ok

SHORT = {"id": "short", "text": "a word"}
LONG = {"id": "long", "text": "word " * 500}
"""2,500 tokens for the servers here: each byte is one."""
LONGEST = {"id": "longest", "text": "word " * 5000}


def sent(server: FakeServer) -> set[str]:
    """The rows that a server was asked for an answer to."""
    return {row for seen in server.requests for row in seen.rows}


def test_each_row_goes_to_a_server_whose_context_holds_it(job_dir: Path):
    script = {"*": [canned()]}
    with (
        FakeServer(script, flavour="vllm", max_model_len=1000) as narrow,
        FakeServer(script, flavour="vllm", max_model_len=4000) as wide,
    ):
        (job_dir / "hosts.txt").write_text(f"{narrow.address}\n{wide.address}\n")
        rows = [{**row, "id": f"{row['id']}{n}"} for n in range(5) for row in (SHORT, LONG)]
        job = write_job(
            job_dir, "", [*rows, LONGEST], backend="vllm", hostfile=str(job_dir / "hosts.txt")
        )
        done = run_bagent(["run", job], job_dir)
        assert done.code == 1, done.err
        assert not [row for row in sent(narrow) if row.startswith("long")]
        assert {f"long{n}" for n in range(5)} <= sent(wide)
        assert "longest" not in sent(wide)
    found = results_by_id(job_dir)
    longest = found.pop("longest")
    assert (longest["status"], longest["error_kind"]) == ("failed", "context_overflow")
    assert "context length of 4000" in longest["error"]
    assert longest["attempts"] == 0
    assert {row["status"] for row in found.values()} == {"ok"}


def test_an_answer_that_was_cut_off_asks_for_no_more_than_the_context_leaves(job_dir: Path):
    cut = ok("half", finish_reason="length", usage={"prompt_tokens": 700, "completion_tokens": 100})
    with FakeServer({"long": [cut, ok("whole")]}, flavour="vllm", max_model_len=1000) as fs:
        row = {"id": "long", "text": "word " * 130}
        write_job(
            job_dir,
            f"vllm://{fs.address}",
            [row],
            sampling={"temperature": 0, "max_tokens": 100},
            output={"grow": 8},
            batching={"mode": "single"},
        )
        done = run_bagent(["run", "job.yaml"], job_dir)
        assert done.code == 0, done.err
        asked = [seen.body["max_tokens"] for seen in fs.requests if seen.rows == ("long",)]
    assert asked == [100, 300]
