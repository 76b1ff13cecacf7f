"""Bedrock: what boto3 raises, streams, and threads for its blocking calls."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from botocore import exceptions as aws
from botocore.eventstream import ChecksumMismatch
from urllib3.exceptions import ProtocolError

from bagent.backends.bedrock.backend import WorkerThreads, failure_from_exception
from bagent.backends.bedrock.wire import BedrockStream
from bagent.types import Failure, Reply


def refused(code: str, status: int | None, message: str = "words") -> BaseException:
    answer: dict[str, object] = {"Error": {"Code": code, "Message": message}}
    if status is not None:
        answer["ResponseMetadata"] = {"HTTPStatusCode": status}
    error: BaseException = aws.ClientError(answer, "Converse")
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (refused("ThrottlingException", 429), "rate_limited"),
        (refused("ModelNotReadyException", 429), "rate_limited"),
        (refused("throttlingException", None), "rate_limited"),
        (refused("RequestLimitExceeded", 503), "rate_limited"),
        (refused("ProvisionedThroughputExceededException", 400), "rate_limited"),
        (refused("ServiceQuotaExceededException", 400), "rate_limited"),
        (refused("ThrottlingException", 429, "Too many tokens per day"), "budget"),
        (refused("ModelTimeoutException", 408), "timeout"),
        (refused("InternalServerException", 500), "overloaded"),
        (refused("ServiceUnavailableException", 503), "busy"),
        (refused("ModelErrorException", 424), "overloaded"),
        (refused("modelStreamErrorException", None), "overloaded"),
        (refused("ValidationException", 400), "rejected"),
        (refused("ExpiredTokenException", 403), "auth"),
        (refused("ResourceNotFoundException", 404), "rejected"),
        (refused("SomethingNewException", 502), "overloaded"),
        (aws.NoCredentialsError(), "auth"),
        (aws.NoRegionError(), "rejected"),
        (aws.ParamValidationError(report="bad"), "rejected"),
        (aws.EndpointConnectionError(endpoint_url="u"), "connect"),
        (aws.ReadTimeoutError(endpoint_url="u"), "timeout"),
        (ChecksumMismatch(1, 2), "bad_response"),
        (ProtocolError("cut"), "bad_response"),
    ],
    ids=lambda value: str(value) if isinstance(value, BaseException) else None,
)
def test_errors_have_the_kinds_of_other_providers(error: BaseException, kind: str) -> None:
    found = failure_from_exception(error, "bedrock/us-east-1")
    assert found.kind == kind.replace("busy", "overloaded")
    assert found.passing == (kind not in ("budget", "rejected", "auth"))
    assert found.busy == (kind in ("rate_limited", "busy"))
    assert found.retry_after is None


def test_a_fault_of_our_own_is_no_failure_of_the_server() -> None:
    assert failure_from_exception(KeyError("x"), "here") is None


def test_missing_credentials_come_with_what_to_do() -> None:
    found = failure_from_exception(aws.NoCredentialsError(), "here")
    assert "AWS_PROFILE" in found.message


STOP: dict[str, Any] = {"messageStop": {"stopReason": "tool_use"}}
USED = {"toolUse": {"toolUseId": "a", "name": "f"}}


def start(index: int, block: Any) -> Any:
    return {"contentBlockStart": {"contentBlockIndex": index, "start": block}}


def delta(index: int, piece: Any) -> Any:
    return {"contentBlockDelta": {"contentBlockIndex": index, "delta": piece}}


def read(*events: Any) -> Reply | Failure:
    found = BedrockStream(0.0, lambda: 1.0, "m-1")
    for event in events:
        found.take(event)
    return found.result()


@pytest.mark.parametrize(
    ("pieces", "last", "arguments"),
    [
        (['{"n"', ":1}"], [], '{"n":1}'),
        (['{"n"', ":1}"], [{"contentBlockStop": {"contentBlockIndex": 0}}], '{"n":1}'),
        (['{"n":'], [], '{"n":'),
    ],
    ids=["block without an end", "block with an end", "cut arguments stay visible"],
)
def test_a_call_has_its_arguments(pieces: list[str], last: list[Any], arguments: str) -> None:
    deltas = [delta(0, {"toolUse": {"input": piece}}) for piece in pieces]
    found = read(start(0, USED), *deltas, *last, STOP)
    assert [call.arguments for call in found.tool_calls] == [arguments]


@pytest.mark.parametrize(
    "events",
    [
        [],
        [delta(0, {"text": "a"}), {"contentBlockStop": {"contentBlockIndex": 0}}],
        [delta(0, {"text": "a"}), {"metadata": {"usage": {"inputTokens": 1}}}],
        [{"somethingNew": {}}],
    ],
)
def test_a_stream_without_a_stop_reason_is_no_answer(events: list[Any]) -> None:
    found = read(*events)
    assert (found.kind, found.passing) == ("bad_response", True)


def test_no_more_threads_than_allowed_and_all_calls_end() -> None:
    inside: set[str] = set()

    def call() -> str:
        inside.add(threading.current_thread().name)
        return "done"

    async def main() -> list[str]:
        threads = WorkerThreads(3, "t")
        found = await asyncio.gather(*(threads.run(call) for _ in range(50)))
        assert threads.count <= 3
        threads.close()
        return list(found)

    assert asyncio.run(main()) == ["done"] * 50
    assert len(inside) <= 3


async def test_a_call_cancelled_before_it_began_never_begins() -> None:
    gate = threading.Event()
    ran: list[int] = []

    threads = WorkerThreads(1, "t")
    first = asyncio.create_task(threads.run(lambda: gate.wait(10)))
    await asyncio.sleep(0)
    second = asyncio.create_task(threads.run(lambda: ran.append(2)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    assert await first
    await threads.run(lambda: ran.append(3))
    threads.close()
    assert ran == [3]
