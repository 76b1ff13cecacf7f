"""Chats and responses through the proxy, where an endpoint serves only one of them."""

from __future__ import annotations

import asyncio

import pytest

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.openai.raw_request import CHAT
from bagent.backends.request import encode_payload
from bagent.proxy.translate import TranslatingTransport
from bagent.text.json import decode_json
from support.fake_server import FakeServer
from support.provider_protocols import ModelAnswer, ResponsesWire
from support.provider_server import serve_in_thread
from support.proxy_calls import rows_of, through
from support.replies import delta, ok, stream
from support.simulated_fleets import simulated

CALLS = (("call_a", "weather", {"town": "Bonn"}),)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def responses(urls, run, work, **config):
    """What ``work`` returns for a client of the proxy in front of ``urls``."""

    import openai

    async def with_client(proxy, session):
        client = openai.AsyncOpenAI(base_url=proxy.url, api_key="x", max_retries=0)
        async with client:
            return await work(client)

    return through(urls, with_client, run, **config)


def only_responses(run, say, work):
    """The same in front of a server that has only responses, and the bodies that it got."""
    with serve_in_thread(ResponsesWire(), *say) as server:
        return responses([f"{server.url}/v1"], run, work), server.bodies, server.paths


def test_a_response_of_an_engine_with_chats_only(tmp_path):
    async def work(client):
        first = await client.responses.create(model="m", input="id=r1", instructions="Be brief.")
        again = await client.responses.create(model="m", input="id=r1", max_output_tokens=9)
        return first, again

    with FakeServer({"*": [ok("yes")]}) as fs:
        first, again = responses([fs.url], tmp_path / "run", work)
        sent = [seen for seen in fs.requests if seen.path.endswith("/chat/completions")]
    assert (first.output_text, again.output_text, first.status) == ("yes", "yes", "completed")
    assert first.usage.output_tokens
    assert [message["role"] for message in sent[0].body["messages"]] == ["system", "user"]
    assert sent[1].body["max_tokens"] == 9
    rows = rows_of(tmp_path / "run")
    assert [(row["status"], row["attempts"]) for row in rows] == [("ok", 1), ("ok", 1)]


def test_a_streamed_response_of_an_engine_with_chats_only(tmp_path):
    async def work(client):
        stream = await client.responses.create(model="m", input="id=r1", stream=True)
        return [event async for event in stream]

    with FakeServer({"r1": [stream([delta("a"), delta("b", "stop")])]}) as fs:
        events = responses([fs.url], tmp_path / "run", work)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert pieces == ["a", "b"]
    assert (events[-1].type, events[-1].response.output_text) == ("response.completed", "ab")


def test_what_chats_have_no_form_for_is_refused_in_one_sentence(tmp_path):
    import openai

    async def work(client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="x", previous_response_id="resp_1")
        return caught.value.message

    with FakeServer({"*": [ok("yes")]}) as fs:
        message = responses([fs.url], tmp_path / "run", work)
    reason = "chat completions have no previous_response_id"
    assert f"e0 serves no /v1/responses: {reason}" in message


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "$.messages[0].tool_calls[0]"),
        ({"stream_options": [1]}, "$.stream_options"),
        ({"response_format": "json"}, "$.response_format"),
        ({"stop": ["a"]}, "responses have no stop"),
        ({"frequency_penalty": 1}, "responses have no frequency_penalty"),
    ],
)
def test_a_chat_that_responses_have_no_form_for_is_refused(more, reason):
    body = {"model": "gpt-5-pro", "messages": [{"role": "user", "content": "hi"}], **more}

    async def main():
        endpoint = Endpoint("e0", "http://127.0.0.1:9/v1")
        async with TranslatingTransport(Transport()).post(
            endpoint, CHAT, encode_payload(body), Timeouts()
        ) as response:
            return response.status, b"".join([chunk async for chunk in response.iter_any()])

    status, raw = asyncio.run(main())
    error = decode_json(raw)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert reason in error["message"]


def test_a_chat_of_a_model_with_responses_only(tmp_path):
    messages = [{"role": "user", "content": "The weather?"}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]

    async def work(client):
        async def ask(**more):
            return await client.chat.completions.create(
                model="gpt-5-pro", messages=messages, tools=tools, seed=1, **more
            )

        first = (await ask()).choices[0].message
        messages.append(first.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": "call_a", "content": "rain"})
        chunks = [
            chunk async for chunk in await ask(stream=True, stream_options={"include_usage": True})
        ]
        return first, chunks

    say = ModelAnswer(text=None, calls=CALLS, stop="tool_calls", thought="Hm."), ModelAnswer()
    (first, chunks), bodies, paths = only_responses(tmp_path / "run", say, work)
    assert first.tool_calls[0].function.name == "weather"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (text, chunks[-1].usage.completion_tokens) == ("hello world", 7)
    assert paths == ["/v1/responses"] * 2
    assert "seed" not in bodies[0]
    # The client sent back the call only; the reasoning before it went with it.
    kinds = [item.get("type", item.get("role")) for item in bodies[1]["input"]]
    assert kinds == ["user", "reasoning", "function_call", "function_call_output"]


def test_responses_of_a_simulated_engine_go_through_as_they_are(tmp_path):
    async def work(client):
        asked = {"model": "simulated-8b", "input": "Hello", "max_output_tokens": 300}
        response = await client.responses.create(**asked)
        calling = {**asked, "tools": [TOOL], "tool_choice": "required"}
        events = [event async for event in await client.responses.create(**calling, stream=True)]
        return response, events

    with simulated("speedup=1000") as sim:
        response, events = responses([f"{sim.urls[0]}/v1"], tmp_path / "run", work, own=True)
    assert response.output_text
    assert events[-1].response.output[0].name == "weather"
    assert [row["completion_tokens"] is not None for row in rows_of(tmp_path / "run")] == [True] * 2
