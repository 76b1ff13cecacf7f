"""Rows through Bedrock's batch jobs, with real boto3 against a scripted AWS."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagent.backends.bedrock.backend import BedrockConfig
from bagent.backends.endpoint import Endpoint
from bagent.batches.bedrock import BedrockBatches, S3Location, read_job
from bagent.errors import NeedsPerson
from bagent.money.prices import Price
from support.aws_batches import ROLE, AwsServer, Job
from support.batch_runs import BEGIN, Killed, Options, Run, assert_ok, row, run_rows, served


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-secret",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_BEARER_TOKEN_BEDROCK", raising=False)


@functools.cache
def one_session() -> Any:
    """One for all tests: it reads the models of services only once."""
    import boto3

    return boto3.session.Session()


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """``go(server, count, options)``: one start of a run in ``tmp_path``."""

    async def main(server: AwsServer, count: int, options: Options | None) -> Run:
        async with served(server) as url:
            for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_BEDROCK"):
                monkeypatch.setenv(name, url)
            service = BedrockBatches(
                Endpoint("bedrock/us-east-1", "https://bedrock"),
                BedrockConfig(4, region="us-east-1"),
                S3Location("s3://my-bucket/some/folder/", ROLE),
                enforce="auto",
                notice=lambda words: None,
                session=one_session(),
            )
            return await run_rows(tmp_path, url, [row(n) for n in range(count)], options, service)

    return lambda server, count, options=None: asyncio.run(main(server, count, options))


def test_rows_go_through_s3_and_come_back(tmp_path: Path, go: Callable[..., Run]) -> None:
    server = AwsServer()
    run = go(server, 120)
    assert_ok(run, 120)
    assert server.complaints == []
    assert run.outcomes["r7"]["text"] == "answer 7"
    assert run.outcomes["r7"]["prompt_tokens"] == 9
    assert "my-bucket/some/folder/b0-all-1.jsonl" in server.objects
    (job,) = server.made
    assert job["modelId"] == "m-1"
    assert job["outputDataConfig"]["s3OutputDataConfig"]["s3Uri"].endswith("/b0-all-1/")
    assert job["lines"][0]["modelInput"]["inferenceConfig"] == {"maxTokens": 64, "temperature": 0}
    assert "secret" not in json.dumps(run.notices)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"wJalrXUtnFEMI" not in path.read_bytes()


def test_few_rows_that_a_job_left_out_are_asked_singly(go: Callable[..., Run]) -> None:
    server = AwsServer(Job(("InProgress", "Stopping", "Stopped"), answers=117, errors=(3,)))
    run = go(server, 120)
    assert run.error is None
    assert len(server.made) == 1
    texts = {name: line.get("text") for name, line in run.outcomes.items()}
    assert [texts[f"r{n}"] for n in (117, 118, 119)] == ["single"] * 3
    assert run.outcomes["r117"]["attempts"] == 2
    assert (run.outcomes["r3"]["status"], run.outcomes["r3"]["error_kind"]) == (
        "failed",
        "rejected",
    )
    assert len(run.lines) == 120


def test_a_late_job_is_stopped_and_records_without_an_answer_are_sent_singly(
    go: Callable[..., Run],
) -> None:
    server = AwsServer(Job(("InProgress",)))
    run = go(server, 120, Options(late_at=BEGIN + 3600))
    assert_ok(run, 120)
    texts = {name: line.get("text") for name, line in run.outcomes.items()}
    assert [name for name, text in texts.items() if text == "single"] == [
        f"r{n}" for n in range(60, 120)
    ]
    assert (server.cancels, len(server.made), server.complaints) == (1, 1, [])


def test_single_calls_keep_within_the_budget_too(go: Callable[..., Run]) -> None:
    price = Price("bedrock", "m-1", 1000.0, 2000.0)
    poor = Options(single_price=price, budget=0.5)
    run = go(AwsServer(), 5, poor)
    assert isinstance(run.error, NeedsPerson)
    assert run.lines == []
    run = go(AwsServer(), 5, Options(single_price=price, budget=9.0))
    assert run.error is None
    assert [line["cost_usd"] for line in run.lines] == [0.009] * 5


@pytest.mark.parametrize(
    "job",
    [
        Job(("Validating", "Failed"), message="not authorized to pass role"),
        Job(refuse=(403, "AccessDeniedException", "not authorized to pass role")),
    ],
)
def test_a_job_that_fails_or_is_refused_waits_for_a_person(
    go: Callable[..., Run], job: Job
) -> None:
    run = go(AwsServer(job), 100)
    assert isinstance(run.error, NeedsPerson)
    assert "pass role" in str(run.error)


def test_a_full_account_is_waited_for(go: Callable[..., Run]) -> None:
    words = "The number of batch inference jobs exceeds the quota of jobs in progress"
    full = Job(refuse=(400, "ServiceQuotaExceededException", words))
    throttled = Job(refuse=(429, "ThrottlingException", "Rate exceeded"))
    server = AwsServer(full, throttled, Job(("Completed",)))
    run = go(server, 100)
    assert_ok(run, 100)
    assert run.waited >= 60


def test_a_job_is_never_made_twice(go: Callable[..., Run]) -> None:
    server = AwsServer(Job(("Completed",)))
    killed: Any = go(server, 100, Options(kill_save=(4, "before")))
    assert isinstance(killed.error, Killed)
    run = go(server, 100)
    assert_ok(run, 100)
    assert (len(server.made), server.tries) == (1, 1)


@pytest.mark.parametrize(
    ("word", "over"),
    [("Submitted", False), ("Validating", False), ("Scheduled", False), ("InProgress", False),
     ("Stopping", False), ("Completed", True), ("PartiallyCompleted", True), ("Stopped", True),
     ("Expired", True), ("Failed", True)],
)  # fmt: skip
def test_every_word_for_a_job_is_known(word: str, over: bool) -> None:
    look = read_job({"status": word, "processedRecordCount": 5, "errorRecordCount": 1})
    assert (look.over, look.ended, look.failed) == (over, 5, 1)
    assert bool(look.faults) is (word == "Failed")
