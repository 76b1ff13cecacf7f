"""Templates: what prints how, what fails a row, what is no template; limits of time and memory."""

from __future__ import annotations

import datetime
import decimal
import tracemalloc

import pytest

from bagent.errors import JobError
from bagent.job.templates import environment
from bagent.job.templates.environment import MAX_RENDER, JsonLines
from bagent.job.templates.template import Template, TemplateFailure
from bagent.job.validation import Origin

ROW = {
    "text": "x",
    "a": {"b": 1, "c": None, "d": {"e": "deep"}},
    "items": [1, 2],
    "values": {"k": True},
    "n": None,
    "f": 0.1,
    "whole": 3.0,
    "big": 10**30,
    "yes": True,
    "nan": float("nan"),
    "u": "é",
    "html": "<b> & 'q'",
    "day": datetime.date(2024, 1, 2),
    "price": decimal.Decimal("1.50"),
    "range": "a field",
    "objects": [{"name": "p"}, {"name": "q"}],
}


def template(text):
    return Template(text, "prompt.user", Origin("job.yaml"))


def render(text, data=None, extra=None):
    return template(text).render(ROW if data is None else data, extra)


def failure(text, data=None, extra=None):
    with pytest.raises(TemplateFailure) as caught:
        render(text, data, extra)
    return str(caught.value)


