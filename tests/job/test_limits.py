"""What a template may take of time and memory, whatever it says."""

from __future__ import annotations

import tracemalloc

import pytest

from bagent.job.templates.limits import MAX_RENDER
from bagent.job.templates.prompt import Prompt
from bagent.job.templates.template import TemplateFailure

ROW = {"a": "x", "items": [1, 2, 3], "nested": [[1, [2]], [3, []]]}


@pytest.fixture
def render(load):
    def rendered(text):
        job = load("input: rows.jsonl\nprompt: |-\n  " + text.replace("\n", "\n  ") + "\n")
        return Prompt.from_job(job).render(ROW)[0]["content"]

    return rendered


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
    ids=["loops", "macros"],
)
def test_a_template_that_loops_on_and_on_fails_its_row(render, monkeypatch, text):
    monkeypatch.setattr("bagent.job.templates.limits.MAX_SECONDS", 0.2)
    with pytest.raises(TemplateFailure, match=r"prompt\.user: its loops take more than"):
        render(text)


GROWING = "{% set n = namespace(x=START) %}{% for i in range(60) %}STEP{% endfor %}{{ n.x }}"


@pytest.mark.parametrize(
    "text",
    [
        "{{ a|center(1000000000) }}",
        "{{ a.ljust(1000000000) }}",
        "{{ a.zfill(10 ** 9) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "{{ 1.5|round(1000000000, 'ceil') }}",
        "{{ [1]|slice(1000000000)|list }}",
        "{{ [1]|batch(1000000000, 1)|list }}",
        "{{ a|indent(1000000000, true) }}",
        "{{ ('a' * 60000000)|replace('a', 'bbbbbbbbbb') }}",
        "{{ ('a' * 60000000).replace('a', 'bbbbbbbbbb') }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ ('ab' * 1000000).expandtabs(1000000) ~ ('\\t' * 1000000).expandtabs(1000000) }}",
        "{{ ('x' * 60000).translate({120: 'y' * 60000}) }}",
        "{{ ('x' * 600000).join(['a'] * 1000000) }}",
        "{{ ([''] * 1000000)|join('x' * 600000) }}",
        "{{ [[[1] * 2000] * 2000] * 2000 }}",
        "{{ ([[[1] * 2000] * 2000] * 2000)|tojson }}",
        "{{ ('a ' * 4000000)|wordwrap(1) }}",
        "{{ ('a' * 4000000)|wordwrap(9) }}",
        "{{ ('http://a.bc ' * 20000)|urlize(rel='x' * 1000000) }}",
        GROWING.replace("START", "'a'").replace("STEP", "{% set n.x = n.x + n.x %}"),
        GROWING.replace("START", "'a'").replace("STEP", "{% set n.x = n.x ~ n.x %}"),
        GROWING.replace("START", "[1]").replace("STEP", "{% set n.x = n.x + n.x %}"),
        GROWING.replace("START", "[1, 2]").replace("STEP", "{% set n.x = [n.x, n.x] %}"),
        "{% set x %}{% for i in range(999) %}{{ 'a' * 9999999 }}{% endfor %}{% endset %}{{ x }}",
    ],
)
def test_a_template_that_makes_a_huge_text_fails_its_row_before_it_has_it(
    render, monkeypatch, text
):
    monkeypatch.setattr("bagent.job.templates.limits.MAX_SECONDS", 60.0)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateFailure, match="more than"):
            render(text)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_RENDER
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% for i in items %}{{ loop.index }}/{{ loop.length }} {% endfor %}", "1/3 2/3 3/3 "),
        ("{% for i in items if i > 1 %}{{ i }}{{ loop.last }} {% endfor %}", "2false 3true "),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'b': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "b1"),
        (
            "{% for i in nested recursive %}{{ loop(i) if i is iterable else i }};{% endfor %}",
            "1;2;;;3;;;",
        ),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{{ f('b') }}", "<1><b>"),
        ("{{ '%s-%s'|format(a, 2) }} {{ '{}-{:>3}'.format(a, 2) }}", "x-2 x-  2"),
        ("{{ a + 'y' }} {{ items + [4] }} {{ 1 + 2 }} {{ 'ab' * 2 }}", "xy [1,2,3,4] 3 abab"),
        ("{{ items|batch(2, 0)|list }} {{ items|slice(2)|list }}", "[[1,2],[3,0]] [[1,2],[3]]"),
        (
            "{{ 'a\\nb'|indent }} {{ 1.256|round(1) }} {{ 'aXa'|replace('X', 'b') }}",
            "a\n    b 1.3 aba",
        ),
    ],
)
def test_what_templates_usually_do_is_as_before(render, expected, text):
    assert render(text) == expected
