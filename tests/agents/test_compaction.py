"""Cutting a long conversation: whatever it is made of, no message goes and no pair is broken."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from bagent.agents.compaction import SHORT, cut_answers, with_summary
from bagent.backends.request import encode_payload
from support.agent_jobs import check_pairs

Message = dict[str, Any]
PROMPT: list[Message] = [
    {"role": "system", "content": "You count."},
    {"role": "user", "content": "How many? " * 50},
]


def turn(number: int, *answers: Any) -> list[Message]:
    """A turn with a call for each answer."""
    names = [f"c{number}_{place}" for place in range(len(answers))]
    function = {"name": "count", "arguments": "{}"}
    asks = [{"id": name, "type": "function", "function": function} for name in names]
    told = [
        {"role": "tool", "tool_call_id": name, "content": text}
        for name, text in zip(names, answers, strict=True)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": asks}, *told]


def size(messages: list[Message]) -> int:
    return len(encode_payload(messages))


def talk(random: Random) -> list[Message]:
    """A prompt and some turns, with answers of every length and sort."""
    sorts = ["", "kurz", "x" * SHORT, "x" * (SHORT + 1), "ß🙂" * 3000, "line\n" * 2000, None]
    sorts.append([{"type": "text", "text": "part " * 500}])
    messages = list(PROMPT)
    for number in range(random.randrange(7)):
        messages += turn(number, *random.choices(sorts, k=random.randrange(1, 4)))
    return messages


@pytest.mark.parametrize("seed", range(12))
def test_any_conversation_keeps_its_messages_pairs_and_prompt(seed: int) -> None:
    random = Random(seed)
    messages = talk(random)
    before = json.dumps(messages)
    goal = random.choice([0, 1, size(messages) // 2, size(messages), 10**9])
    shorter, count = cut_answers(messages, len(PROMPT), goal)
    check_pairs({"messages": shorter})
    assert json.dumps(messages) == before  # the old list is kept by who gave it
    assert shorter[: len(PROMPT)] == PROMPT
    for old, new in zip(messages, shorter, strict=True):
        assert {**old, "content": None} == {**new, "content": None}
        assert old == new or len(new["content"]) < len(old["content"])
    changed = sum(old != new for old, new in zip(messages, shorter, strict=True))
    assert changed == count
    assert size(shorter) <= size(messages)
    if size(messages) <= goal:
        assert count == 0


def test_the_oldest_answers_are_cut_first_and_the_last_turns_only_if_needed() -> None:
    messages = [*PROMPT, *turn(0, "a" * 4000), *turn(1, "b" * 4000), *turn(2, "c" * 4000)]
    all_of_it = size(messages)
    once, count = cut_answers(messages, len(PROMPT), all_of_it - 1)
    assert count == 1
    assert [len(m["content"]) <= SHORT for m in once if m["role"] == "tool"] == [True, False, False]
    deep, count = cut_answers(messages, len(PROMPT), 3000)
    assert count == 3 and size(deep) <= 3300
    left = [len(m["content"]) for m in deep if m["role"] == "tool"]
    assert left[0] <= SHORT and left[1] == left[2] > SHORT


def test_a_summary_stands_at_the_end_of_the_prompt() -> None:
    text = "Summary of the work so far, in place of the turns themselves:\nTwo."
    for content, whole in (("Count.", f"Count.\n\n{text}"), ("", text), (None, text)):
        prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": content}]
        assert with_summary(prompt, "Two.") == [prompt[0], {"role": "user", "content": whole}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Count."}]}]
    (message,) = with_summary(parts, "Two.")
    first, last = message["content"]
    assert first["text"] == "Count." and last["text"].endswith("Two.")
