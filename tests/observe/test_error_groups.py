from __future__ import annotations

from typing import Any

import pytest

from bagent.observe.error_groups import MAX_GROUPS, MAX_TEXT, ErrorGroups, http_status


def add(groups: ErrorGroups, make: Any, error: str, row: int = 0, **parts: Any) -> None:
    groups.add(make.outcome(row, "failed", **{"error_kind": "timeout", "error": error, **parts}))


SAME = [
    ("127.0.0.1:8123 timed out after 2.01 s", "10.1.2.3:9 timed out after 30 s"),
    ("[fe80::1]:8000 refused", "[::1]:8000 refused"),
    ("http://a:1/v1/chat: no answer", "https://b.example/x: no answer"),
    ("request chatcmpl-9f2ab1c4 failed", "request req_011CQxyz9 failed"),
    ("object 0xdeadbeef lost", "object 0x12 lost"),
    ("'tomorrow' is not a 'date-time'", "\"it's late\" is not a 'date-time'"),
    ("{'name': 'a', 'n': [1]} is not of type 'array'", "{'x': {}} is not of type 'array'"),
    ('at /0: {"error": "a"} is not valid', 'at /7: {"error": "b", "n": null} is not valid'),
    ('"abc" is too long', '"a \\"quoted\\" word" is too long'),
    ("[1, 2, 3] is too long", "[1, 2, 3, 4, 5] is too long"),
    ("12,345 tokens over", "7 tokens over"),
    ("no answer for r12345 came", "no answer for omega came"),
    *(("request 7 failed" + tail, "request 77777 failed" + tail) for tail in ["", " why" * 200]),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_errors_that_differ_in_details_are_one_group(make, one, other):
    groups = ErrorGroups()
    add(groups, make, one, 12345, endpoint=None)
    add(groups, make, other, endpoint=None, id="omega")
    assert [group.count for group in groups.groups()] == [2]


DIFFERENT = [
    ("HTTP 500: broken", "HTTP 503: broken"),
    ("status code: 400, no", "status code: 422, no"),
    ("connection refused", "connection reset"),
    (
        'HTTP 400: {"error": {"message": "unknown model", "code": 400}}',
        'HTTP 400: {"error": {"message": "context too long", "code": 400}}',
    ),
    ("{'error': {'message': 'no quota'}}", "{'error': {'message': 'no such key'}}"),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_errors_of_different_cause_stay_apart(make, one, other):
    groups = ErrorGroups()
    add(groups, make, one)
    add(groups, make, other)
    add(groups, make, one, error_kind="connect")
    add(groups, make, one, error_kind="connect")
    assert [group.count for group in groups.groups()] == [2, 1, 1], "kinds are apart, largest first"


def test_texts_endpoints_and_groups_are_bounded(make):
    groups = ErrorGroups()
    for row in range(500):
        add(groups, make, "x " * 10_000, row, endpoint=f"http://h{row}")
    [group] = groups.groups()
    assert (group.count, group.endpoints) == (500, 100)
    assert len(group.text) == MAX_TEXT >= len(group.pattern)
    for row in range(1000):
        add(groups, make, f"cause {letters(row)}", row)
    kept = groups.groups()
    assert len(groups) == len(kept) == MAX_GROUPS
    assert sum(group.count for group in kept) + groups.other == 1500


STATUSES = {
    "HTTP 503: overloaded": 503,
    "answered with status code: 422": 422,
    "Error code: 400 - {'x': 1}": 400,
    "429 Too Many Requests": 429,
    '{"error":{"code":502,"message":"upstream"}}': 502,
    "no answer within 500 s": None,
    "HTTP 4040": None,
}


@pytest.mark.parametrize("text", STATUSES)
def test_the_http_status_is_found_in_the_text(text):
    assert http_status(text) == STATUSES[text]


def test_a_group_carries_its_first_row_as_example(make):
    groups = ErrorGroups()
    add(groups, make, "HTTP 500: \x1b[2Jx\ny", row=3, source="a.jsonl", line=9)
    add(groups, make, "HTTP 500: \x1b[2Jx\ny", row=4, endpoint="http://127.0.0.1:8001")
    [group] = groups.groups()
    assert (group.count, group.endpoints, group.http_status) == (2, 2, 500)
    assert (group.row, group.id, group.source, group.line) == (3, "r3", "a.jsonl", 9)
    assert group.text == "HTTP 500: \\x1b[2Jx y"
    groups = ErrorGroups()
    groups.add(make.outcome(1, "truncated", finish_reason="length"))
    [group] = groups.groups()
    assert (group.kind, group.text) == ("truncated", "length"), "there is no error text"


def test_a_group_names_its_endpoints_and_failures_on_this_machine_have_none(make):
    groups = ErrorGroups()
    for host in ("alpha", "beta"):
        add(groups, make, f"{host}:8000 can't answer", id="a", endpoint=f"http://{host}:8000")
    for kind in ("tool", "max_turns", "template", "budget", "internal"):
        add(groups, make, f"{kind} failed", error_kind=kind, endpoint="127.0.0.1:8000")
    first, *local = groups.groups()
    assert (first.endpoints, first.endpoint) == (2, "http://alpha:8000")
    assert first.pattern == "<host> can't answer", "a short id and an apostrophe are no detail"
    assert {(group.endpoint, group.endpoints) for group in local} == {(None, 0)}


def letters(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_a_late_outage_is_found_among_many_rare_errors(make):
    groups = ErrorGroups()
    for row in range(250):
        add(groups, make, f"old {letters(row % 50)}", row)
    for row in range(500):
        add(groups, make, f"rare again {letters(row)}", row)
        add(groups, make, "connection refused", row)
    assert groups.groups()[0].pattern == "connection refused"
    assert groups.groups()[0].count == 500
