"""What boto3 raises, as failures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore import exceptions as aws
from botocore.eventstream import ChecksumMismatch
from urllib3.exceptions import ProtocolError

from bagent.backends.bedrock.backend import failure_from_exception
from bagent.backends.bedrock.wire import BedrockStream
from bagent.types import Failure, Reply


def refused(code: str, status: int | None, message: str = "words") -> BaseException:
    answer: dict[str, object] = {"Error": {"Code": code, "Message": message}}
    if status is not None:
        answer["ResponseMetadata"] = {"HTTPStatusCode": status}
    error: BaseException = aws.ClientError(answer, "Converse")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "passing", "busy"),
    [
        (refused("ThrottlingException", 429), "rate_limited", True, True),
        (refused("ModelNotReadyException", 429), "rate_limited", True, True),
        (refused("throttlingException", None), "rate_limited", True, True),
        (refused("Throttling", 400), "rate_limited", True, True),
        (refused("TooManyRequestsException", 429), "rate_limited", True, True),
        (refused("RequestLimitExceeded", 503), "rate_limited", True, True),
        (refused("ProvisionedThroughputExceededException", 400), "rate_limited", True, True),
        (refused("ServiceQuotaExceededException", 400), "rate_limited", True, True),
        (refused("ThrottlingException", 429, "Too many tokens per day"), "budget", False, False),
        (refused("ModelTimeoutException", 408), "timeout", True, False),
        (refused("InternalServerException", 500), "overloaded", True, False),
        (refused("ServiceUnavailableException", 503), "overloaded", True, True),
        (refused("ModelErrorException", 424), "overloaded", True, False),
        (refused("modelStreamErrorException", None), "overloaded", True, False),
        (refused("ValidationException", 400), "rejected", False, False),
        (refused("AccessDeniedException", 403), "auth", False, False),
        (refused("ExpiredTokenException", 403), "auth", False, False),
        (refused("ResourceNotFoundException", 404), "rejected", False, False),
        (refused("SomethingNewException", 502), "overloaded", True, False),
        (aws.NoCredentialsError(), "auth", False, False),
        (aws.NoRegionError(), "rejected", False, False),
        (aws.ParamValidationError(report="bad"), "rejected", False, False),
        (aws.EndpointConnectionError(endpoint_url="u"), "connect", True, False),
        (aws.ReadTimeoutError(endpoint_url="u"), "timeout", True, False),
        (ChecksumMismatch(1, 2), "bad_response", True, False),
        (ProtocolError("cut"), "bad_response", True, False),
    ],
    ids=lambda value: str(value) if isinstance(value, BaseException) else None,
)
def test_errors_have_the_kinds_of_other_providers(
    error: BaseException, kind: str, passing: bool, busy: bool
) -> None:
    found = failure_from_exception(error, "bedrock/us-east-1")
    assert found is not None
    assert (found.kind, found.passing, found.busy) == (kind, passing, busy)
    assert found.retry_after is None


def test_a_fault_of_our_own_is_no_failure_of_the_server() -> None:
    assert failure_from_exception(KeyError("x"), "here") is None


def test_missing_credentials_come_with_what_to_do() -> None:
    found = failure_from_exception(aws.NoCredentialsError(), "here")
    assert found is not None
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


@pytest.mark.parametrize("last", [[], [{"contentBlockStop": {"contentBlockIndex": 0}}]])
def test_a_call_has_its_arguments_whether_its_block_is_told_to_end_or_not(last: list[Any]) -> None:
    pieces = [delta(0, {"toolUse": {"input": piece}}) for piece in ('{"n"', ":1}")]
    found = read(start(0, USED), *pieces, *last, STOP)
    assert isinstance(found, Reply)
    assert [json.loads(call.arguments) for call in found.tool_calls] == [{"n": 1}]


def test_arguments_that_are_cut_stay_visible() -> None:
    found = read(start(0, USED), delta(0, {"toolUse": {"input": '{"n":'}}), STOP)
    assert isinstance(found, Reply)
    assert [call.arguments for call in found.tool_calls] == ['{"n":']


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"messageStart": {"role": "assistant"}}],
        [delta(0, {"text": "a"})],
        [delta(0, {"text": "a"}), {"contentBlockStop": {"contentBlockIndex": 0}}],
        [delta(0, {"text": "a"}), {"metadata": {"usage": {"inputTokens": 1}}}],
        [{"somethingNew": {}}],
    ],
)
def test_a_stream_without_a_stop_reason_is_no_answer(events: list[Any]) -> None:
    found = read(*events)
    assert isinstance(found, Failure)
    assert (found.kind, found.passing) == ("bad_response", True)
