"""Tool calls that a server returns as text, in the dialects of model families."""

from __future__ import annotations

import msgspec
import pytest

from bagent.agents.text_tool_calls import UnreadCallError, parse_text_tool_calls
from bagent.types import Json, Reply, ToolCall
from support.jobs import results, write_job
from support.replies import ok

SCHEMAS = {
    "table": {"type": "string"},
    "count": {"type": "integer"},
    "tags": {"type": "array"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "free": {},
}
TOOLS: list[Json] = [
    {"function": {"name": "add", "parameters": {"properties": SCHEMAS}}},
    {"function": {"name": "now", "parameters": {}}},
]
J = '{"table": "birds", "count": 3}'
N = f'{{"name": "add", "arguments": {J}}}'
P = f'{{"name": "add", "parameters": {J}}}'
NOW = '{"name": "now", "arguments": {}}'
ADD = ("add", {"table": "birds", "count": 3})
XML = "<parameter=table>\nbirds\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
INVOKE = (
    '<{0}invoke name="add"><{0}parameter name="table">birds</{0}parameter>'
    '<{0}parameter name="count">3</{0}parameter></{0}invoke>'
)
GLM = (
    "<tool_call>add<arg_key>table</arg_key><arg_value>birds</arg_value>"
    "<arg_key>count</arg_key><arg_value>3</arg_value></tool_call>"
)


def calls_of(text: str, tools: list[Json] = TOOLS) -> list[tuple[str, Json]]:
    """Return the names and arguments of the calls in a reply of that text."""
    reply = parse_text_tool_calls(Reply(text, "stop"), tools)
    return [(call.name, msgspec.json.decode(call.arguments)) for call in reply.tool_calls]


ONE_CALL = {
    "hermes": f"<tool_call>\n{N}\n</tool_call>",
    "hermes after reasoning": f"<think>hm</think>\n<tool_call>{N}</tool_call>",
    "hermes after a stray end of reasoning": f"hm</think><tool_call>\n{N}\n</tool_call>",
    "hermes in reasoning without an end": f"<think>\nhm\n<tool_call>\n{N}\n</tool_call>",
    "hermes with arguments as text": '<tool_call>{"name": "add", "arguments": '
    + msgspec.json.encode(J).decode()
    + "}</tool_call>",
    "hermes with parameters": f"<tool_call>{P}</tool_call>",
    "xlam": f"<tool_call>[{N}]</tool_call>",
    "xlam bare": f"[{N}]",
    "llama 3": P,
    "llama 3 with its tag": f"<|python_tag|>{P}",
    "llama 3.1 custom": f"<function=add>{J}</function>",
    "pythonic": '[add(table="birds", count=3)]',
    "llama 4": '<|python_start|>[add(table="birds", count=3)]<|python_end|>',
    "lfm2": '<|tool_call_start|>[add(table="birds", count=3)]<|tool_call_end|>',
    "olmo 3": '<function_calls>\nadd(table="birds", count=3)\n</function_calls>',
    "mistral": f"Hello[TOOL_CALLS] [{N}]",
    "mistral 11": f"hi[TOOL_CALLS]add[ARGS]{J}",
    "mistral 11 with ids": f"[TOOL_CALLS]add[CALL_ID]x12[ARGS]{J}",
    "mistral 13": f"[TOOL_CALLS]add{J}",
    "qwen 3 coder": f"Sure.<tool_call>\n<function=add>\n{XML}</function>\n</tool_call>",
    "qwen 3 coder without ends": "<tool_call>\n<function=add>\n<parameter=table>\nbirds\n"
    "<parameter=count>\n3\n</tool_call>",
    "seed": f"<seed:tool_call>\n<function=add>\n{XML}</function>\n</seed:tool_call>",
    "glm": GLM,
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    f"<|tool_call_argument_begin|>{J}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek 3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    f"```json\n{J}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek 3.1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{J}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek 3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="table" string="true">birds</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "minimax m1": f"<tool_calls>\n{N}\n</tool_calls>",
    "jamba": f"<tool_calls>[\n    {N}\n]</tool_calls>",
    "minimax m2": f"<minimax:tool_call>\n{INVOKE.format('')}\n</minimax:tool_call>",
    "step 3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    + INVOKE.format("steptml:")
    + "<｜tool_call_end｜><｜tool_calls_end｜>",
    "granite 3": f"<|tool_call|>[{N}]",
    "granite 20b": f"<function_call> {N}",
    "internlm": f"<|action_start|><|plugin|>\n{P}<|action_end|>",
    "phi 4 mini": f"functools[{N}]",
    "nemotron": f"<TOOLCALL>[{N}]</TOOLCALL>",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": '
    f"{J}}}]<|END_ACTION|>",
    "gemma": '<|tool_call>call:add{table:<|"|>birds<|"|>,count:3}<tool_call|>',
    "apertus": f'<|tools_prefix|>[{{"add": {J}}}]<|tools_suffix|>',
    "gpt-oss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
    f" to=functions.add <|constrain|>json<|message|>{J}<|call|>",
    "gpt-oss with the recipient first": "<|start|>assistant to=functions.add<|channel|>commentary"
    f" json<|message|>{J}<|call|>",
    "gpt-oss without special tokens": f"analysishmassistantcommentary to=functions.add json{J}",
    "hermes in a code block": f"```xml\n<tool_call>{N}</tool_call>\n```",
    "hermes after a mention": f"I use a <tool_call> now.\n<tool_call>{N}</tool_call>",
    "json in a code block": f"```json\n{N}\n```",
    "json in a tool_call block": f"<think>hm</think>```tool_call\n{N}\n```",
    "gemma 3": '```tool_code\nadd(table="birds", count=3)\n```',
    "smolagents": '<code>\nadd(table="birds",\n    count=3)\n</code>',
    "python in a tool element": '<tool>add(table="birds", count=3)</tool>',
    "react": f"Thought: I look.\nHm.\nAction: add\nAction Input: {J}",
    "message of openai": f'{{"tool_calls": [{{"id": "x", "type": "function", "function": {N}}}]}}',
    "older message of openai": '{"function_call": {"name": "add", "arguments": '
    + msgspec.json.encode(J).decode()
    + "}}",
    "tool_name": f'{{"tool_name": "add", "tool_arguments": {J}}}',
    "tool_use": f"<tool_use>\n<name>add</name>\n<arguments>{J}</arguments>\n</tool_use>",
    "invoke in function_calls": f"<function_calls>\n{INVOKE.format('')}\n</function_calls>",
}


@pytest.mark.parametrize("dialect", ONE_CALL)
def test_a_call_in_the_text_is_read(dialect: str) -> None:
    assert calls_of(ONE_CALL[dialect]) == [ADD]


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{N}\n</tool_call>\n<tool_call>{NOW}</tool_call>",
        f'{P}; {{"name": "now", "parameters": {{}}}}',
        f"<function=add>{J}</function><function=now>{{}}</function>",
        f"[TOOL_CALLS]add[ARGS]{J}[TOOL_CALLS]now[ARGS]{{}} ",
        f"[TOOL_CALLS][{N}, {NOW}]",
        f"<function=add>\n{XML}</function>\n<function=now>\n</function>",
        f"{GLM}\n<tool_call>now\n</tool_call>",
        '<|python_start|>[add(table="birds", count=3), now()]<|python_end|>',
    ],
)
def test_several_calls_keep_their_order_and_get_their_own_ids(text: str) -> None:
    reply = parse_text_tool_calls(Reply(text, "stop"), TOOLS)
    assert [(call.id, call.name) for call in reply.tool_calls] == [
        ("call_0", "add"),
        ("call_1", "now"),
    ]
    assert calls_of(text) == [ADD, ("now", {})]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("table", "007", "007"),
        ("table", "a <b>\n c", "a <b>\n c"),
        ("note", "1628", "1628"),
        ("count", "1628", 1628),
        ("tags", "['a', True]", ["a", True]),
        ("free", '{"a": 1}', {"a": 1}),
        ("unknown", "5", "5"),
    ],
)
def test_an_argument_in_an_element_has_the_type_of_its_schema(parameter, text, value) -> None:
    call = f"<function=add>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>"
    assert calls_of(call) == [("add", {parameter: value})]


def test_braces_marks_and_line_breaks_inside_arguments_end_nothing() -> None:
    inner = '{"name": "say", "arguments": {"words": "} </tool_call> {\n", "more": {"a": {}}}}'
    text = f"<tool_call>{inner}</tool_call>"
    assert calls_of(text) == [("say", {"words": "} </tool_call> {\n", "more": {"a": {}}})]


def test_a_mark_inside_the_arguments_of_a_bare_call_begins_nothing() -> None:
    arguments = {"table": "birds", "note": "a <tool_call> {"}
    text = msgspec.json.encode({"name": "add", "arguments": arguments}).decode()
    assert calls_of(text) == [("add", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"name": "other", "arguments": {}}',
        '{"name": "add"}',
        f"Write it so:\n```\n<tool_call>{N}</tool_call>\n```",
        f"<think><tool_call>{N}</tool_call></think>Paris",
        f"The mark is `<tool_call>{N}`.",
        "You would write <tool_call> tags like this to call add.",
        "The tags are <tool_call></tool_call>, <function=add>, and [TOOL_CALLS].",
        'A call begins with <function=NAME> or <invoke name="NAME"> here.',
        '```xml\n<tool_call>{"name": "other", "arguments": {}}</tool_call>\n```',
        f"```\n{N}\n```\nor\n```\n{N}\n```",
        "```python\nother(a=1)\n```",
        "<code>add(count=3)</code> is the call.",
        "add(3)",
        f"Thought: hm\nAction: add\nAction Input: {J}\nObservation: 3\nFinal Answer: 3",
        '{"function_call": "add"}',
    ],
)
def test_other_text_is_an_answer(text: str) -> None:
    assert calls_of(text) == []


def test_text_before_a_call_stays_and_calls_that_the_server_read_go_before() -> None:
    reply = parse_text_tool_calls(Reply(f"I look.\n<tool_call>{N}</tool_call>", "stop"), TOOLS)
    assert reply.text == "I look."
    now = (ToolCall("c", "now", "{}"),)
    reply = Reply(f"<tool_call>{N}</tool_call>", "tool_calls", tool_calls=now)
    assert parse_text_tool_calls(reply, TOOLS) is reply
    assert calls_of(P, []) == [], "bare JSON is an answer where there are no tools"


@pytest.mark.parametrize(
    ("text", "parser"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "hermes"),
        ('<tool_call>{"arguments": {}}</tool_call>', "hermes"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "hermes"),
        ("```xml\n<tool_call>{'name': 'add'}</tool_call>\n```", "hermes"),
        ('<tool_call>{"name":' + "[" * 100_000, "hermes"),
        ("<function=add>\n<parameter=table>\nbirds\n</parameter>", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_start|>[add('birds')]<|python_end|>", "llama4_pythonic"),
        ("<｜DSML｜function_calls>add</｜DSML｜function_calls>", "deepseek_v32"),
        ("<|channel|>commentary to=functions.add<|message|>{broken<|call|>", "openai"),
    ],
)
def test_a_call_that_cannot_be_read_names_the_parser_of_the_server(text, parser) -> None:
    with pytest.raises(UnreadCallError, match=f"--tool-call-parser {parser}"):
        calls_of(text)


def test_an_agent_runs_calls_in_text_and_never_takes_one_as_its_answer(bagent, fs, job_dir) -> None:
    (job_dir / "tools.py").write_text(
        'def add(table: str) -> str:\n    """Add a row."""\n    return f"added to {table}"\n'
    )
    call = "<tool_call>add\n<arg_key>table</arg_key>\n<arg_value>birds</arg_value>\n</tool_call>"
    fs.set_script({"r1": [ok(call), ok("done")], "r2": [ok("<tool_call>add\n</nothing>")]})
    write_job(job_dir, fs.url, 2, agent={"tools": [{"python": "tools.py:add"}]})
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 1
    first, second = results(job_dir)
    assert (first["status"], first["text"], first["turns"]) == ("ok", "done", 2)
    assert "added to birds" in str(fs.of("r1")[1].body)
    assert (second["status"], second["error_kind"]) == ("failed", "bad_response")
    assert "--tool-call-parser" in second["error"]
    assert second["prompt_tokens"] and second["completion_tokens"]  # the reply was paid for
