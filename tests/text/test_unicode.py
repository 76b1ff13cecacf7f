import json

import pytest

from bagent.text.unicode import MAX_DEPTH, clean_json, clean_text, nested_deeper, wire_text


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("text", "cleaned", "sent"),
    [
        ("a\ud800b\udfff", "a\\ud800b\\udfff", "a\ufffdb\ufffd"),
        ("x\ud83d\ude00y", "x\U0001f600y", "x\U0001f600y"),
        ("\ud83d\ud83d\ude00", "\\ud83d\U0001f600", "\ufffd\U0001f600"),
    ],
    ids=["lone halves", "a pair", "a pair beside a half"],
)
def test_pairs_are_joined_and_lone_halves_shown_or_replaced(text, cleaned, sent):
    assert clean_text(text) == cleaned
    assert wire_text(text) == sent


@pytest.mark.parametrize("text", ["", "é", "\U0001f600", "\\ud800"])
def test_good_text_is_returned_as_it_is(text):
    assert clean_text(text) is text
    assert wire_text(text) is text


def test_values_that_json_does_not_have_become_text():
    value = {"\ud800": [float("nan"), float("inf"), float("-inf")], "t": (1.5, "\udfff")}
    cleaned = clean_json(value)
    assert cleaned == {"\\ud800": ["NaN", "Infinity", "-Infinity"], "t": [1.5, "\\udfff"]}
    assert json.loads(json.dumps(cleaned, allow_nan=False)) == cleaned


@pytest.mark.parametrize(
    ("value", "deeper"),
    [
        (1, False),
        (nested(MAX_DEPTH), False),
        (nested(MAX_DEPTH + 1), True),
        ([1] * 10_000, False),
        ({"a": {"b": nested(MAX_DEPTH - 1)}}, True),
    ],
)
def test_depth_is_counted_exactly(value, deeper):
    assert nested_deeper(value) is deeper


def test_very_deep_and_cyclic_values_are_seen_without_recursion():
    assert nested_deeper(nested(100_000))
    loop = []
    loop.append(loop)
    assert nested_deeper(loop)
