"""What boto3 raises, as failures."""

from __future__ import annotations

import pytest
from botocore import exceptions as aws
from botocore.eventstream import ChecksumMismatch
from urllib3.exceptions import ProtocolError

from bagent.backends.bedrock_failures import failure_of


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
    found = failure_of(error, "bedrock/us-east-1")
    assert found is not None
    assert (found.kind, found.passing, found.busy) == (kind, passing, busy)
    assert found.retry_after is None


def test_a_fault_of_our_own_is_no_failure_of_the_server() -> None:
    assert failure_of(KeyError("x"), "here") is None


def test_missing_credentials_come_with_what_to_do() -> None:
    found = failure_of(aws.NoCredentialsError(), "here")
    assert found is not None
    assert "AWS_PROFILE" in found.message


def test_a_time_that_a_gateway_names_is_kept() -> None:
    told = {"HTTPStatusCode": 429, "HTTPHeaders": {"retry-after": "7"}}
    answer = {"Error": {"Code": "ThrottlingException", "Message": ""}, "ResponseMetadata": told}
    found = failure_of(aws.ClientError(answer, "Converse"), "here")
    assert found is not None
    assert (found.kind, found.retry_after) == ("rate_limited", 7.0)
