"""Templates learned from rendered sentinels, and conversations put together with them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bagent.backends.batching.chat_template import (
    ChatTemplate,
    is_dated,
    quarter_hour,
    shape_of,
    shows_reasoning,
)

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC).timestamp()


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


@pytest.mark.parametrize(
    ("text", "dated"),
    [
        ("Today Date: 28 Nov 2026", True),
        ("Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024", False),
        ("no date", False),
    ],
)
def test_a_template_with_the_running_year_is_dated(text: str, dated: bool) -> None:
    assert is_dated(ChatTemplate((text, "")), NOW) is dated


def test_the_year_of_any_time_zone_counts() -> None:
    eve = datetime(2026, 12, 31, 20, 0, tzinfo=UTC).timestamp()
    assert is_dated(ChatTemplate(("1 Jan 2027", "")), eve)


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
