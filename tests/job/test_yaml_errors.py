"""One clear line for each way in which a file is not YAML."""

from __future__ import annotations

import pytest

from bagent.errors import JobError
from bagent.job.yaml.parser import read_yaml

CASES = [
    ("a: {<<: 1}", "job.yaml:1:9: << takes a mapping, or a list of mappings"),
    (
        "a: 1\nb\nc: 2\n",
        "job.yaml:3:1: a line without a colon stands among KEY: VALUE lines "
        "(while scanning a simple key that began on line 2)",
    ),
    (
        "user: {{ text }}\n",
        'job.yaml:1:8: a text that begins with {{ must be quoted (write "{{ NAME }}")',
    ),
    (
        "prompt:\n  user: {{ text }} and more\n",
        "job.yaml:2:20: not YAML: expected <block end>, but found '<scalar>' "
        "(quote a text that begins with {{, or write it after | on lines of its own)",
    ),
    (
        "a:\n    b: 1\n  c: 2\n",
        "job.yaml:3:3: this line is indented differently from the lines before it "
        "(while parsing a block mapping that began on line 1)",
    ),
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
    (
        "a: 'x\nb: 1\n",
        "job.yaml:3:1: a quote is never closed (while scanning a quoted scalar that began on "
        "line 1)",
    ),
    ("a: *b\n", "job.yaml:1:4: undefined alias 'b' (name it earlier with &NAME)"),
    (
        "a: [1, 2\n",
        "job.yaml:2:1: not YAML: expected ',' or ']', but got '<stream end>' "
        "(while parsing a flow sequence that began on line 1)",
    ),
    ("a: !thing 1\n", "job.yaml:1:4: the tag !thing has no meaning here (leave it out)"),
    ("a: !!int x\n", "job.yaml:1:4: x is no !!int"),
    ("? [a]\n: b\n", "job.yaml:1:3: a key must be text, not a list or mapping"),
    ("a: 1\n---\nb: 2\n", "job.yaml:3:1: a second YAML document begins here (keep one per file)"),
    (
        "a: 1\nb\x07: 2\n",
        "job.yaml:2:2: the character U+0007 may not stand in a YAML file "
        '(take it out, or write it as \\u.... inside "double quotes")',
    ),
]


@pytest.mark.parametrize(("text", "message"), CASES)
def test_the_message_says_where_and_how_to_mend_it(text, message):
    with pytest.raises(JobError) as caught:
        read_yaml(text, "job.yaml")
    assert str(caught.value) == message
