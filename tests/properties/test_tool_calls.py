"""Tool calls in the text of a reply, and the load in the metrics of an engine."""

from __future__ import annotations

import json
import math

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from bagent.agents.text_tool_calls import UnreadCallError, parse_text_tool_calls
from bagent.backends.engines.metrics import parse_load
from bagent.types import Json, Reply
from support.strategies import ODD_TEXT, json_objects, texts_of

TOOLS: list[Json] = [
    {"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}},
    {"function": {"name": "now", "parameters": {}}},
]
TEXTS = texts_of(
    "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>",
    "</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>",
    "<|python_end|>", "<function_calls>", "</function_calls>", "<|tool_call_begin|>functions.add:0",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call>call:add", '<|"|>',
    "<invoke name=\"add\">", "<parameter name=\"a\">", "</invoke>", "<arg_key>a</arg_key>",
    "<arg_value>", "</arg_value>", "to=functions.add", "<|channel|>commentary", "<|message|>",
    "<|call|>", "<|end|>", "add(a=", "[add(a=", ")", ")]", "{{", "}}", "{", "}", "[", "]", "'a'",
    '"a"', ":", ",", "1", "9" * 5000, "1e999", "None", "\\d", "\n", "```", "<think>", "</think>",
    "Thought: ", "Action: add\nAction Input: ", "Observation:", "<code>", "</code>",
    "<tool_use><name>add</name><arguments>", "</arguments></tool_use>",
    '{"tool_calls": ', '{"function_call": ',
    '{"name": "add", "arguments": ', '{"a": 1}', "null", "\0", odd=ODD_TEXT,
)  # fmt: skip


@given(TEXTS, st.booleans())
@example('<function=add><parameter=b>{{"a": 1}}</parameter></function>', True)
@example("[add(a={{}})]", True)
def test_any_reply_has_calls_with_json_arguments_or_is_refused(text, offered):
    reply = Reply(text, "stop")
    try:
        parsed = parse_text_tool_calls(reply, TOOLS if offered else ())
    except UnreadCallError as error:
        assert "\n" not in str(error)
        return
    assert parsed is reply or parsed.tool_calls
    for call in parsed.tool_calls:
        assert call.name


@given(json_objects(), st.sampled_from(["hermes", "mistral", "llama", "bare"]))
def test_a_call_in_json_has_its_arguments(arguments, form):
    call = json.dumps({"name": "add", "arguments": arguments})
    text = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "mistral": f"[TOOL_CALLS][{call}]",
        "llama": f"<|python_tag|>{call}",
        "bare": call,
    }[form]
    (parsed,) = parse_text_tool_calls(Reply(text, "stop"), TOOLS).tool_calls
    assert (parsed.name, msgspec.json.decode(parsed.arguments)) == ("add", arguments)


METRICS = texts_of(
    "vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs",
    "vllm:gpu_cache_usage_perc", "dynamo_frontend_queued_requests", "llamacpp:requests_processing",
    "{", "}", 'model_name="m"', 'priority="1"', 'tp_rank="0"', ",", " ", "\t", "\n", "1", "0.5",
    "1e400", "NaN", "-1", "# TYPE x gauge", "# {", '"', "\\", "1_0",
)  # fmt: skip


@given(METRICS.map(str.encode) | st.binary(max_size=20), st.none() | st.just("m"))
def test_any_metrics_are_a_load_of_finite_numbers_or_none(text, model):
    load = parse_load(text, 1.0, model)
    if load is not None:
        numbers = [n for n in msgspec.structs.astuple(load) if isinstance(n, float | int)]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
