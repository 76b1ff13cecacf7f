import json

import pytest

from bagent.text.unicode import MAX_DEPTH, clean_json, clean_text, nested_deeper, wire_text


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_lone_surrogate_is_kept_as_visible_text():
    assert clean_text("a\ud800b") == "a\\ud800b"
    assert clean_text("\udc00") == "\\udc00"


def test_lone_surrogate_goes_to_a_server_as_replacement_character():
    assert wire_text("a\ud800b\udfff") == "a\ufffdb\ufffd"


@pytest.mark.parametrize("clean", [clean_text, wire_text])
def test_surrogate_pair_is_the_character_it_stands_for(clean):
    assert clean("x\ud83d\ude00y") == "x\U0001f600y"


def test_pair_beside_a_lone_half_is_joined_and_the_half_kept():
    assert clean_text("\ud83d\ud83d\ude00") == "\\ud83d\U0001f600"
    assert wire_text("\ud83d\ude00\ude00") == "\U0001f600\ufffd"


@pytest.mark.parametrize("text", ["", "plain", "é", "\U0001f600", "\0", "\ufffd", "\\ud800"])
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
        ([], False),
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
