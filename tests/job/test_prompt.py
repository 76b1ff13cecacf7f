"""Prompts of a job: their forms, their messages, their places in the file."""

from __future__ import annotations

import base64

import pytest

from bagent.errors import JobError
from bagent.job.templates.prompt import Prompt, TemplateFailure

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8


@pytest.fixture
def prompt(load):
    """``prompt(TEXT)``: the prompt of a job whose lines after ``input:`` are TEXT."""

    def making(text, **keys):
        return Prompt.from_job(load("input: rows.jsonl\n" + text, **keys))

    return making


@pytest.fixture
def wrong(prompt):
    """The message for a prompt that is wrong at load, or in ``check`` of ``sample``."""

    def failing(text, sample=None, **keys):
        with pytest.raises(JobError) as caught:
            made = prompt(text, **keys)
            made.check(sample or [])
        return str(caught.value)

    return failing


MESSAGES = """\
prompt:
  messages:
    - {role: developer, content: Be brief.}
    - {role: user, content: 'First {{ a }}'}
    - {role: assistant, content: Yes.}
    - {role: user, content: {file: u.md}}
"""


def test_messages_may_be_written_out(prompt, tmp_path):
    (tmp_path / "u.md").write_text("Then {{ b }}")
    found = prompt(MESSAGES)
    assert [(m["role"], m["content"]) for m in found.render({"a": 1}, {"b": [2]})] == [
        ("developer", "Be brief."),
        ("user", "First 1"),
        ("assistant", "Yes."),
        ("user", "Then [2]"),
    ]
    assert found.fields == {"a", "b"}
    numbers = prompt("prompt: {system: true, user: 08}\n").render({})
    assert [m["content"] for m in numbers] == ["true", "08"]


def test_a_raw_prompt_is_one_text(prompt):
    found = prompt("prompt: {raw: '<s>{{ a }}'}\n")
    assert (found.raw, found.render_raw({"a": 1})) == (True, "<s>1")


FORMS = [
    ("prompt: {system: x}", "prompt.system: user is missing (a system message alone asks nothing)"),
    ("prompt: {user: x, raw: y}", "prompt: messages and raw exclude each other, and system"),
    ("prompt: {user: x, images_from: y}", "prompt.images_from: there is no messages_from"),
    ("prompt: [x]", "prompt: expected text, got a list"),
    ("prompt: {}", "prompt: expected user, messages, messages_from or raw"),
    ("prompt: {user: {file: }}", "prompt.user: expected a text or {file: PATH}"),
    (
        "prompt: {messages: [{role: usr, content: x}]}",
        "prompt.messages[0].role: expected system, user, assistant or developer, got the text",
    ),
    (
        "prompt: {messages: [{role: user, content: [{text: x, image: y}]}]}",
        "prompt.messages[0].content[0]: expected {text: ...} or {image: PATH or URL}",
    ),
    (
        "prompt: {messages: [{role: user, content: []}]}",
        "prompt.messages[0].content: expected a text, {file: PATH} or a list of parts",
    ),
    (
        "prompt: {messages: [{role: user, content: [{type: text, text: x}]}]}",
        "unknown key type (a part is {text: ...} or {image: PATH or URL})",
    ),
    ('prompt: "\\frac{a}{b}"', "prompt: the text holds the control character U+000C (in "),
]


@pytest.mark.parametrize(("text", "message"), FORMS)
def test_a_prompt_of_a_wrong_form_is_refused(wrong, text, message):
    assert wrong(text + "\n").partition(": ")[2].startswith(message)


PLACES = [
    # A text with § before the name that no row has.
    "prompt: 'Say {{ §txet }}'\n",
    'prompt: "Say \\"it\\" {{ §txet }}"\n',
    "prompt:\n  user: |\n    Line one {{ text }}\n\n      deeper {{ §txet }}\n",
    "prompt:\n  user: 'over\n    two {{ §txet }}\n    lines'\n",
    'prompt:\n  user: "over\n    two \\\n    {{ §txet }}"\n',
    "prompt:\n  user: |\n    {% for x in text %}{{ §txet.a }}{{ txet.b }}{% endfor %}\n",
    "prompt:\n  system: é {{ text }}\n  user: é {{ §txet }}\n",
    "prompt:\r\n  user: |\r\n    Line {{ text }}\r\n    two {{ §txet }}\r\n",
]


@pytest.mark.parametrize("text", PLACES)
def test_an_unknown_name_is_told_at_its_place_in_the_file(wrong, text):
    before = ("input: rows.jsonl\n" + text).partition("§")[0]
    line = before.count("\n") + 1
    column = len(before) - before.rfind("\n")
    message = wrong(text.replace("§", ""), [{"text": "x"}])
    assert message.startswith(f"job.yaml:{line}:{column}: prompt.")
    assert "did you mean text?" in message


