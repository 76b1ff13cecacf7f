"""What a template may take of time and memory, whatever it says."""

from __future__ import annotations

import tracemalloc

import pytest

from bagent.job.templates.environment import MAX_RENDER
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
    monkeypatch.setattr("bagent.job.templates.environment.MAX_SECONDS", 0.2)
    with pytest.raises(TemplateFailure, match=r"prompt\.user: its loops take more than"):
        render(text)


GROWING = "{% set n = namespace(x=START) %}{% for i in range(60) %}STEP{% endfor %}{{ n.x }}"
HUGE = [
    "{{ 'x' * 100000000 }}",
    "{{ items * 100000000 }}",
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
    "{{ ('a ' * 4000000)|wordwrap(1) }}",
    "{{ ('a' * 4000000)|wordwrap(9) }}",
    "{{ ('http://a.bc ' * 20000)|urlize(rel='x' * 1000000) }}",
    GROWING.replace("START", "'a'").replace("STEP", "{% set n.x = n.x + n.x %}"),
    GROWING.replace("START", "'a'").replace("STEP", "{% set n.x = n.x ~ n.x %}"),
    GROWING.replace("START", "[1]").replace("STEP", "{% set n.x = n.x + n.x %}"),
    "{% set x %}{% for i in range(999) %}{{ 'a' * 9999999 }}{% endfor %}{% endset %}{{ x }}",
]
NESTED = [
    "{{ [[[1] * 2000] * 2000] * 2000 }}",
    "{{ ([[[1] * 2000] * 2000] * 2000)|tojson }}",
    GROWING.replace("START", "[1, 2]").replace("STEP", "{% set n.x = [n.x, n.x] %}"),
]
"""What is counted value by value, here up to a smaller bound."""


@pytest.mark.parametrize(
    ("text", "bound"), [*((text, MAX_RENDER) for text in HUGE), *((text, 2**20) for text in NESTED)]
)
def test_a_template_that_makes_a_huge_text_fails_its_row_before_it_has_it(
    render, monkeypatch, text, bound
):
    monkeypatch.setattr("bagent.job.templates.environment.MAX_SECONDS", 60.0)
    for module in ("environment", "template"):
        monkeypatch.setattr(f"bagent.job.templates.{module}.MAX_RENDER", bound)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateFailure, match="more than"):
            render(text)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_RENDER
    finally:
        tracemalloc.stop()
