import json
import random
import time

import pytest

from bagent.answers.extract import extract_json, why_not_json

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
        (TEXT, OBJ),
        ("  [1, 2]\n", [1, 2]),
        ("5", 5),
        ("-0.5", -0.5),
        ("true", True),
        ("null", None),
        ('"positive"', "positive"),
        ('"say {}"', "say {}"),
        (
            '{"t": "<think>no</think> ```json\\n{}``` {["}',
            {"t": "<think>no</think> ```json\n{}``` {["},
        ),
        ('"\\u00e9\\ud83d\\ude00"', "é\U0001f600"),
    ],
)
def test_whole_text_that_is_json_is_the_value(text, value):
    assert found(text) == (value, "plain")


@pytest.mark.parametrize("tag", ["", "json", "JSON", "Json", "json5", "jsonc", "jsonl"])
@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("Here it is:\n", ""), ("", "\nHope it helps!"), ("So ", " ok")]
)
def test_fenced_value(tag, before, after):
    assert found(f"{before}{F}{tag}\n{TEXT}\n{F}{after}") == (OBJ, "fence")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"~~~json\n{TEXT}\n~~~", OBJ),
        (f"`{F}json\n{TEXT}\n{F}`", OBJ),
        (f"{F}json {TEXT} {F}", OBJ),
        (f"{F}json\r\n[1]\r\n{F}\r\n", [1]),
        (f"{F}json\n5\n{F}", 5),
        (f"{F}\ntrue\n{F}", True),
        (f'{F}json\n"positive"\n{F}', "positive"),
        (f'{F}json\n"positive"', "positive"),
        (f"{F}json\n{TEXT}", OBJ),
        (f'{F}json\n{{"code": "{F}py\\nx = [\\n{F}"}}\n{F}', {"code": f"{F}py\nx = [\n{F}"}),
        (f"Use {F}js\nlet x = [1;\n{F}\nthen\n{F}json\n{TEXT}\n{F}", OBJ),
        (f"for x in [0, 1):\n{F}json\n{TEXT}\n{F}", OBJ),
        (f'{F}json\n{{"a": [1}}\n{F}\nSorry:\n{F}json\n{TEXT}\n{F}', OBJ),
    ],
)
def test_fences_of_all_shapes(text, value):
    assert found(text) == (value, "fence")


def test_last_fence_wins_without_a_schema():
    assert found(f"{F}json\n[1]\n{F}\n{F}json\n[2]\n{F}\n{F}json\nnope\n{F}") == ([2], "fence")


def test_accepted_fence_wins_over_a_later_one():
    text = f"{F}json\n{TEXT}\n{F}\nfor example\n{F}json\n[2]\n{F}"
    assert found(text, lambda value: isinstance(value, dict)) == (OBJ, "fence")


def test_accepted_prose_wins_over_a_fence_that_is_not():
    text = f"{F}json\n[2]\n{F} means {TEXT}"
    assert found(text, lambda value: isinstance(value, dict)) == (OBJ, "prose")


def test_rejected_fence_is_still_what_was_said():
    extracted = extract_json(f"{F}json\n[2]\n{F} or [3]", lambda value: False)
    assert (extracted.value, extracted.how, extracted.accepted) == ([2], "fence", False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"Sure! {TEXT}", OBJ),
        (f"{TEXT}\n\nLet me know!", OBJ),
        (f"json\n{TEXT}", OBJ),
        (f"{TEXT}<|im_end|>", OBJ),
        (f"Answer: {TEXT}.", OBJ),
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


def test_scalars_and_fences_after_thinking():
    assert found("<think>x</think> 42") == (42, "think")
    assert found('<think>x</think>\n"yes {"') == ("yes {", "think")
    assert found(f"<think>[</think>\n{F}json\n{TEXT}\n{F}") == (OBJ, "fence")


@pytest.mark.parametrize(
    "text",
    [
        f"<think>{TEXT}",
        f"Sure. <think>{TEXT}",
        f"<think>a</think><think>{TEXT}",
        f"<thinking>{TEXT}</think",
        f"[THINK]{TEXT}",
        f"◁think▷{TEXT}",
        f"<|channel|>analysis<|message|>{TEXT}",
        f"{F}json\n<think>{TEXT}\n{F}",
    ],
)
def test_text_that_ends_inside_thinking_has_no_answer(text):
    assert extract_json(text, lambda value: True) is None
    assert "thinking" in why_not_json(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\ufeff" + TEXT, OBJ),
        ("\ufeff5", 5),
        ('{"a": 1,}', OBJ),
        (f"Sure:\n{F}json\n{{\n  // no\n}}\n{F}\n" + '{"a": 1,\n}', OBJ),
        ('{"x": NaN}', {"x": "NaN"}),
        ('"\\ud800"', "\\ud800"),
        ('{"x": "\ud800"}', {"x": "\\ud800"}),
        ('{"x": "two\nlines"}', {"x": "two\nlines"}),
    ],
)
def test_mild_repairs_are_named(text, value):
    assert found(text) == (value, "repaired")