PRINTED = [
    ("{{ a | join('-') }}", "b-c-d"),
    ("{% for i in range(2) %}{{ i }}{% endfor %}", "01"),  # the rows have a field of this name
    ("{{ objects | join(', ', attribute='name') }}", "p, q"),
    ("{% for i in items %}{{ loop.length }}{% endfor %}", "22"),
    ("{% raw %}{{ text }} {% x %}{% endraw %}", "{{ text }} {% x %}"),
    ("{{ html }}", "<b> & 'q'"),
    ("{{ yes }} {{ n }} {{ f }} {{ whole }} {{ big }}", f"true null 0.1 3.0 {10**30}"),
    ("{{ a }}", '{"b":1,"c":null,"d":{"e":"deep"}}'),
    ("{{ items }} {{ u }} {{ [u] }}", '[1,2] é ["é"]'),
    ("{{ day }} {{ [day] }} {{ price }}", '"2024-01-02" ["2024-01-02"] "1.50"'),
    ("{{ row.items }} {{ items }} {{ values.k }}", "[1,2] [1,2] true"),
    ("{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}", 'b=1;c=null;d={"e":"deep"};'),
    ("{{ row.items() | list | length }}", "16"),
    ("{{ a.values() }}", '[1,null,{"e":"deep"}]'),
    ("{{ text ~ yes ~ n ~ a.b ~ items }}", "xtruenull1[1,2]"),
    ("{{ [1, true, none, 'a'] | join('-') }}", "1-true-null-a"),
    ("{{ objects | map(attribute='name') }}", '["p","q"]'),
    ("{{ items | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
    ("{{ missing | default('none') }}", "none"),
    ("{{ missing is defined }} {{ text is defined }}", "false true"),
    ("{{ a.zz | default(1) }}{{ a.zz.yy.xx | default(2) }}{{ missing['k'] | d(3) }}", "123"),
    ("{{ '%s-%d' | format(text, 3) }}", "x-3"),
    ("{{ '{}-{:>3}'.format(text, 2) }} {{ text + 'y' }} {{ 'ab' * 2 }}", "x-  2 xy abab"),
    ("{{ items|batch(2, 0)|list }} {{ items|slice(1)|list }}", "[[1,2]] [[1,2]]"),
    ("{{ 'a\\nb'|indent }} {{ 1.256|round(1) }} {{ 'aXa'|replace('X', 'b') }}", "a\n    b 1.3 aba"),
]


@pytest.mark.parametrize(("text", "printed"), PRINTED)
def test_text_prints_as_it_is_and_the_rest_as_json(text, printed):
    assert render(text) == printed


def test_a_list_of_answers_prints_one_line_each():
    answers = JsonLines([{"id": 1, "text": "é"}, {"id": 2}])
    printed = render("{{ responses }}", {}, {"responses": answers})
    assert printed == '{"id":1,"text":"é"}\n{"id":2}'
    assert (
        render("{{ responses[1].id }}{{ responses | length }}", {}, {"responses": answers}) == "22"
    )


MISSING = [
    ("a {{ text }} b {{ gone }}", "gone"),
    ("{{ zz | tojson }}", "zz"),
    ("{{ a['zz'] }}", "a.zz"),
    ("{{ [zz] }}", "zz"),
    ("{{ txet }}", "txet"),
    ("{{ a.zz }}", "a.zz"),
    ("{{ a.zz.yy }}", "a.zz.yy"),
    ("{{ row.zz }}", "zz"),
    ("{{ n.b }}", "n.b"),
    ("{% if zz %}x{% endif %}", "zz"),
    ("{{ zz + 1 }}", "zz"),
    ("{{ zz.a() }}", "zz.a"),
    ("{{ items[zz] }}", "zz"),
    ("{{ text.upper }}", "text.upper"),
    ("{{ lipsum() }}", "lipsum"),
]


@pytest.mark.parametrize(("text", "name"), MISSING)
def test_a_missing_field_fails_the_row_by_its_name(text, name):
    assert failure(text) == f"prompt.user: the row has no field {name}"


FAILING = [
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ items[7] }}", "a list of 2 has no item 7"),
    ("{{ text + 1 }}", 'can only concatenate str (not "int") to str'),
    ("{{ a.__class__.__mro__ }}", "access to attribute '__class__' of 'dict' object is unsafe."),
    ("{{ items.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
    ("{% for i in range(1000000) %}{% endfor %}", "Range too big. The sandbox blocks ranges"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
]


@pytest.mark.parametrize(("text", "message"), FAILING)
def test_a_template_that_fails_fails_the_row(text, message):
    assert failure(text).startswith(f"prompt.user: {message}")


def test_a_text_of_64_mb_is_the_largest():
    half = "x" * (MAX_RENDER // 2)
    assert len(render("{{ t }}{{ t }}", {"t": half})) == MAX_RENDER
    assert failure("{{ t }}{{ t }}!", {"t": half}) == "prompt.user renders to more than 64 MB"


@pytest.mark.parametrize(
    "text", ["{{ b.update({'c': 2}) }}", "{{ a.pop() }}", "{{ row.clear() }}", "{{ row.update }}"]
)
def test_a_row_is_never_changed(text):
    row = {"a": [1], "b": {"c": 1}}
    assert "unsafe" in failure(text, row)
    assert row == {"a": [1], "b": {"c": 1}}


LITERAL_HINT = "(write a literal {{ as {% raw %}{{{% endraw %})"
SPACED_HINT = "(a name with blanks is written {{ row['a b'] }})"
WRONG = [
    ("{{ a b }}", f"expected token 'end of print statement', got 'b' {SPACED_HINT}"),
    ("{{", f"unexpected 'end of template' {LITERAL_HINT}"),
    ("{{ gene }", "a } is missing after gene (write {{ gene }})"),
    ("{#1}", "Missing end of comment tag (write a literal {# as {% raw %}{#{% endraw %})"),
    (r"\x{{a}}{{#b}}", f"unexpected char '#' at 9 {LITERAL_HINT}"),
    ("{{ a is definde }}", "there is no test definde (did you mean defined?)"),
    ("{% include 'x' %}", "include needs other templates (use {file: PATH})"),
    ("{% block x %}{% endblock %}", "block has no use here (leave the block tags out)"),
    (
        "{% foo %}",
        "Encountered unknown tag 'foo' (write a literal {% as {% raw %}{%{% endraw %})",
    ),
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "the template nests too deeply"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_no_template_is_an_error_at_load(text, message):
    with pytest.raises(JobError) as caught:
        template(text)
    assert str(caught.value).startswith(f"job.yaml: prompt.user: {message}")


FIELDS = [
    ("plain", set()),
    ("{{ a }} {{ b.c }} {{ d['e'] }}", {"a", "b", "d"}),
    ("{% for x in xs %}{{ x }}{{ y }}{% endfor %}", {"xs", "y"}),
    ("{{ row.a }} {{ row['b'] }} {{ c }}", {"a", "b", "c"}),
    ("{{ row }}", None),
    ("{{ row[a] }}", None),
    ("{{ range }}", {"range"}),
    ("{% macro m(x) %}{{ x }}{{ y }}{% endmacro %}{{ m(z) }}", {"y", "z"}),
    ("{{ a[b].c[d] }}", {"a", "b", "d"}),
    ("{% with a = b %}{{ a }}{% endwith %}", {"b"}),
]


@pytest.mark.parametrize(("text", "fields"), FIELDS)
def test_the_fields_that_a_template_uses_are_known(text, fields):
    assert template(text).fields == (None if fields is None else frozenset(fields))


@pytest.mark.parametrize(
    "text",
    [
        "{{ text }}",
        "100 % of {{ text }}, {{ whole }}\n",
        "%s {{ price }} %(x)s {{ day }}",
        "{{ range }} of {{ objects }}",
    ],
)
def test_fields_between_texts_come_out_as_jinja_has_them(text):
    # What comes after the fields keeps the template from being a plain one.
    assert render(text) == render(text + "{{ '' ~ '' }}")


def test_the_time_of_a_template_ends_with_it(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(environment.time, "thread_time", lambda: clock[0])
    assert template("{% for n in [1, 2] %}{{ n }}{% endfor %}").render({}) == "12"
    clock[0] = 1000.0
    environment.check_printed({"text": ["kept"]})


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
    ids=["loops", "macros"],
)
def test_a_template_that_loops_on_and_on_fails_its_row(monkeypatch, text):
    monkeypatch.setattr("bagent.job.templates.environment.MAX_SECONDS", 0.2)
    with pytest.raises(TemplateFailure, match=r"prompt\.user: its loops take more than"):
        render(text)


GROWING = "{% set n = namespace(x=START) %}{% for i in range(60) %}STEP{% endfor %}{{ n.x }}"
HUGE = [
    "{{ 'x' * 100000000 }}",
    "{{ items * 100000000 }}",
    "{{ text|center(1000000000) }}",
    "{{ text.ljust(1000000000) }}",
    "{{ text.zfill(10 ** 9) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ 1.5|round(1000000000, 'ceil') }}",
    "{{ [1]|slice(1000000000)|list }}",
    "{{ [1]|batch(1000000000, 1)|list }}",
    "{{ text|indent(1000000000, true) }}",
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
def test_a_template_that_makes_a_huge_text_fails_its_row_before_it_has_it(monkeypatch, text, bound):
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
