"""``x-should-retry``: servers that tell whether trying again makes sense."""

from __future__ import annotations

import pytest

from bagent.backends.failures import from_status


@pytest.mark.parametrize(
    ("status", "advice", "passing"),
    [(429, "false", False), (500, "false", False), (400, "true", True), (422, "true", True)],
)
def test_the_servers_advice_goes_before_the_status(status: int, advice: str, passing: bool) -> None:
    found = from_status(status, '{"error":{"message":"words"}}', {"x-should-retry": advice})
    assert found.passing is passing
    assert from_status(status, '{"error":{"message":"words"}}', {}).passing is not passing


def test_no_advice_makes_a_wrong_key_right() -> None:
    assert not from_status(401, "", {"x-should-retry": "true"}).passing
    spent = from_status(429, '{"error":{"code":"insufficient_quota"}}', {"x-should-retry": "true"})
    assert (spent.kind, spent.passing) == ("budget", False)