def test_the_hint_for_a_field_with_blanks_can_be_pasted(wrong):
    rows = [{"gene name": "x"}]
    reference = "{{ row['gene name'] }}"
    assert f"did you mean {reference}?" in wrong("prompt: {user: '{{ gene_name }}'}\n", rows)
    assert reference in wrong("prompt: {user: '{{ row.gene name }}'}\n", rows)


def test_an_unknown_name_in_a_file_or_an_option_is_told_at_its_place_there(wrong, tmp_path):
    (tmp_path / "u.md").write_text("one\n{{ text }}\n  two {{ txet }}\n")
    sample = [{"text": "x"}]
    assert wrong("prompt: {user: {file: u.md}}\n", sample) == (
        "u.md:3:10: prompt.user: txet is not in the first row "
        '(did you mean text? or guard it: {{ txet | default("") }})'
    )
    message = wrong("prompt: x\n", sample, sets=("prompt.user=Say {{ txet }}",))
    assert message.startswith("--set prompt.user: prompt.user: txet is not in the first row")


def test_a_template_that_is_none_is_told_at_its_place(wrong, tmp_path):
    (tmp_path / "u.md").write_text("one\nbad {{ a b }}\n")
    hint = "(write a literal {{ as {% raw %}{{{% endraw %})"
    assert wrong('prompt:\n  user: |\n    JSON: {\n      {{"a": 1}} }\n') == (
        f"job.yaml:5:7: prompt.user: expected token 'end of print statement', got ':' {hint}"
    )
    assert wrong("prompt: {user: {file: u.md}}\n") == (
        "u.md:2:5: prompt.user: expected token 'end of print statement', got 'b'"
        " (a name with blanks is written {{ row['a b'] }})"
    )


SAMPLE = [{"text": "x", "meta": {"title": "t"}}, {"text": "y", "meta": None, "rare": 1}]

KNOWN = [
    "{% if 'zz' in row %}{{ zz }}{% endif %}",
    "{{ meta.title }}",
    "{{ text.upper() }}",
    "{{ zz | default('') }}",
    "{% if zz is not defined %}no{% else %}{{ zz }}{% endif %}",
    "{% if zz is undefined %}{% else %}{{ zz.a.b }}{% endif %}",
    "{% if row.zz is defined %}{{ zz }}{{ row.zz }}{% endif %}",
    "{{ meta.zz | default('') }}",
    "{{ meta['zz'].yy | default('') }}",
    "{% set zz = 1 %}{{ zz }}",
    "{% for zz in text %}{{ zz }}{{ zz.a }}{{ loop.index }}{% endfor %}",
    "{% macro m(zz) %}{{ zz }}{% endmacro %}{{ m(text) }}",
]


@pytest.mark.parametrize("text", KNOWN)
def test_known_and_guarded_names_are_no_error(prompt, text):
    assert prompt(f"prompt: |\n  {text}\n").check(SAMPLE) == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("txet", "did you mean text?"),
        ("zzzz", "they have text, meta, rare;"),
        ("meta.titel", "did you mean meta.title?"),
    ],
)
def test_a_name_in_no_row_of_the_sample_is_an_error(prompt, name, hint):
    with pytest.raises(JobError) as caught:
        prompt(f"prompt: |\n  {{{{ {name} }}}}\n").check(SAMPLE)
    message = f'({hint} or guard it: {{{{ {name} | default("") }}}})'
    assert str(caught.value).endswith(f"{name} is in none of the first 2 rows {message}")


def test_fields_in_single_braces_are_warned_of(prompt):
    raw = "{% raw %}{text}{% endraw %}"
    user = f"{{{{ text | default({{}}) }}}} {{ meta }} {{% if text %}}{{% endif %}}{raw}"
    found = prompt(f"prompt: {{system: 'Say {{text}} {{other}} ${{text}}', user: '{user}'}}\n")
    assert found.check(SAMPLE) == [
        "prompt.system: {text} is sent as it is; {{ text }} stands for the field",
        "prompt.user: {meta} is sent as it is; {{ meta }} stands for the field",
    ]


def test_images_of_the_row_and_of_the_job_are_sent_as_data(prompt, wrong, tmp_path):
    for name in ("row.png", "job.png"):
        (tmp_path / name).write_bytes(PNG)
    text = """\
prompt:
  messages:
    - role: user
      content: [{text: Look}, {image: '{{ name }}.png'}, {image: '{{ link }}'}, {image: job.png}]
"""
    found = prompt(text)
    assert found.fields == {"name", "link"}
    (tmp_path / "job.png").unlink()  # read already, once for all rows
    link = "https://x.org/b.jpg"
    look, *images = found.render({"name": "row", "link": link})[0]["content"]
    data = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert look == {"type": "text", "text": "Look"}
    assert images == [{"type": "image_url", "image_url": {"url": u}} for u in (data, link, data)]
    with pytest.raises(TemplateFailure, match=r"no such image: zz\.png"):
        found.render({"name": "zz", "link": link})
    assert wrong(text) == (
        "job.yaml:5:89: prompt.messages[0].content[3].image: no such image: job.png"
    )
