"""Reading YAML: values, repeated keys, aliases, and one clear line for what is no YAML."""

from __future__ import annotations

import math

import pytest

from bagent.errors import JobError
from bagent.job.yaml import parser
from bagent.job.yaml.parser import read_yaml
from bagent.job.yaml.scalars import plain


def values(text):
    return plain(read_yaml(text, "job.yaml").data)


def error(text):
    with pytest.raises(JobError) as caught:
        read_yaml(text, "job.yaml")
    return str(caught.value)


PLAIN_SCALARS = [
    ("no", "no"),
    ("off", "off"),
    ("true", True),
    ("false", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("-0", 0),
    ("08", 8),
    ("010", 10),
    ("0o17", 15),
    ("0o18", "0o18"),
    ("-0x1F", "-0x1F"),
    ("1E6", 1e6),
    ("1.5e3", 1500.0),
    ("5.", 5.0),
    (".inf", math.inf),
    ("inf", "inf"),
    ("1:30", "1:30"),
    ("'1'", "1"),
    ("!!str 1", "1"),
    ("2024-01-02T03:04:05Z", "2024-01-02T03:04:05Z"),
    ("١٢", "١٢"),
]


@pytest.mark.parametrize(("written", "value"), PLAIN_SCALARS)
def test_plain_scalars_follow_the_core_schema(written, value):
    found = values(f"a: {written}\n")["a"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_text_as_written():
    read = values("08: a\nno: b\n1.0: d\ntrue: e\n")
    assert read == {"08": "a", "no": "b", "1.0": "d", "true": "e"}


def test_places_count_after_a_byte_order_mark():
    assert error("\ufeffa: 1\na: 2\n").startswith("job.yaml:2:1: key a is given twice")


@pytest.mark.parametrize("text", ["a: {b: 1, b: 2}", "a: 1\n'a': 2", "x: {<<: {}, <<: {}}"])
def test_keys_repeat_at_any_depth_and_in_any_quotes(text):
    assert "given twice" in error(text)


def test_merge_keys_fill_in_what_is_not_written():
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}\nd: {z: 0, <<: *b}\n"
    found = values(text)
    assert found["c"] == {"x": 1, "y": 1, "z": 3}
    assert found["d"] == {"y": 2, "z": 0}


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
        ('{"a": "\\ud83d\\ude00 \\/ \\ud83d!"}', {"a": "😀 / \ud83d!"}),
        ("a:\t1\n\t# words\nb: [1,\t2]\n", {"a": 1, "b": [1, 2]}),
        ("a: {'<<': 1}", {"a": {"<<": 1}}),
    ],
)
def test_rare_forms_have_the_value_of_yaml_1_2(text, value):
    assert values(text) == value


CASES = [
    ("a: {<<: 1}", "job.yaml:1:9: << takes a mapping, or a list of mappings"),
    ("a: 1\nb\nc: 2\n", "job.yaml:3:1: a line without a colon stands among KEY: VALUE lines "),
    (
        "user: {{ text }}\n",
        'job.yaml:1:8: a text that begins with {{ must be quoted (write "{{ NAME }}")',
    ),
    (
        "prompt:\n  user: {{ text }} and more\n",
        "job.yaml:2:20: not YAML: expected <block end>, but found '<scalar>' "
        "(quote a text that begins with {{, or write it after | on lines of its own)",
    ),
    ("a:\n    b: 1\n  c: 2\n", "job.yaml:3:3: this line is indented differently from the "),
    (
        "a: {url: ${URL}}\n",
        "job.yaml:1:11: not YAML: expected ',' or '}', but got '{' "
        '(inside { } and [ ] write "${NAME}" with quotes)',
    ),
    ("a: %b\n", "job.yaml:1:4: a text may not begin with % (quote the text)"),
    (
        'a: "x\\q"\n',
        "job.yaml:1:7: not YAML: found unknown escape character 'q' "
        "(in \"double quotes\" \\ is special: use 'single quotes', or \\\\)",
    ),
    ("a: 'x\nb: 1\n", "job.yaml:3:1: a quote is never closed (while scanning a quoted scalar "),
    ("a: *b\n", "job.yaml:1:4: undefined alias 'b' (name it earlier with &NAME)"),
    ("a: [1, 2\n", "job.yaml:2:1: not YAML: expected ',' or ']', but got '<stream end>' "),
    ("a: !thing 1\n", "job.yaml:1:4: the tag !thing has no meaning here (leave it out)"),
    ("a: !!int x\n", "job.yaml:1:4: x is no !!int"),
    ("? [a]\n: b\n", "job.yaml:1:3: a key must be text, not a list or mapping"),
    ("a: 1\n---\nb: 2\n", "job.yaml:3:1: a second YAML document begins here (keep one per file)"),
    ("a: 1\nb\x07: 2\n", "job.yaml:2:2: the character U+0007 may not stand in a YAML file "),
    ("a:\n\tb: 1\n", "job.yaml:2:1: a tab indents this line (indent with blanks)"),
    ("a:\n  b\n  \t\n  c\n", "job.yaml:3:1: a blank line holds a tab (take the tab out)"),
    (
        "x: { ?foo: b }\n",
        "job.yaml:1:6: an unquoted text in [ ] or { } holds a question mark (quote",
    ),
]


@pytest.mark.parametrize(("text", "message"), CASES)
def test_a_file_that_is_no_yaml_says_where_and_how_to_mend_it(text, message):
    assert error(text).startswith(message)