def test_words_for_why_there_is_no_value():
    assert why_not_json('{"a": 1 "b": 2}') == (
        "not JSON: Expecting ',' delimiter at line 1 column 9"
    )
    assert why_not_json("I'd rather\nnot") == (
        'no JSON in the answer, which begins "I\'d rather not"'
    )
    assert why_not_json('{"a": [1') == "the answer breaks off inside an object or array"


DOCUMENTS = [
    {"name": "n", "items": ["a", "b"]},
    {"findings": [{"severity": "low", "text": 'say "[x]" {y}', "tags": [1, [2, {}]]}] * 2},
    [{"a": [[], {}, {"b": None}]}, {"a": []}],
    {"tree": {"tree": {"tree": {}}}},
    {"code": '```json\n{"a": 1}\n```', "html": "<think>{}</think>", "end": "</think>[]"},
    {"esc": '\\" \\\\ } ] \n', "é": "\U0001f600"},
    [],
    "a string with {} and [1] and ```json\n{}\n``` in it",
]
WRAPPINGS = [
    "{}",
    "\ufeff{}",
    "Sure, here is 1 answer: {}",
    "```json\n{}\n```",
    "Look:\n```\n{}\n```\nDone.",
    "<think>[1] {{}} maybe</think>\n{}",
    "<think>x</think>```json\n{}\n```",
    "left over [1] </think>{}",
    "left [ over\n</think>\n{}",
]


PAIRS = [
    (document, wrapping)
    for document in DOCUMENTS
    for wrapping in WRAPPINGS
    if not (isinstance(document, str) and "Sure" in wrapping)  # a string in prose is a quotation
]


@pytest.mark.parametrize(("document", "wrapping"), PAIRS, ids=range(len(PAIRS)))
@pytest.mark.parametrize("indent", [None, 2])
def test_no_prefix_of_an_answer_yields_a_value(wrapping, document, indent):
    head, tail = wrapping.replace("{{}}", "{ }").split("{}")
    text = json.dumps(document, indent=indent)
    for cut in range(len(text)):
        prefix = head + text[:cut]
        if "left" in head and not text[:cut].strip():
            continue
        assert extract_json(prefix, lambda value: True) is None, prefix
    whole = extract_json(head + text + tail, lambda value: True)
    assert whole.value == document
    assert json.loads(whole.raw) == document


def test_prefix_with_trailing_commas_yields_no_value():
    text = '{"a": [1, 2,], "b": {"c": 3,},}'
    for cut in range(len(text)):
        assert extract_json(text[:cut], lambda value: True) is None
    assert extract_json(text).value == {"a": [1, 2], "b": {"c": 3}}


def test_random_text_never_raises_and_raw_is_always_the_value():
    pieces = ["{", "}", "[", "]", '"', ",", ":", "1", "a", "\\", "\n", "```", "```json\n", " "]
    pieces += ["<think>", "</think>", "\ud800", "\ufeff", "NaN", "{}", '{"a":1}', "é", "[THINK]"]
    source = random.Random(7)
    values = 0
    for _ in range(20_000):
        text = "".join(source.choices(pieces, k=source.randint(1, 12)))
        extracted = extract_json(text, lambda value: isinstance(value, dict))
        if extracted is None:
            assert len(why_not_json(text).encode()) <= 800
            continue
        values += 1
        assert json.loads(extracted.raw.decode()) == extracted.value
        assert b"\n" not in extracted.raw
    assert values > 1000


@pytest.mark.parametrize(
    "text",
    [
        "[" * 2_000_000,
        "[]" * 1_000_000,
        "[" + '\\"' * 1_000_000,
        "see [1] and {x} " * 125_000,
        "[ \n```\n" * 300_000,
        "```json\n" * 250_000,
        "~~~x ```y " * 200_000,
        "<think></think>" * 130_000,
        "<think" * 300_000,
        "[" + "," * 2_000_000 + "]",
        "[" + " " * 2_000_000 + ",",
        "[1" + ", " * 1_000_000 + "]",
        '"' + "\\" * 2_000_000,
        "`" * 2_000_000,
        "</think>" * 250_000,
    ],
    ids=lambda text: text[:8],
)
def test_two_megabytes_of_junk_take_linear_time(text):
    started = time.process_time()
    extract_json(text, lambda value: False)
    why_not_json(text)
    assert time.process_time() - started < 10  # a quadratic scan would take hours


def test_large_answer_in_prose_is_read_whole():
    text = json.dumps([{"n": n, "t": "x" * 20} for n in range(20_000)])
    assert len(extract_json(f"Here: {text} done").value) == 20_000
