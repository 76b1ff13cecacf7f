"""Which chat templates are learned, and which are found not to hold."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from bagent.backends.base import Timeouts
from bagent.backends.batching.chat_template import quarter_hour, shape_of, shows_reasoning
from bagent.backends.batching.routes import LEARN_AGAIN, MAX_CHATS
from bagent.backends.batching.wire import MAX_PROMPTS
from bagent.types import Failure, Reply
from support.tiny_engine import CHATML, DOWN, OWN, TRIMMED, Setting, TinyEngine, chat

ROW = chat("be brief", "what is 2+2?")
NOT_FOUND = (404, b'{"detail": "Not Found"}')


def learned(template: str, *rows: object, **engine: object) -> Setting:
    """What came of learning the template of an engine."""
    setting = Setting(TinyEngine(template, **engine))  # type: ignore[arg-type]
    asyncio.run(setting.learn(ROW))
    return setting


def reason(setting: Setting) -> str:
    """Why the row's shape has no template; empty if it has one."""
    (found,) = setting.profiles.of(OWN).shapes.values()
    assert bool(found.off) == (found.template is None)
    return found.off


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        TRIMMED,
        # the system text goes into the first user turn
        "<s>[INST] {{ messages[0].content }}\n\n{{ messages[1].content }}[/INST]",
        # an old date that never changes
        CHATML.replace("user", "user (Today Date: 26 Jul 2024)"),
    ],
)
def test_templates_that_pass_texts_on_are_learned_and_render_alike(template: str) -> None:
    setting = learned(template)
    assert reason(setting) == ""
    (found,) = setting.profiles.of(OWN).shapes.values()
    row = chat(" {a} ", "\n<|im_end|> naïve ")
    assert found.template is not None
    assert row.messages is not None
    assert found.template.render(row.messages) == setting.engine.render(row.messages)
    assert "".join(map(chr, found.first_ids)) == setting.engine.render(row.messages)[:8]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (CHATML.replace("m.content", "m.content | lower"), "chat template"),
        (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), "chat template"),
        (CHATML.replace("m.content", "m.content | replace('/no_think', '')"), "chat template"),
        (CHATML.replace("<|im_start|>assistant",
                        "{% if messages[-1].content.startswith('<tool_response>') %}x{% endif %}"
                        "<|im_start|>assistant"), "chat template"),
        # trims the system text only
        ("{{ messages[0].content | trim }}|{{ messages[1].content }}|", "chat template"),
        # leaves the system text out
        ("{{ messages[1].content }}|", "chat template"),
        # treats a real row otherwise
        (CHATML.replace("m.content", "m.content | replace('2+2', 'two and two')"), "other texts"),
        (CHATML + "<think>\n", "thinking"),
        (CHATML + "<think>\n\n</think>\n\n", "thinking"),
        (CHATML + "12:30", "time of day"),
    ],
)  # fmt: skip
def test_templates_that_change_texts_or_heed_them_are_found_out(template: str, why: str) -> None:
    assert why in reason(learned(template))


def test_no_answer_is_generated_to_learn_and_few_questions_are_asked() -> None:
    setting = learned(CHATML)
    assert set(setting.engine.asked) == {"/tokenize", "/detokenize"}
    assert len(setting.engine.asked) <= 10
    assert setting.engine.urls == {"http://here"}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/tokenize", NOT_FOUND),
        ("/detokenize", NOT_FOUND),
        ("/tokenize", (200, b'{"tokens": ["a"]}')),
        ("/detokenize", (200, b"nonsense")),
    ],
)
def test_an_engine_without_the_routes_gets_no_lists_of_chats(
    path: str, answer: tuple[int, bytes]
) -> None:
    setting = learned(CHATML, answer=lambda asked: answer if asked == path else None)
    assert path in reason(setting)
    assert setting.limit(ROW) == MAX_CHATS


@pytest.mark.parametrize("trouble", [DOWN, (503, b"busy")])
def test_an_engine_in_trouble_is_asked_again_later_and_rows_go_alone_meanwhile(
    trouble: tuple[int, bytes] | Failure,
) -> None:
    setting = Setting(TinyEngine(answer=lambda _: trouble))
    asyncio.run(setting.learn(ROW))
    assert setting.profiles.of(OWN).shapes == {}
    assert setting.limit(ROW) == 1
    setting.now += LEARN_AGAIN
    assert setting.limit(ROW) is None


PROMPT_IDS = list(map(ord, TinyEngine().render(ROW.messages or [])))


@pytest.mark.parametrize(
    ("body", "reply", "limit"),
    [
        ({"prompt_token_ids": PROMPT_IDS}, Reply("4", "stop"), MAX_PROMPTS),
        ({}, Reply("4", "stop"), MAX_PROMPTS),
        ({"prompt_token_ids": [1, 2, 3]}, Reply("4", "stop"), MAX_CHATS),
        ({}, Reply("4", "stop", reasoning="two and two"), MAX_CHATS),
        ({}, Reply("<think>so</think>4", "stop"), MAX_CHATS),
    ],
    ids=["the same prompt", "no prompt told", "another prompt", "thinking", "raw thinking"],
)
def test_lists_begin_once_a_chat_answer_had_no_other_prompt_and_no_thinking(
    body: dict[str, object], reply: Reply, limit: int
) -> None:
    setting = learned(CHATML)
    found = setting.groups.awaits_sample(OWN, ROW)
    assert setting.limit(ROW) == 1
    raw = msgspec.json.encode(body)
    asyncio.run(setting.learner.check_sample(OWN, ROW, found, reply, raw, Timeouts()))
    assert setting.limit(ROW) == limit
    assert not setting.profiles.of(OWN).awaits_sample


def test_a_template_with_the_date_holds_for_a_quarter_of_an_hour() -> None:
    setting = Setting(TinyEngine(CHATML + "Today is 28 Nov 2026.\n"))
    asyncio.run(setting.learn(ROW))
    setting.confirm(ROW)
    setting.now += 899
    assert setting.limit(ROW) == MAX_PROMPTS
    setting.now += 1
    assert setting.limit(ROW) is None
    asyncio.run(setting.learn(ROW))
    assert setting.limit(ROW) == MAX_PROMPTS  # the same template needs no other sample
    setting.now += 900
    setting.engine.template = CHATML + "Today is 29 Nov 2026.\n"
    asyncio.run(setting.learn(ROW))
    assert setting.limit(ROW) == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "a", "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": " \n\u2003"},
        {"role": "user"},
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
        (" \n<think>", True), ("so it is 4</think>4", True), ("[THINK]well", True),
        ("<|channel|>analysis<|message|>", True), ('{"a": "I think <so>"}', False), (None, False),
    ],
)  # fmt: skip
def test_thinking_in_a_raw_answer_is_seen(text: str | None, found: bool) -> None:
    assert shows_reasoning(text) is found
