"""Reading YAML: values, positions, repeated keys, aliases, encodings."""

from __future__ import annotations

import math

import pytest

from bagent.errors import JobError
from bagent.job.yaml import parser
from bagent.job.yaml.parser import find, read_yaml
from bagent.job.yaml.scalars import plain


def values(text):
    return plain(read_yaml(text, "job.yaml").data)


def error(text):
    with pytest.raises(JobError) as caught:
        read_yaml(text, "job.yaml")
    return str(caught.value)


PLAIN_SCALARS = [
    ("no", "no"),
    ("No", "No"),
    ("off", "off"),
    ("true", True),
    ("tRue", "tRue"),
    ("false", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("-0", 0),
    ("+12", 12),
    ("08", 8),
    ("010", 10),
    ("0o17", 15),
    ("0o18", "0o18"),
    ("-0x1F", "-0x1F"),
    ("0b11", "0b11"),
    ("1,000", "1,000"),
    ("1E6", 1e6),
    ("1.5e3", 1500.0),
    ("5.", 5.0),
    ("-.5", -0.5),
    ("e5", "e5"),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("inf", "inf"),
    ("1:30", "1:30"),
    ("2024-01-02", "2024-01-02"),
    ("2024-01-02T03:04:05Z", "2024-01-02T03:04:05Z"),
    ("١٢", "١٢"),
    ("1 2", "1 2"),
]


@pytest.mark.parametrize(("written", "value"), PLAIN_SCALARS)
def test_plain_scalars_follow_the_core_schema(written, value):
    found = values(f"a: {written}\n")["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("written", ["'1'", '"1"', "!!str 1", "|-\n  1", ">-\n  1"])
def test_quoted_and_tagged_scalars_are_text(written):
    assert values(f"a: {written}\n") == {"a": "1"}


def test_numbers_keep_how_they_were_written():
    data = read_yaml("a: 08\nb: 1e2\n", "job.yaml").data
    assert (data["a"].source, data["b"].source) == ("08", "1e2")


def test_keys_are_text_as_written():
    assert values("08: a\nno: b\nnull: c\n1.0: d\ntrue: e\n2024-01-01: f\n") == {
        "08": "a",
        "no": "b",
        "null": "c",
        "1.0": "d",
        "true": "e",
        "2024-01-01": "f",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a:\t1\n", {"a": 1}),
        ("a: [1,\t2]\n", {"a": [1, 2]}),
        ('{"a": 1,\n\t"b": 2}', {"a": 1, "b": 2}),
        ("\t# words\na: 1\n", {"a": 1}),
    ],
)
def test_tabs_may_part_tokens(text, value):
    assert values(text) == value


def test_a_tab_that_indents_is_named():
    assert error("a:\n\tb: 1\n") == "job.yaml:2:1: a tab indents this line (indent with blanks)"


def test_json_is_read_with_its_escapes():
    assert values('{"a": "\\ud83d\\ude00 \\/ \\u00e9"}') == {"a": "😀 / é"}


def test_a_lone_surrogate_is_kept():
    assert values('{"a": "\\ud83d!"}') == {"a": "\ud83d!"}


def test_every_key_and_value_has_its_place():
    file = read_yaml("a: 1\nbc:\n  d: [x, yy]\n  e: |\n    z\n", "job.yaml")
    spots = file.data.spots
    assert (spots["a"].key_line, spots["a"].key_column) == (1, 1)
    assert (spots["a"].line, spots["a"].column) == (1, 4)
    assert str(spots["bc"].key_at) == "job.yaml:2:1"
    inner = file.data["bc"]
    assert str(inner.spots["d"].value_at) == "job.yaml:3:6"
    assert str(inner["d"].spots[1].value_at) == "job.yaml:3:10"
    assert inner.spots["e"].style == "|"
    assert file.text[inner["d"].spots[1].start : inner["d"].spots[1].end] == "yy"


def test_the_deepest_place_on_a_path_is_found():
    file = read_yaml("a: {b: 1}\n", "job.yaml")
    spot, there = find(file.data, ("a", "b", "c", 0), file.spot)
    assert (str(spot.value_at), there) == ("job.yaml:1:8", ("a", "b"))


def test_places_count_after_a_byte_order_mark():
    assert error("\ufeffa: 1\na: 2\n").startswith("job.yaml:2:1: key a is given twice")


@pytest.mark.parametrize("text", ["a: {b: 1, b: 2}", "a: 1\n'a': 2", "x: {<<: {}, <<: {}}"])
def test_keys_repeat_at_any_depth_and_in_any_quotes(text):
    assert "given twice" in error(text)


def test_anchors_stand_for_their_value_everywhere():
    assert values("a: &x [1, {b: 2}]\nc: *x\nd: {e: *x}\n") == {
        "a": [1, {"b": 2}],
        "c": [1, {"b": 2}],
        "d": {"e": [1, {"b": 2}]},
    }


def test_merge_keys_fill_in_what_is_not_written():
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}\nd: {z: 0, <<: *b}\n"
    found = values(text)
    assert found["c"] == {"x": 1, "y": 1, "z": 3}
    assert found["d"] == {"y": 2, "z": 0}


def test_a_quoted_merge_key_is_a_plain_key():
    assert values("a: {'<<': 1}") == {"a": {"<<": 1}}


@pytest.mark.parametrize(
    ("first", "value"),
    [("[x, x, x, x, x, x, x, x, x, x]", "[{}]"), ("{k: {x: 1}}", "{{<<: [{}]}}")],
)
def test_aliases_and_merges_that_multiply_are_bounded(monkeypatch, first, value):
    monkeypatch.setattr(parser, "MAX_VALUES", 5000)
    lines = [f"a0: &a0 {first}"]
    for n in range(1, 10):
        lines.append(f"a{n}: &a{n} {value.format(', '.join([f'*a{n - 1}'] * 10))}")
    assert "expands to more than 5,000 values" in error("\n".join(lines))


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: &x {b: *x}", "a: &x {<<: *x}"])
def test_an_alias_inside_its_own_value_is_an_error(text):
    assert "an alias stands inside what it names" in error(text)


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "- " * 5000])
def test_nesting_without_end_is_an_error(text):
    assert "job.yaml: the file nests lists and mappings too deeply" in error(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("key: &an:chor v\n", {"key": "v"}),
        ("a: &\u00e9 1\nb: *\u00e9\n", {"a": 1, "b": 1}),
        ("x: ! 12\n", {"x": "12"}),
        ("hosts: [::1, b]\n", {"hosts": ["::1", "b"]}),
    ],
)
def test_rare_forms_have_the_value_of_yaml_1_2(text, value):
    assert plain(read_yaml(text, "job.yaml").data) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt:\n  first\n  \t\n  second\n", "job.yaml:3:1: a blank line holds a tab"),
        ("x: { ?foo: bar }\n", "job.yaml:1:6: .* holds a question mark .quote the text"),
    ],
)
def test_a_rare_form_that_cannot_be_read_says_what_to_write(text, message):
    with pytest.raises(JobError, match=message):
        read_yaml(text, "job.yaml")
