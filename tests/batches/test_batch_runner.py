"""``bagent run`` with ``batching: {mode: provider}``, as a user types it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bagent.batches import scheduler
from bagent.batches.record import outstanding_warning, status_lines
from bagent.errors import JobError
from bagent.job.load import JobRequest, load_job
from bagent.runs.context import RunOptions, prepare
from bagent.runs.plan import tier_fields
from support.batch_runs import in_thread
from support.batch_services import AnthropicServer, Course, OpenAIServer, chat_body, message, row_of
from support.cli import Completed, Running, in_this_process
from support.jobs import journal_lines, write_job

Bagent = Callable[..., Completed]
SECRET = "key-5up3rs3cret"
RUN = ["run", "job.yaml", "--progress", "plain"]


def job(folder: Path, url: str, rows: int, kind: str = "openai", **keys: Any) -> None:
    backend = {"url": f"{kind}+http{url.removeprefix('http')}/v1", "api_key_env": "MY_KEY"}
    prices = {"input": 1.0, "output": 2.0, "batch": 0.5}
    tables = {"duckdb": False, "parquet": False}
    keys = {"batching": {"mode": "provider"}, "prices": prices, "results": tables, **keys}
    write_job(folder, "x", rows, backend=backend, model="m-1", **keys)


def run_dir(folder: Path) -> Path:
    return folder / "runs" / "job"


def finished(folder: Path) -> list[Any]:
    """The outcomes on whole lines of the journal."""
    return [line for line in journal_lines(run_dir(folder)) if "status" in line]


def shows_nothing(folder: Path, *told: Completed) -> None:
    """The key is neither in a file nor in what commands said."""
    for path in folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert all(SECRET not in one.out + one.err for one in told)


@pytest.mark.process("kill")
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_a_run_that_ended_while_the_provider_works_resumes_with_the_same_batch(
    job_dir: Path, bagent: Bagent, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's run is killed, Anthropic's ended by a signal: one start of each is enough."""
    server: OpenAIServer | AnthropicServer
    if kind == "openai":
        server = OpenAIServer(Course(("in_progress", "completed")))
    else:
        server = AnthropicServer(Course(("in_progress", "ended"), message()))
    with in_thread(server) as url:
        job(job_dir, url, 40, kind=kind)
        with Running(RUN, job_dir, {"MY_KEY": SECRET}) as running:
            running.wait_for_err("is in_progress")
            running.send(signal.SIGKILL if kind == "openai" else signal.SIGTERM)
            ended = running.finish()
        outstanding = outstanding_warning(run_dir(job_dir))
        monkeypatch.setattr(scheduler, "MIN_POLL_INTERVAL", 0.05)
        with in_this_process():
            status = bagent(["status", "job"])
            done = bagent(RUN, env={"MY_KEY": SECRET})
            results = bagent(["results", "job"])
    if kind == "openai":
        assert "batch_1 in_progress, 20 of 40 rows" in status.out, status.out
        assert "1 with the provider" in status.out
    else:
        assert ended.code == 75, ended.err
        assert "1 batch stays with the provider (40 rows)" in ended.err
        assert outstanding.endswith("will bill them: msgbatch_1")
    assert done.code == 0, done.err
    assert (len(server.made), server.tries) == (1, 1)
    assert server.complaints == []
    rows = finished(job_dir)
    assert [row["status"] for row in rows] == ["ok"] * 40
    assert len({row["id"] for row in rows}) == 40
    assert rows[0]["cost_usd"] == pytest.approx((7 * 0.5 + 3 * 1.0) / 1e6)
    assert status_lines(run_dir(job_dir), print) == ["1 done"]
    assert outstanding_warning(run_dir(job_dir)) == ""
    shows_nothing(job_dir, ended, status, done, results)


class ChatsToo(OpenAIServer):
    """A provider with batches that never end by themselves, and with single calls.

    Attributes:
        singles: the rows of single calls.
        reached: set once there were so many.
    """

    def __init__(self, calls: int) -> None:
        super().__init__(Course(("in_progress",)))
        self.singles: list[str] = []
        self.reached = threading.Event()
        self._calls = calls

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.singles.append(row_of({"body": body}))
        if len(self.singles) == self._calls:
            self.reached.set()
        await asyncio.sleep(0.05)
        return web.json_response(chat_body("single"))


