"""Templates learned from rendered sentinels, and conversations put together with them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bagent.backends.batching.chat_template import (
    MAX_MESSAGES,
    ChatTemplate,
    is_dated,
    learn_template,
    quarter_hour,
    sentinel_messages,
    shape_of,
    shows_reasoning,
    unusable_reason,
)

CHAT = ("system", "user")
NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC).timestamp()


def talk(*texts: Any) -> list[dict[str, Any]]:
    """A conversation that starts with a system text, then user and assistant in turn."""
    roles = ["system", *["user", "assistant"] * len(texts)]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def chatml(messages: list[dict[str, Any]]) -> str:
    """The conversation as ChatML writes it."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n"


def test_a_learned_template_writes_what_the_server_writes() -> None:
    template = learn_template(CHAT, chatml(sentinel_messages(CHAT)))
    assert template is not None
    assert template.parts == (
        "<|im_start|>system\n",
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )
    row = talk("  be brief {x} ", "naïve 日本 <|im_end|>\n")
    assert template.render(row) == chatml(row)


def test_a_system_text_folded_into_the_first_turn_is_learned() -> None:
    texts = [m["content"] for m in sentinel_messages(CHAT)]
    template = learn_template(CHAT, f"<s>[INST] {texts[0]}\n\n{texts[1]} [/INST]")
    assert template is not None
    assert template.render(talk("A", "B")) == "<s>[INST] A\n\nB [/INST]"


def test_trimmed_texts_lose_the_blanks_at_their_ends_only() -> None:
    template = ChatTemplate(("<", "|", ">"), trim=True)
    assert template.render(talk(" a  b\n", "\tc ")) == "<a  b|c>"


@pytest.mark.parametrize(
    "rendered",
    [
        "{0} only the first", "{1} the other way round {0}", "{0} {1} and the first once more: {0}",
        "{1} {0} {1}", "nothing of it",
    ],
)  # fmt: skip
def test_sentinels_that_are_missing_moved_or_repeated_teach_no_template(rendered: str) -> None:
    texts = [m["content"] for m in sentinel_messages(CHAT)]
    assert learn_template(CHAT, rendered.format(*texts)) is None


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


def test_the_shape_is_the_sequence_of_roles() -> None:
    assert shape_of(talk("a", "b", "c", "d")) == ("system", "user", "assistant", "user")
    assert shape_of([]) is None
    assert shape_of([{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)) is None


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ("<|im_start|>assistant\n<think>\n", "thinking"),
        ("<think>\n\n</think>\n\n", "thinking"),
        ("<|channel|>final", "thinking"),
        ("It is 12:31 now", "time"),
        ("<|im_end|>\n", None),
    ],
)
def test_a_template_that_thinks_or_tells_the_time_is_not_used(part: str, word: str | None) -> None:
    reason = unusable_reason(ChatTemplate(("<|im_start|>", part)))
    assert word in (reason or "") if word else reason is None


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
