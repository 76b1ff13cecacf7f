"""What is said of endpoints that are not ready."""

from __future__ import annotations

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import failure_from_status
from bagent.fleet.health_check import (
    HealthResult,
    State,
    format_counts,
    group_failures,
    not_ready,
    state_of,
)
from bagent.types import Failure


@pytest.mark.parametrize(
    ("failure", "state"),
    [
        (Failure("connect", "refused", True), "dead"),
        (Failure("connect", "certificate not trusted"), "broken"),
        (Failure("timeout", "nothing came", True), "silent"),
        (Failure("overloaded", "out of file handles", True, busy=True), "unasked"),
        (Failure("bad_response", "no HTTP", True), "broken"),
        (
            failure_from_status(503, '{"error":{"code":503,"message":"Loading model"}}', {}),
            "loading",
        ),
        (failure_from_status(503, "", {}), "loading"),
        (
            failure_from_status(503, '{"error":{"message":"The request queue is full."}}', {}),
            "busy",
        ),
        (failure_from_status(529, "", {}), "busy"),
        (failure_from_status(429, "", {}), "busy"),
        (failure_from_status(500, "", {}), "broken"),
        (failure_from_status(504, "", {}), "silent"),
        (failure_from_status(401, "", {}), "refuses"),
        (failure_from_status(404, "", {}), "refuses"),
    ],
)
def test_the_state_says_what_a_person_would_do_about_it(failure: Failure, state: State) -> None:
    assert state_of(failure) == state


def endpoint(name: str) -> Endpoint:
    return Endpoint(name, f"http://{name}/v1")


def failed(name: str, kind: State, words: str) -> HealthResult:
    return HealthResult(endpoint(name), kind, words)


def test_equal_reasons_are_one_group_whatever_the_names_and_numbers() -> None:
    called = [
        HealthResult(endpoint("a:1"), "ready"),
        failed("b:1", "silent", "no answer from b:1 within 9.99 s"),
        failed("c:2", "dead", "cannot connect to c:2: Connection refused"),
        failed("d:2", "dead", "cannot connect to d:2: Connection refused"),
        failed("e:1", "silent", "no answer from e:1 within 10 s"),
        failed("f:2", "dead", "cannot connect to f:2: Connection refused"),
        failed("g:3", "refuses", "HTTP 401: no key"),
    ]
    assert [group.message() for group in group_failures(called)] == [
        "3 dead, such as: cannot connect to c:2: Connection refused",
        "2 silent, such as: no answer from b:1 within 9.99 s",
        "1 refuses: g:3: HTTP 401: no key",
    ]


def test_counts_name_only_what_there_is() -> None:
    one = not_ready(endpoint("a:1"), Failure("connect", "refused", True))
    assert format_counts([one, None, HealthResult(endpoint("b:1"), "ready"), None]) == (
        "1 of 4 ready, 1 dead, 2 no answer yet"
    )
    assert format_counts([HealthResult(endpoint("b:1"), "ready")]) == "1 of 1 ready"
