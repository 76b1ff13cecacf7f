"""Templates: whatever a row holds, and whatever a template says."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from bagent.errors import JobError
from bagent.job.templates.template import Template, TemplateFailure
from bagent.job.validation import Origin
from support.strategies import ODD_TEXT, json_values, texts_of

HOSTILE = texts_of(
    "{{ b }}", "{% raw %}", "{#", "#}", "%s", "%(b)s", "{b}", "{0.__class__}", "\\", "<b>", "\n",
    odd=ODD_TEXT,
)  # fmt: skip
NAMES = ("a", "b", "items", "row", "loop", "self", "é")
ROWS = st.dictionaries(
    st.sampled_from(NAMES) | st.text(max_size=3),
    json_values(HOSTILE) | HOSTILE | st.integers() | st.floats(),
    max_size=5,
)
PIECES = texts_of(
    "{{ a }}", "{{ row.b }}", "{{ row['é'] }}", "{{ items.a.b }}", "{{", "}}", "{%", "%}", " a ",
    "{% for x in a %}", "{% endfor %}", "{% if b %}", "{% else %}", "{% endif %}", "{{ x }}",
    "{% set a = b %}", "{% macro m(x) %}", "{% endmacro %}", "{{ m(a) }}", "{{ a | tojson }}",
    "{{ a | join(b) }}", "{{ a | length }}", "{{ a[0] }}", "{{ a.b.c }}", "{{ a ~ b }}",
    "{{ a + b }}", "{{ a * b }}", "{{ row }}", "{{ row.items() | list }}", "{{ a | int }}",
    "{{ a | replace('x', b) }}", "{{ a | default(b) }}", "{{ loop.index }}", "{{ self }}",
    "{{ a.format(b) }}", "{{ '%s' % a }}", "{{ a | sort }}", "{{ a | first }}", "{{ a | map(b) }}",
    "{{ ''.__class__ }}", "{{ a | attr('__class__') }}", "{% block x %}", "{% include a %}",
    "{{ cycler(a, b).next() }}", "{{ namespace(a=b) }}", "{{ range(a) }}", "{{ dict(a) }}", "{#",
    "{{ a | round }}", "{{ a | urlize }}", "{{ a | wordwrap(b) }}", "{{ a | groupby('b') }}",
    "{{ a | sum }}", "{{ a | batch(b) | list }}", "{% call m(b) %}", "{% endcall %}", "%s", "%",
)  # fmt: skip


def template(text: str) -> Template:
    return Template(text, "prompt.user", Origin("job.yaml"))


@given(HOSTILE, HOSTILE, st.integers())
def test_a_value_stands_in_the_prompt_letter_by_letter(a, b, number):
    data = {"a": a, "b": b, "n": number}
    expected = f"1% {a}|{b}|{number}\n"
    for text in (
        "1% {{ a }}|{{ b }}|{{ n }}\n",
        "1% {{ row.a }}|{{ row['b'] }}|{{ n }}\n",
        "1% {{ a }}|{% if true %}{{ b }}{% endif %}|{{ n }}\n",
    ):
        assert template(text).render(data) == expected


@given(json_values(HOSTILE))
def test_other_values_stand_in_the_prompt_as_json(value):
    text = template("{{ a }}").render({"a": value})
    if isinstance(value, str):
        assert text == value
    else:
        assert json.loads(text) == value
        assert template("{{ a | tojson }}").render({"a": value}) == text


@given(PIECES, ROWS)
@example("{% for x in a %}" * 25 + "{% endfor %}" * 25, {})
@example("{% if a %}" * 150 + "{% endif %}" * 150, {})
@example("{{ " + "9" * 5000 + " }}", {})
@example("{{ a(b=1, b=2) }}", {})
def test_any_template_is_a_text_a_failed_row_or_an_error_with_position(text, data):
    try:
        parsed = template(text)
    except JobError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("job.yaml")
        return
    try:
        assert isinstance(parsed.render(data), str)
        assert parsed.render(data) == parsed.render(data, {"unused name": 1})
    except TemplateFailure as failure:
        assert "\n" not in str(failure)
