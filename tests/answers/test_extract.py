import time

import pytest

from bagent.answers.extract import (
    NOT_JSON,
    decode_lenient,
    decode_strict,
    extract_json,
    malformed_at,
    why_not_json,
)
from bagent.text.unicode import MAX_DEPTH

F = "```"
HARMONY = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant<|channel|>final<|message|>"
OBJ = {"a": 1}
TEXT = '{"a": 1}'


def found(text, accept=None):
    extracted = extract_json(text, accept)
    return None if extracted is None else (extracted.value, extracted.how)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"~~~json\n{TEXT}\n~~~", OBJ),
        (f"`{F}json\n{TEXT}\n{F}`", OBJ),
        (f'{F}json\n"positive"', "positive"),
        (f"{F}json\n{TEXT}", OBJ),
        (f'{F}json\n{{"code": "{F}py\\nx = [\\n{F}"}}\n{F}', {"code": f"{F}py\nx = [\n{F}"}),
        (f"Use {F}js\nlet x = [1;\n{F}\nthen\n{F}json\n{TEXT}\n{F}", OBJ),
        (f'{F}json\n{{"a": [1}}\n{F}\nSorry:\n{F}json\n{TEXT}\n{F}', OBJ),
    ],
)
def test_fences_of_all_shapes(text, value):
    assert found(text) == (value, "fence")


def test_the_last_accepted_fence_wins_then_prose_then_what_was_said():
    def is_object(value):
        return isinstance(value, dict)

    assert found(f"{F}json\n[1]\n{F}\n{F}json\n[2]\n{F}\n{F}json\nnope\n{F}") == ([2], "fence")
    text = f"{F}json\n{TEXT}\n{F}\nfor example\n{F}json\n[2]\n{F}"
    assert found(text, is_object) == (OBJ, "fence")
    assert found(f"{F}json\n[2]\n{F} means {TEXT}", is_object) == (OBJ, "prose")
    extracted = extract_json(f"{F}json\n[2]\n{F} or [3]", lambda value: False)
    assert (extracted.value, extracted.how, extracted.accepted) == ([2], "fence", False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"Sure! {TEXT}", OBJ),
        (f"{TEXT}<|im_end|>", OBJ),
        (f'"Sure", it said: {TEXT}', OBJ),
        ('It is {"t": "}]{[\\""} as asked', {"t": '}]{["'}),
        ("The list is [1, [2, 3]] then.", [1, [2, 3]]),
        (f"The set {{x, y}} and [see below] give {TEXT}", OBJ),
        (f"`{TEXT}`", OBJ),
        (f"<answer>{TEXT}</answer>", OBJ),
        (f"{F}python\nprint({TEXT})\n{F}", OBJ),
        ("It's {} indeed", {}),
    ],
)
def test_value_in_prose(text, value):
    assert found(text) == (value, "prose")


def test_prose_prefers_the_last_accepted_else_the_first():
    text = 'Draft {"a": 1}, better {"a": 2}, see [3].'
    assert found(text, lambda value: isinstance(value, dict)) == ({"a": 2}, "prose")
    assert found(text, lambda value: False) == ({"a": 1}, "prose")
    assert found(text) == ({"a": 1}, "prose")


@pytest.mark.parametrize(
    "text",
    [
        f"<think>maybe {{</think>{TEXT}",
        f'<think>{{"a": 2}}</think>\n{TEXT}\n',
        f"<thinking>a</thinking><think>b</think> {TEXT}",
        f"<reasoning>\n[1\n</reasoning>\n{TEXT}",
        f"[THINK]{{[[/THINK]{TEXT}",
        f"◁think▷…◁/think▷{TEXT}",
        f"no opening, {{ no [1] </think>\n{TEXT}",
        f'they had {{"a": 3}} here</think>{TEXT}',
        f"{HARMONY}{TEXT}",
        f"a {{ b [\n</think>{TEXT}",
    ],
)
def test_closed_thinking_is_passed_over(text):
    assert found(text, lambda value: True) == (OBJ, "think")
    assert found(text.replace(TEXT, f"\n{F}json\n{TEXT}\n{F}")) == (OBJ, "fence")
    assert found(text.replace(TEXT, "42")) == (42, "think")


