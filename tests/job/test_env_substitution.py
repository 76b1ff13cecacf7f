"""``${VAR}`` in values."""

from __future__ import annotations

from operator import attrgetter

import pytest

ENV = {"N": "8", "HOST": "h1", "EMPTY": "", "LIST": "[a]"}


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("limits:\n  concurrency: ${N}", "limits.concurrency", 8),
        ('model: "${HOST}-${N}"', "model", "h1-8"),
        ("model: a${EMPTY}b", "model", "ab"),
        ("model: ${NO:-plan b}", "model", "plan b"),
        ("model: ${EMPTY:-d}", "model", "d"),
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
