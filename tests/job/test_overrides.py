"""``--set``, named options, and ``${VAR}`` in values."""

from __future__ import annotations

from operator import attrgetter

import pytest


@pytest.mark.parametrize(
    ("option", "path", "value"),
    [
        ("sampling.max_tokens=1e2", "sampling.max_tokens", 100),
        ("sampling.stop=[a, '08', 08]", "sampling.stop", ("a", "08", "08")),
        ("model='quoted: name'", "model", "quoted: name"),
        ("model=a=b", "model", "a=b"),
        ("where=*x", "where", "*x"),
        ("limits.timeout.total=none", "limits.timeout.idle", 120.0),
        ("backend=sim://?replicas=3", "backend.url.replicas", 3),
        ("prompt=New {{ a }}: {b: c}", "prompt.user.text", "New {{ a }}: {b: c}"),
    ],
)
def test_a_value_is_read_as_in_the_file(load, minimal, option, path, value):
    assert attrgetter(path)(load(minimal, sets=(option,))) == value


@pytest.mark.parametrize(
    ("text", "option", "path", "value"),
    [
        ("prompt: Say {{ text }}", "prompt.system=Be", "prompt.user.text", "Say {{ text }}"),
        ("backend: vllm", "backend.headers.X-A=b", "backend.headers", {"X-A": "b"}),
        ("limits: {timeout: 3s}", "limits.timeout.idle=1", "limits.timeout.total", 3.0),
        ("topology: reduce", "topology.fanin=4", "topology.name", "reduce"),
    ],
)
def test_a_key_of_a_short_form_keeps_the_rest(load, text, option, path, value):
    prompt = "" if text.startswith("prompt") else "prompt: hi\n"
    assert attrgetter(path)(load(f"input: x\n{prompt}{text}\n", sets=(option,))) == value


def test_a_number_leads_into_a_list(load, minimal):
    text = minimal + "agent: {tools: [{builtin: sql}, {builtin: http_get}]}\n"
    job = load(text, sets=("agent.tools.1.max_tokens=9", "agent.tools.2.builtin=read_file"))
    assert [tool.builtin for tool in job.agent.tools] == ["sql", "http_get", "read_file"]
    assert job.agent.tools[1].max_tokens == 9


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model", ": 'model' is not KEY=VALUE (write --set sampling.temperature=0.2)"),
        ("a..b=1", " a..b: a..b is no dotted key (write keys with dots, such as --set "),
        ("modle=x", " modle: unknown key modle (did you mean model?)"),
        ("model='a", " model: a quote is never closed (while scanning a quoted scalar that "),
        ("name.x=1", " name.x: name has no keys of its own (set it as a whole: --set KEY="),
        ("agent.tools.5.name=x", " agent.tools.5.name: agent.tools is a list of 1, it has no 5 "),
    ],
)
def test_a_wrong_option_is_named_in_the_message(fault, minimal, option, message):
    text = minimal + "name: n\nagent: {tools: [{builtin: sql}]}\n"
    assert fault(text, sets=(option,)).startswith(f"--set{message}")


def test_faults_of_options_come_before_those_of_the_file(fault, minimal):
    message = "--set model: expected text, got true (and 1 more) (quote it to make it text)"
    assert fault(minimal + "answers: 0\n", sets=("model=true",)) == message
    named = fault(minimal + "answers: 0\n", options={"limits.budget_usd": -1.0})
    assert named == "--budget: must be at least 0, got -1.0 (and 1 more)"


def test_a_later_set_wins_and_a_named_option_wins_over_all(load, minimal):
    sets = ("model=a", "model=b")
    assert load(minimal + "model: f\n", sets=sets).model == "b"
    assert load(minimal + "model: f\n", sets=sets, options={"model": "c"}).model == "c"
    assert load(minimal + "model: f\n", sets=("model=",)).model == "auto"


ENV = {"N": "8", "HOST": "h1", "EMPTY": "", "T": "true", "LIST": "[a]"}


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("limits:\n  concurrency: ${N}", "limits.concurrency", 8),
        ('model: "${HOST}-${N}"', "model", "h1-8"),
        ("model: a${EMPTY}b", "model", "ab"),
        ("model: ${NO:-plan b}", "model", "plan b"),
        ("model: ${EMPTY:-d}", "model", "d"),
        ("stream: '${T}'", "stream", True),
        ("model: ${LIST}", "model", "[a]"),
        ("model: $${HOST}", "model", "${HOST}"),
        ("model: $$${HOST}", "model", "$${HOST}"),
        ("backend: vllm://${HOST}:${N}000", "backend.base", "http://h1:8000"),
        ("sampling: {extra: {a: '${N}'}}", "sampling.extra", {"a": "8"}),
        ("sampling:\n  extra:\n    a: ${N}", "sampling.extra", {"a": 8}),
    ],
)
def test_a_variable_stands_for_its_value(load, minimal, line, path, value):
    found = attrgetter(path)(load(minimal + line + "\n", env=ENV))
    assert found == value
    assert type(found) is type(value)


def test_prompts_and_schemas_are_never_replaced(load, tmp_path):
    (tmp_path / "p.md").write_text("cost ${N}")
    text = """\
input: x
prompt:
  messages:
    - {role: system, content: {file: '${P}.md'}}
    - role: user
      content: [{text: 'pay ${N}'}, {image: '${N}.png'}]
output:
  schema: {type: string, pattern: '^${N}$'}
agent:
  tools:
    - {name: t, command: ['${HOST}'], parameters: {description: '${N}'}}
"""
    job = load(text, env={**ENV, "P": "p"})
    assert job.source.texts[tmp_path / "p.md"] == "cost ${N}"
    assert job.prompt.messages[1].content.parts[0].text == "pay ${N}"
    assert job.prompt.messages[1].content.parts[1].image == "${N}.png"
    assert job.output.schema_ == {"type": "string", "pattern": "^${N}$"}
    assert job.agent.tools[0].command == ("h1",)
    assert job.agent.tools[0].parameters == {"description": "${N}"}


def test_variables_stand_in_set_options_but_not_in_named_ones(load, fault, minimal):
    assert load(minimal, sets=("limits.concurrency=${N}",), env=ENV).limits.concurrency == 8
    assert load(minimal, options={"model": "${HOST}"}, env=ENV).model == "${HOST}"
    assert fault(minimal, sets=("model=${NO}",)).startswith("--set model: the environment variable")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "where: |\n  a\n  and ${NO}",
            "5:7: the environment variable NO is not set (export it, or ",
        ),
        ("model: ${NO", "3:8: ${NO is neither ${NAME} nor ${NAME:-default} (write $${ for "),
        ("limits: {concurrency: '${HOST}'}", "3:23: limits.concurrency: expected auto or a whole "),
    ],
)
def test_a_variable_that_cannot_be_replaced_is_a_fault(fault, minimal, line, message):
    assert fault(minimal + line + "\n", env=ENV).startswith(f"job.yaml:{message}")
