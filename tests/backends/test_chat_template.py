"""Templates learned from rendered sentinels, and conversations put together with them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bagent.backends.batching.chat_template import (
    quarter_hour,
    shape_of,
    shows_reasoning,
)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "a", "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "a"},
        {"role": "user", "content": ""},
        {"role": "user", "content": " \n\u2003"},
        {"role": "user"},
        {"content": "a", "name": "b"},
    ],
)
def test_anything_but_plain_visible_texts_of_known_roles_has_no_shape(
    message: dict[str, Any],
) -> None:
    assert shape_of([{"role": "system", "content": "s"}, message]) is None


def test_midnight_of_every_time_zone_begins_a_quarter() -> None:
    nepal = datetime(2026, 11, 28, 18, 15, tzinfo=UTC).timestamp()  # 00:00 at UTC+05:45
    assert quarter_hour(nepal - 1) + 1 == quarter_hour(nepal) == quarter_hour(nepal + 899)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>\nwell", True), (" \n<think>", True), ("so it is 4</think>4", True),
        ("<|channel|>analysis<|message|>", True), ("[THINK]well", True), ("4", False),
        ('{"a": "I think <so>"}', False), ("", False), (None, False),
    ],
)  # fmt: skip
def test_thinking_in_a_raw_answer_is_seen(text: str | None, found: bool) -> None:
    assert shows_reasoning(text) is found
