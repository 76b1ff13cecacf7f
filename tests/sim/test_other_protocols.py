"""OpenAI's responses and Anthropic's messages, as clients read the simulated engine."""

from __future__ import annotations

import json

import aiohttp
import pytest

from bagent.backends.anthropic import read_message
from support.sim_client import on_sim
from support.simulated_fleets import simulated

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(scope="module")
def client():
    import openai

    with simulated("speedup=1000") as sim:
        yield openai.OpenAI(base_url=f"{sim.urls[0]}/v1", api_key="x", max_retries=0)


def ask(client, **more):
    given = {"model": "simulated-8b", "input": "Hello", "max_output_tokens": 300, **more}
    return client.responses.create(**given)


def test_a_streamed_response_is_the_whole_one_in_pieces(client):
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final = events[-1]
    assert final.type == "response.completed"
    assert final.response.output_text == text == ask(client).output_text


def test_schemas_and_tools_of_responses_hold(client):
    form = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    assert set(json.loads(ask(client, text=form).output_text)) == {"n"}
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    [call] = ask(client, tools=[tool], tool_choice="required").output
    assert (call.type, call.name) == ("function_call", "weather")
    events = list(ask(client, tools=[tool], tool_choice="required", stream=True))
    assert events[-1].response.output[0].arguments == call.arguments
    answered = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "Hello"}, call.model_dump(), answered]
    assert ask(client, input=items).output_text


MESSAGE = {"model": "simulated-8b", "max_tokens": 300, "system": "Be brief."}
USER = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}


@on_sim("speedup=1000")
async def test_a_message_is_read_as_anthropics(client):
    status, body = await client.post("/v1/messages", {**MESSAGE, "messages": [USER]})
    reply = read_message(json.dumps(body).encode(), "application/json", {})
    assert (status, reply.finish_reason) == (200, "stop")
    assert reply.text
    assert reply.usage.prompt and reply.usage.completion
    tool = {"name": "weather", "input_schema": PARAMETERS}
    asked = {**MESSAGE, "tools": [tool], "tool_choice": {"type": "any"}, "messages": [USER]}
    _, body = await client.post("/v1/messages", asked)
    [block] = body["content"]
    assert (body["stop_reason"], block["name"]) == ("tool_use", "weather")
    answer = {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
    turns = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [answer]}]
    status, body = await client.post("/v1/messages", {**MESSAGE, "messages": turns})
    assert (status, body["stop_reason"]) == (200, "end_turn")


@on_sim("speedup=1000")
async def test_a_streamed_message_is_the_whole_one_in_pieces(client: aiohttp.ClientSession):
    asked = {**MESSAGE, "messages": [USER]}
    _, whole = await client.post("/v1/messages", asked)
    sent = {**asked, "stream": True}
    async with client.session.post(f"{client.url}/v1/messages", json=sent) as answer:
        lines = (await answer.text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [e["type"] for e in events]
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@on_sim("speedup=1000")
async def test_a_body_that_is_none_of_the_protocol_is_refused(client):
    for path, body in (("/v1/responses", {"input": 3}), ("/v1/messages", {}), ("/v1/messages", [])):
        status, refusal = await client.post(path, body)
        assert (status, bool(refusal["error"]["message"])) == (400, True)
