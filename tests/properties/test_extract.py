"""The JSON value of an answer, whatever stands around it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from bagent.answers.extract import decode_lenient, decode_strict, extract_json, why_not_json
from bagent.answers.reasoning import split_reasoning
from support.strategies import ODD_TEXT, json_objects, json_values, texts_of

CONTAINERS = json_objects() | st.lists(json_values(), max_size=4)
INDENTS = st.sampled_from([None, 0, 2])
PROSE = st.text(st.characters(codec="utf-8", exclude_characters='{}[]<>`~◁▷"'), max_size=20)
"""Text without anything that an answer is scanned for."""

FENCE = "```"
PARTS = texts_of(
    *'{}[]",:\\ \n', FENCE, "```json\n", "~~~", "<think>", "</think>", "<thinking>",
    "[THINK]", "[/THINK]", "◁think▷", "<|channel|>analysis<|message|>", "<|end|>",
    "<|channel|>final<|message|>", '{"a": 1}', '"a"', "1", "null", "\ufeff", "\ud800",
    "9" * 30, "1e400", "NaN", "'", ",}", odd=ODD_TEXT,
)  # fmt: skip


@given(json_values(), INDENTS, st.booleans(), st.sampled_from(["", "\n", " \t\r\n"]))
def test_an_answer_that_is_json_is_its_value(value, indent, ascii_only, blanks):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    extracted = extract_json(blanks + text + blanks)
    assert extracted is not None
    assert (extracted.value, extracted.how) == (value, "plain")
    assert json.loads(extracted.raw) == value
    assert b"\n" not in extracted.raw


@given(PROSE, CONTAINERS, INDENTS, PROSE)
def test_a_value_among_prose_is_found(before, value, indent, after):
    extracted = extract_json(before + json.dumps(value, indent=indent) + after)
    assert extracted is not None
    assert extracted.value == value


@given(PROSE, CONTAINERS, st.sampled_from(["", "json", "JSON", "json5", "jsonl"]), PROSE)
def test_a_value_in_a_fence_wins(before, value, tag, after):
    text = f"{before} {{}} {FENCE}{tag}\n{json.dumps(value)}\n{FENCE}{after}"
    extracted = extract_json(text)
    assert extracted is not None
    assert (extracted.value, extracted.how) == (value, "fence")


@given(PARTS, CONTAINERS, st.sampled_from([("<think>", "</think>"), ("[THINK]", "[/THINK]")]))
def test_what_a_model_thinks_is_not_its_answer(thought, value, marks):
    opening, closing = marks
    if closing in thought:
        return
    extracted = extract_json(f"{opening}{thought}{closing}{json.dumps(value)}")
    assert extracted is not None
    assert extracted.value == value


BEFORE = st.sampled_from(["", "\ufeff", "Sure, here is 1 answer: ", "```json\n", "Look:\n```\n",
                         "<think>[1] { } maybe</think>\n", "left [ over\n</think>\n"])  # fmt: skip


@given(BEFORE, CONTAINERS.filter(bool), INDENTS, st.integers(1, 1 << 16))
def test_an_answer_that_breaks_off_inside_its_value_has_none(before, value, indent, cut):
    text = json.dumps(value, indent=indent)
    assert extract_json(before + text[: 1 + cut % (len(text) - 1)], lambda value: True) is None


@given(PARTS, st.none() | st.just(lambda value: isinstance(value, dict)))
def test_any_answer_has_a_value_or_a_reason_of_one_line(text, accept):
    extracted = extract_json(text, accept)
    if extracted is None:
        why_not_json(text).encode()
        assert "\n" not in why_not_json(text)
    else:
        assert json.loads(extracted.raw.decode()) == extracted.value
        assert b"\n" not in extracted.raw
    for decode in (decode_strict, decode_lenient):
        decode(text)


@given(PARTS)
def test_reasoning_is_divided_from_any_answer_without_inventing_text(text):
    split = split_reasoning(text)
    assert len(split.text) + len(split.reasoning or "") <= len(text)
