"""OpenAI's responses: which models need them, what the API lacks, how turns go on."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from bagent.backends.messages import assistant_message
from bagent.backends.openai.responses import (
    ResponsesStream,
    ResponsesWriter,
    input_items,
    needs_responses,
    read_response,
)
from bagent.backends.openai.responses_server import chat_request
from bagent.backends.registry import check_supported
from bagent.backends.request import Request, encode_payload
from bagent.check.sample import parameters
from bagent.errors import JobError, UsageError
from bagent.job.load import JobRequest, load_job
from bagent.types import Failure, Reply
from support.backend_calls import PLAIN, endpoint, failure, request
from support.backend_calls import ask as ask_here
from support.provider_calls import PROVIDERS, QUICK, WEATHER, ask, call
from support.provider_protocols import ModelAnswer, ResponsesWire
from support.provider_server import Fault, serve
from support.replies import error_body, status

OPENAI, RESPONSES, *_ = PROVIDERS
AUTO = type(OPENAI)("openai", ResponsesWire)
REFUSED = "This model is only supported in v1/responses and not in v1/chat/completions"


def test_the_models_that_need_responses_are_those_of_the_sdk():
    # Read, not imported: importing the SDK takes a second.
    package = find_spec("openai")
    assert package is not None and package.origin is not None
    module = Path(package.origin).parent / "types/shared/responses_model.py"
    names = re.findall(r'^ +"(.+)",$', module.read_text(encoding="utf-8"), re.MULTILINE)
    assert "o1-pro" in names
    assert [name for name in names if not needs_responses(name)] == []
    assert not needs_responses("gpt-5")


@pytest.mark.parametrize(
    ("model", "script", "paths"),
    [
        ("gpt-5-pro-2025-10-06", [], ["/v1/responses"] * 2),
        ("m-1", [Fault(f"bad:{REFUSED}")], ["/v1/chat/completions", "/v1/responses"]),
    ],
    ids=["known", "taught by a refusal"],
)
def test_a_model_that_needs_responses_is_called_there(model, script, paths):
    calls = [call(model=model), call(model=model)]
    talk = ask(AUTO, *script, ModelAnswer(), calls=calls)
    assert talk.reply.text
    assert talk.server.paths == paths
    assert talk.server.bodies[-1]["store"] is False
    assert talk.exchanges[0].learned == bool(script)
    assert ["by /responses only" in notice for notice in talk.notices] == [True] * len(script)


async def test_every_chat_in_flight_is_sent_again_as_a_response():
    async with serve(AUTO.wire(), Fault(f"bad:{REFUSED}")) as server:
        notices: list[str] = []
        backend = AUTO.backend(server.url, notices.append)
        to = AUTO.endpoint(server.url)
        exchanges = await asyncio.gather(*(backend.send(to, [call()], QUICK) for _ in range(3)))
        await backend.close()
    assert server.paths == ["/v1/chat/completions"] * 3
    assert [exchange.learned for exchange in exchanges] == [True] * 3
    assert len(notices) == 1


def test_a_refused_raw_prompt_is_not_sent_again(fs):
    fs.set_script({"*": [status(404, error_body(404, REFUSED))]})
    raw = Request(PLAIN, encode_payload("x"), prompt="x", path="/completions")
    exchange = ask_here(endpoint(fs.url), raw)
    assert (failure(exchange).status, exchange.learned) == (404, False)


def test_a_server_without_responses_is_called_that(fs):
    result = failure(ask_here(endpoint(f"{fs.url}"), request(), api="responses"))
    assert (result.status, "write backend: {url: ..., api: chat}" in result.message) == (404, True)


def test_encrypted_reasoning_that_is_refused_is_no_longer_requested():
    fault = Fault("bad:Encrypted content is not supported with this model.")
    asked = call(tools=(WEATHER,))
    talk = ask(RESPONSES, fault, ModelAnswer(), calls=[asked, asked])
    assert talk.reply.text
    assert ["include" in body for body in talk.server.bodies] == [True, False]


@pytest.mark.parametrize(("own", "limit"), [(True, 1), (False, 16)])
def test_a_limit_is_at_least_what_openai_takes(own, limit):
    least = {"least_limit": 1} if own else {}
    body = json.loads(ResponsesWriter("m", **least).body(call(max_tokens=1)))
    assert body["max_output_tokens"] == limit


def test_check_shows_the_parameters_of_responses():
    shown = parameters(call(max_tokens=64), "m-1", native_schema=True, api="responses")
    assert shown == {"model": "m-1", "store": False, "max_output_tokens": 64}


def test_settings_of_chats_have_the_names_of_responses():
    sampling = {"temperature": 0, "reasoning_effort": "low", "logprobs": True, "top_logprobs": 2}
    choice = {"type": "function", "function": {"name": "weather"}}
    extra = {"tool_choice": choice, "verbosity": "low"}
    asked = call(sampling=sampling, tools=(WEATHER,), extra=extra)
    body = ask(RESPONSES, ModelAnswer(), calls=[asked]).server.body
    assert (body["reasoning"], body["top_logprobs"]) == ({"effort": "low"}, 2)
    assert body["text"]["verbosity"] == "low"
    assert "message.output_text.logprobs" in body["include"]
    assert body["tool_choice"] == {"type": "function", "name": "weather"}
    assert body["tools"] == [{"type": "function", "strict": False, **WEATHER["function"]}]


FAILED = {"status": "failed", "output": [], "error": {"code": "server_error", "message": "Oh no"}}


def test_a_failed_response_is_a_failure_whole_and_streamed():
    whole = read_response(json.dumps(FAILED).encode(), {})
    stream = ResponsesStream(0.0, lambda: 0.0)
    event = {"type": "response.failed", "response": FAILED}
    stream.feed(f"data: {json.dumps(event)}\n\n".encode())
    for result in (whole, stream.result()):
        assert isinstance(result, Failure)
        assert "Oh no" in result.message


def test_a_stream_whose_last_event_lacks_the_items_has_those_that_came():
    item = {"type": "message", "content": [{"type": "output_text", "text": "hi"}]}
    stream = ResponsesStream(0.0, lambda: 0.0)
    for event in (
        {"type": "response.output_item.done", "item": item},
        {"type": "response.completed", "response": {"status": "completed", "output": []}},
    ):
        stream.feed(f"data: {json.dumps(event)}\n\n".encode())
    result = stream.result()
    assert isinstance(result, Reply)
    assert result.text == "hi"


def test_turns_become_chats_again():
    calls = (("call_a", "weather", {"town": "Bonn"}),)
    say = ModelAnswer(text="Let me look.", calls=calls, stop="tool_calls", thought="One town.")
    reply = ask(RESPONSES, say, calls=[call(tools=(WEATHER,))]).reply
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "The weather?"},
                                     {"type": "image_url", "image_url": {"url": "https://x/y"}}]},
        assistant_message(reply),
        {"role": "tool", "tool_call_id": "call_a", "content": "rain"},
    ]  # fmt: skip
    body = {"input": input_items(messages), "instructions": "Be brief."}
    chat = chat_request({**body, "text": {"verbosity": "low"}})
    assert chat["verbosity"] == "low"
    back = chat["messages"]
    assert back[0] == {"role": "system", "content": "Be brief."}
    assert back[1] == messages[0]
    assert (back[2]["content"], back[2]["reasoning_content"]) == ("Let me look.", "One town.")
    assert back[2]["tool_calls"] == messages[1]["tool_calls"]
    assert back[3] == messages[2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"previous_response_id": "resp_1", "input": "x"}, "no previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "no tool of the type web_search"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "no input item of the type item_ref"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "content must be a list of objects"),
        ({"input": [{"content": [{"type": "input_file"}]}]}, "no content of the type input_file"),
    ],
)
def test_what_chats_have_no_form_for_is_named(body, message):
    with pytest.raises(ValueError, match=message):
        chat_request(body)


@pytest.mark.parametrize(
    ("raw", "batching", "message"),
    [(True, "auto", "raw prompts"), (False, "completions", "mode: completions")],
)
def test_what_responses_lack_is_refused_before_the_run(raw, batching, message):
    with pytest.raises(UsageError, match=message):
        check_supported("vllm", frozenset(), raw=raw, batching=batching, api="responses")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend: {url: anthropic, api: responses}", "backend anthropic has an API of its own"),
        ("api: responses", "it belongs to backend"),
    ],
)
def test_the_api_stands_beside_the_address_of_a_server_like_openais(text, message):
    with pytest.raises(JobError, match=message):
        load_job(JobRequest(text=f"{text}\nprompt: x\ninput: x.jsonl\n"))