@pytest.mark.parametrize(
    "text",
    [
        f"Sure. <think>{TEXT}",
        f"<think>a</think><think>{TEXT}",
        f"[THINK]{TEXT}",
        f"<|channel|>analysis<|message|>{TEXT}",
        f"{F}json\n<think>{TEXT}\n{F}",
    ],
)
def test_text_that_ends_inside_thinking_has_no_answer(text):
    assert extract_json(text, lambda value: True) is None
    assert "thinking" in why_not_json(text)


def test_words_for_why_there_is_no_value():
    malformed = "not JSON: Expecting ',' delimiter at line 1 column 9"
    assert why_not_json('{"a": 1 "b": 2}') == malformed
    prose = 'no JSON in the answer, which begins "I\'d rather not"'
    assert why_not_json("I'd rather\nnot") == prose
    assert why_not_json('{"a": [1') == "the answer breaks off inside an object or array"
    assert "200 levels" in why_not_json("[" * 300 + "]" * 300)
    assert "200 levels" in malformed_at("[" * 100_000)
    assert "4300 digits" in malformed_at("9" * 5000)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[]" * 110_000,  # more values than are looked at
        "[ \n```\n" * 30_000,
        "```json\n" * 25_000,
        "<think></think>" * 13_000,
        "[" + " " * 200_000 + ",",
        '"' + "\\" * 200_000,
        "</think>" * 25_000,
    ],
    ids=lambda text: text[:8],
)
def test_junk_takes_linear_time(text):
    started = time.process_time()
    extract_json(text, lambda value: False)
    why_not_json(text)
    assert time.process_time() - started < 5  # a quadratic scan would take minutes


@pytest.mark.parametrize("read", [decode_strict, decode_lenient])
def test_monstrous_text_is_not_json_and_does_no_harm(read):
    deep = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
    for text in ("[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, deep, f"[{'9' * 5000}]"):
        assert read(text) is NOT_JSON
    assert read("[" + "[]," * 5000 + "1]") == [*([[]] * 5000), 1]
    assert read(deep[1:-1]) is not NOT_JSON


@pytest.mark.parametrize(
    "text",
    ["", " ", "[1,]", "[NaN]", "[1e400]", '["\\ud800"]', '["\ud800"]', "\ufeff[]", "[1] x", "01"],
)
def test_strict_reader_takes_only_json(text):
    assert decode_strict(text) is NOT_JSON


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1,]", [1]),
        ("[1 , \n ]", [1]),
        ('{"a": [1, {"b": 2,},],}', {"a": [1, {"b": 2}]}),
        ('{"a": ",]", "b": "x,}",}', {"a": ",]", "b": "x,}"}),
        ('{"a": "\\",]",}', {"a": '",]'}),
        ('["a\nb\tc"]', ["a\nb\tc"]),
        ("[NaN, Infinity, -Infinity, 1e999]", ["NaN", "Infinity", "-Infinity", "Infinity"]),
        ('["\\ud800"]', ["\\ud800"]),
        ('["\ud800"]', ["\\ud800"]),
        ('["\ud83d\ude00"]', ["\U0001f600"]),
        ('{"\\udc00": 1}', {"\\udc00": 1}),
    ],
)
def test_what_is_repaired(text, value):
    assert decode_lenient(text) == value
    assert found("\ufeff" + text) == (value, "repaired")


@pytest.mark.parametrize(
    "text", ["[,]", '{"a":,}', "[1", '["a]', "{'a': 1}", "{a: 1}", "[1 2]", "// c\n[1]", "NaN", ""]
)
def test_nothing_else_is_repaired(text):
    assert decode_lenient(text) is NOT_JSON
