import pytest

from bagent.answers.extract import NOT_JSON, decode_lenient, decode_strict, malformed_at
from bagent.text.unicode import MAX_DEPTH


@pytest.mark.parametrize(
    "text",
    ["", " ", "[1,]", "[NaN]", "[1e400]", '["\\ud800"]', '["\ud800"]', "\ufeff[]", "[1] x", "01"],
)
def test_strict_reader_takes_only_json(text):
    assert decode_strict(text) is NOT_JSON


@pytest.mark.parametrize("read", [decode_strict, decode_lenient])
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        f"[{'9' * 5000}]",
    ],
)
def test_monstrous_text_is_not_json_and_does_no_harm(read, text):
    assert read(text) is NOT_JSON


@pytest.mark.parametrize("read", [decode_strict, decode_lenient])
def test_many_brackets_are_fine_when_they_are_not_deep(read):
    assert read("[" + "[]," * 5000 + "1]") == [*([[]] * 5000), 1]
    assert read("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not NOT_JSON


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1,]", [1]),
        ('{"a": 1 , \n }', {"a": 1}),
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
def test_mild_repairs(text, value):
    assert decode_lenient(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "[,]",
        "[1,,]",
        '{"a":,}',
        "{,}",
        "[1",
        '{"a": 1',
        '{"a": "b',
        '["a]',
        "{'a': 1}",
        '{"a": True}',
        '{"a": None}',
        "{a: 1}",
        '{"a" 1}',
        "[1 2]",
        "// c\n[1]",
        "NaN",
        "-Infinity",
        "tru",
        "",
    ],
)
def test_nothing_else_is_repaired(text):
    assert decode_lenient(text) is NOT_JSON


def test_words_for_malformed_text_name_line_and_column():
    assert malformed_at('{"a": 1,\n "b" 2}') == "Expecting ':' delimiter at line 2 column 6"
    assert "200 levels" in malformed_at("[" * 100_000)
    assert "4300 digits" in malformed_at("9" * 5000)