@pytest.mark.process("kills runs")
@pytest.mark.parametrize(
    "calls", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 9, 14, 19))]
)
def test_a_cheapest_run_killed_before_and_after_its_time_does_nothing_twice(
    job_dir: Path, bagent: Bagent, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ChatsToo(calls)
    with in_thread(server) as url:
        job(job_dir, url, 40, batching={"mode": "cheapest", "by": "10h"})
        with Running(RUN, job_dir, {"MY_KEY": SECRET}) as running:
            running.wait_for_err("is in_progress")
            running.send(signal.SIGKILL)
            running.finish()
        limits = {"concurrency": 4}
        job(job_dir, url, 40, batching={"mode": "cheapest", "by": "1s"}, limits=limits)
        with Running(RUN, job_dir, {"MY_KEY": SECRET}) as running:
            assert server.reached.wait(60), running.err
            running.send(signal.SIGKILL)
            running.finish()
        before, ended = len(server.singles), {line["id"] for line in finished(job_dir)}
        monkeypatch.setattr(scheduler, "MIN_POLL_INTERVAL", 0.05)
        with in_this_process():
            done = bagent(RUN, env={"MY_KEY": SECRET})
    assert done.code == 0, done.err
    rows = finished(job_dir)
    assert [row["status"] for row in rows] == ["ok"] * 40
    assert len({row["id"] for row in rows}) == 40
    assert (len(server.made), server.cancels, server.complaints) == (1, 1, [])
    texts = {row["id"]: row["text"] for row in rows}
    assert sorted(texts.values()) == ["fine"] * 20 + ["single"] * 20
    assert ended.isdisjoint(server.singles[before:])
    assert all(texts[name] == "single" for name in server.singles)


def test_a_key_that_a_batch_service_repeats_stands_in_no_file_and_no_word(
    job_dir: Path, bagent: Bagent
) -> None:
    error = {"message": f"Incorrect API key provided: {SECRET}", "code": "invalid_api_key"}
    with in_thread(OpenAIServer(Course(create=(401, error)))) as url:
        job(job_dir, url, 3)
        done = bagent(RUN, env={"MY_KEY": SECRET})
    assert done.code == 76, done.err
    assert "Incorrect API key provided: ***" in done.err
    shows_nothing(job_dir, done)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"backend": "vllm://127.0.0.1:9"}, "have a batch service"),
        ({"backend": "bedrock://us-east-1"}, "s3_uri"),
        ({"backend": "openai", "topology": "self_consistency"}, "several stages"),
        (
            {"backend": "openai", "agent": {"tools": [{"builtin": "web_search"}]}},
            "turns with tools",
        ),
        ({"backend": "openai", "batching": {"mode": "provider", "service_tier": "flex"}}, "tier"),
        (
            {
                "backend": "openai",
                "prompt": {
                    "messages": [{"role": "user", "content": [{"image": "{{ photo }}"}]}],
                    "image_folders": ["s3://bucket/photos/"],
                },
            },
            "images in buckets are sent with live calls only",
        ),
    ],
)
def test_what_cannot_go_in_batches_is_said_before_anything_is_sent(
    job_dir: Path, keys: dict[str, Any], words: str
) -> None:
    path = write_job(job_dir, "x", 2, **{"batching": {"mode": "provider"}, **keys})
    with pytest.raises(JobError, match=words) as caught:
        prepare(RunOptions(job=path, cwd=job_dir, env={"OPENAI_API_KEY": "k"}))
    assert caught.value.at is not None
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("openai", {"service_tier": "flex"}),
        ("compatible", {"service_tier": "flex"}),
        ("bedrock", {"serviceTier": {"type": "flex"}}),
        ("vllm", None),
    ],
)
def test_a_service_tier_is_asked_for_in_the_words_of_each_api(
    job_dir: Path, kind: str, fields: Any
) -> None:
    path = write_job(job_dir, "openai", 2, batching={"service_tier": "flex"})
    job = load_job(JobRequest(path=path, cwd=job_dir, env={}))
    if fields is None:
        with pytest.raises(JobError, match="no tiers"):
            tier_fields(job, kind)
    else:
        assert tier_fields(job, kind) == fields
