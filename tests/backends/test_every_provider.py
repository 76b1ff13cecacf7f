"""What all six backends do alike, against servers in each one's wire form."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast, get_args

import pytest

from bagent.answers.evaluate import evaluate
from bagent.backend_kinds import TRAITS, WAIT, BackendKind
from bagent.backends.base import Timeouts
from bagent.backends.bedrock.backend import BedrockConfig
from bagent.backends.http.client import Transport
from bagent.backends.keys import KeySource
from bagent.backends.messages import assistant_message
from bagent.backends.registry import BackendConfig, make_backend, unsupported_settings
from bagent.backends.request import CallSettings, OutputFormat, Request, encode_payload
from bagent.errors import UsageError
from bagent.money.prices import known_prices
from bagent.types import Failure, Json, Message, Reply, ToolCall
from support.provider_calls import ENGINES, PROVIDERS, QUICK, SECRET, WEATHER, Provider, ask, call
from support.provider_protocols import ModelAnswer
from support.provider_server import Fault, serve

CALLS = (("call_a", "weather", {"town": "Bonn"}), ("call_b", "weather", {"town": "Köln"}))
SCHEMA = OutputFormat(
    "answer",
    b'{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],'
    b'"additionalProperties":false}',
    True,
)


def name(provider: Provider) -> str:
    return f"{provider.kind}-{provider.api}"


@pytest.fixture(params=[*PROVIDERS, ENGINES[0]], ids=name)
def provider(request: pytest.FixtureRequest) -> Provider:
    found: Provider = request.param
    return found


OWN_PROTOCOL = ("anthropic", "bedrock")
"""The others speak OpenAI's."""

every_engine = pytest.mark.parametrize("provider", [*PROVIDERS, *ENGINES], ids=lambda one: one.kind)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@every_engine
@both_ways
def test_an_answer_has_its_text_its_end_and_its_tokens(provider: Provider, stream: bool) -> None:
    talk = ask(provider, ModelAnswer(text="hello world"), calls=[call(stream=stream)])
    found = talk.reply
    assert (found.text, found.finish_reason) == ("hello world", "stop")
    assert (found.usage.prompt, found.usage.cached, found.usage.completion) == (30, 20, 7)
    assert found.model == "m-1"
    assert found.blocks is None
    (exchange,) = talk.exchanges
    assert (exchange.status, exchange.stale_connection, exchange.learned) == (200, False, False)
    assert exchange.sent <= (exchange.first_token or exchange.done) <= exchange.done
    assert (found.ttft_ms is not None) == stream


def test_the_beginning_of_a_streamed_answer_is_told_once(provider: Provider) -> None:
    begun: list[str] = []
    text, tools = call(stream=True), call(stream=True, tools=(WEATHER,))
    text.began, tools.began = lambda: begun.append("text"), lambda: begun.append("tools")
    says = ModelAnswer(), ModelAnswer(text=None, calls=CALLS, stop="tool_calls")
    assert ask(provider, *says, calls=[text, tools]).reply.tool_calls
    assert begun == ["text", "tools"]


@both_ways
def test_tool_calls_come_with_whole_arguments(provider: Provider, stream: bool) -> None:
    told: list[ToolCall] = []
    say = ModelAnswer(text=None, calls=CALLS, stop="tool_calls")
    asked = call(stream=stream, tools=(WEATHER,))
    asked.watch = lambda: told.append
    talk = ask(provider, say, calls=[asked])
    found = talk.reply
    assert found.finish_reason == "tool_calls"
    assert [(c.id, c.name, json.loads(c.arguments)) for c in found.tool_calls] == list(CALLS)
    assert told == (list(found.tool_calls) if stream else [])
    assert "weather" in json.dumps(talk.server.body)


@every_engine
@both_ways
def test_a_conversation_with_tools_and_thinking_goes_on(provider: Provider, stream: bool) -> None:
    asked = ModelAnswer(text="Let me look.", calls=CALLS, stop="tool_calls", thought="Two towns.")
    first = ask(provider, asked, calls=[call(stream=stream, tools=(WEATHER,))]).reply
    assert first.reasoning == "Two towns."
    messages = [
        {"role": "user", "content": "The weather?"},
        assistant_message(first),
        {"role": "tool", "tool_call_id": "call_a", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_b", "content": ""},
        {"role": "user", "content": "In one word."},
    ]
    # What is journaled and read back must serve as well.
    messages = json.loads(encode_payload(messages))
    talk = ask(
        provider, ModelAnswer(text="wet"), calls=[call(*messages, stream=stream, tools=(WEATHER,))]
    )
    assert talk.reply.text == "wet"
    if provider.api == "responses":
        kinds = [item.get("type", item.get("role")) for item in talk.server.body["input"]]
        assert kinds == ["user", "reasoning", "message", *["function_call"] * 2,
                         *["function_call_output"] * 2, "user"]  # fmt: skip
        assert talk.server.body["input"][1]["encrypted_content"] == "s1g=="
        assert talk.server.body["include"] == ["reasoning.encrypted_content"]
    elif provider.kind in OWN_PROTOCOL:
        assert "s1g==" in json.dumps(talk.server.body["messages"][1])
        assert len(talk.server.body["messages"]) == 3


@pytest.mark.parametrize("kind", ["cut", "ends", "inner"])
def test_a_stream_that_breaks_off_is_no_answer(provider: Provider, kind: str) -> None:
    fault = Fault(kind, after=4, say=ModelAnswer(text="hello world, and all of you"))
    found = ask(provider, fault, calls=[call(stream=True)]).failure
    assert found.passing
    assert found.kind == ("overloaded" if kind == "inner" else "bad_response")
    assert found.text
    assert "hello world, and all of you".startswith(found.text)


async def test_nobody_at_the_address_is_told_as_no_connection(
    provider: Provider, unused_port: int
) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    backend = provider.backend(url)
    exchange = await backend.send(provider.endpoint(url), [call()], QUICK)
    await backend.close()
    assert not exchange.connected
    (found,) = exchange.results
    assert (found.kind, found.passing) == ("connect", True)


@pytest.mark.parametrize(
    ("limits", "after", "words"),
    [
        (Timeouts(total=0.2), 0, "no whole answer from here within 0.2 s"),
        (Timeouts(first_token=0.2, total=9), 0, "here sent no first token within 0.2 s"),
        (Timeouts(idle=0.2, total=9), 4, "here sent nothing more within 0.2 s"),
    ],
    ids=["total", "first token", "idle"],
)
def test_an_answer_is_waited_for_no_longer_than_its_limits(
    provider: Provider, limits: Timeouts, after: int, words: str
) -> None:
    fault = Fault("hang", after=after, say=ModelAnswer(text="hello world, and all of you"))
    found = ask(provider, fault, calls=[call(stream=True)], timeouts=limits).failure
    assert (found.kind, found.passing) == ("timeout", True)
    assert found.message.replace(" for ", " within ") == words


@both_ways
def test_a_schema_is_asked_for_natively(provider: Provider, stream: bool) -> None:
    talk = ask(provider, ModelAnswer(text='{"n":1}'), calls=[call(stream=stream, output=SCHEMA)])
    assert talk.reply.text == '{"n":1}'
    body = talk.server.body
    if provider.api == "responses":
        told = {"name": "answer", "schema": json.loads(SCHEMA.document), "strict": True}
        assert body["text"] == {"format": {"type": "json_schema", **told}}
    elif provider.kind not in OWN_PROTOCOL:
        assert body["response_format"]["json_schema"]["schema"]["required"] == ["n"]
    elif provider.kind == "anthropic":
        told = {"type": "json_schema", "schema": json.loads(SCHEMA.document)}
        assert body["output_config"] == {"format": told}
    else:
        told = body["outputConfig"]["textFormat"]
        assert told["type"] == "json_schema"
        assert told["structure"]["jsonSchema"]["schema"] == SCHEMA.document.decode()


_REFUSED_SCHEMA = {
    "openai": "response_format of type json_schema is not supported",
    "anthropic": "output_config.format: Extra inputs are not permitted",
    "bedrock": "This model doesn't support the outputConfig.textFormat field.",
}


def test_a_refused_schema_is_asked_for_in_words_from_then_on(provider: Provider) -> None:
    asked = call(output=SCHEMA)
    fault = Fault(f"bad:{_REFUSED_SCHEMA.get(provider.kind, _REFUSED_SCHEMA['openai'])}")
    talk = ask(provider, fault, ModelAnswer(text='{"n":1}'), calls=[asked, asked])
    assert talk.exchanges[0].learned
    assert talk.reply.text == '{"n":1}'
    assert len(talk.notices) == 1
    last = talk.server.bodies[1]
    assert not {"response_format", "output_config", "outputConfig", "text"} & last.keys()
    if provider.kind in OWN_PROTOCOL:
        assert "additionalProperties" in json.dumps(last["system"])


def test_a_refused_temperature_is_left_out_and_said(provider: Provider) -> None:
    asked = call(sampling={"temperature": 0, "top_p": 0.9})
    fault = Fault("bad:Unsupported value: 'temperature' does not support 0 with this model.")
    talk = ask(provider, fault, ModelAnswer(), calls=[asked, asked])
    assert talk.exchanges[0].learned
    assert talk.reply.text
    assert "temperature" in json.dumps(talk.server.bodies[0])
    assert "temperature" not in json.dumps(talk.server.bodies[1])
    (notice,) = talk.notices
    assert "refuses temperature" in notice


def test_system_texts_and_neighbours_of_one_role_keep_their_order(provider: Provider) -> None:
    messages: list[Message] = [
        {"role": "system", "content": "first rule"},
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
        {"role": "system", "content": "second rule"},
        {"role": "user", "content": "four"},
    ]
    talk = ask(provider, ModelAnswer(), calls=[call(*messages)])
    assert talk.reply.text
    text = json.dumps(talk.server.body)
    places = [text.index(word) for word in ('"one"', '"two"', '"three"', '"four"')]
    assert places == sorted(places)
    if provider.kind in OWN_PROTOCOL:
        assert [block["text"] for block in talk.server.body["system"]] == [
            "first rule",
            "second rule",
        ]


def test_images_travel_in_the_providers_form(provider: Provider) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    content = [{"type": "text", "text": "What is it?"}, image]
    talk = ask(provider, ModelAnswer(), calls=[call({"role": "user", "content": content})])
    assert talk.reply.text
    _, sent = talk.server.body.get("messages", talk.server.body.get("input"))[0]["content"]
    if provider.api == "responses":
        url = image["image_url"]["url"]
        assert sent == {"type": "input_image", "image_url": url, "detail": "auto"}
    elif provider.kind == "anthropic":
        source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
        assert sent == {"type": "image", "source": source}
    elif provider.kind == "bedrock":
        assert sent == {"image": {"format": "png", "source": {"bytes": "iVBORw0KGgo="}}}
    else:
        assert sent == image


@pytest.mark.parametrize(
    "provider", [one for one in (*PROVIDERS, ENGINES[0]) if one.api == "auto"], ids=name
)
def test_a_body_of_the_users_own_is_put_into_the_providers_form(provider: Provider) -> None:
    body = {
        "model": "theirs",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "temperature": 0.5,
        "max_completion_tokens": 12,
        "tools": [WEATHER],
    }
    talk = ask(provider, ModelAnswer(), calls=[Request(CallSettings(None, {}, {}), b"", body=body)])
    assert talk.reply.text
    text = json.dumps(talk.server.body)
    assert all(word in text for word in ("0.5", "12", "weather"))
    named = talk.server.body.get("model") or talk.server.paths[0]
    assert "theirs" in named


async def test_an_expired_key_is_renewed_once_for_all_calls_in_flight(provider: Provider) -> None:
    asked: list[str] = []
    notices: list[str] = []

    def newer() -> str:
        asked.append("asked")
        return "key-of-today"

    async with serve(provider.wire(), ModelAnswer()) as server:
        server.key = "key-of-today"
        keys = KeySource("key-of-yesterday", newer, notices.append)
        backend = provider.backend(server.url, keys=keys)
        to = provider.endpoint(server.url, "key-of-yesterday")
        first, second = [
            await asyncio.gather(*(backend.send(to, [call()], QUICK) for _ in range(5)))
            for _ in range(2)
        ]
        server.key = "key-of-tomorrow"
        late = await backend.send(to, [call()], QUICK)
        await backend.close()
    assert [exchange.new_key for exchange in (*first, late)] == [True] * 5 + [False]
    assert all(isinstance(exchange.results[0], Reply) for exchange in second)
    assert late.results[0].kind == "auth"
    assert len(asked) == 2
    assert not any("key-of" in notice for notice in notices)


async def test_a_401_of_an_endpoint_with_its_own_key_renews_no_other(provider: Provider) -> None:
    def newer() -> str:
        raise AssertionError("the key of the other endpoints was not refused")

    async with serve(provider.wire(), ModelAnswer()) as server:
        server.key = "key-of-today"
        backend = provider.backend(server.url, keys=KeySource("key-of-the-fleet", newer))
        own = provider.endpoint(server.url, "key-of-its-own")
        exchange = await backend.send(own, [call()], QUICK)
        await backend.probe(own, 5.0)
        await backend.close()
    assert isinstance(exchange.results[0], Failure)
    assert not exchange.new_key


def test_a_conversation_that_another_server_held_goes_on(provider: Provider) -> None:
    """Ids that come again, a result that is missing, blocks of a provider that is another."""
    call_0 = {"id": "call_0", "function": {"name": "weather", "arguments": "{}"}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call_0, {**call_0, "id": "f.x:1"}]}
    foreign: list[Json] = [{"type": "thinking", "thinking": "Hm.", "signature": "else"}]
    if provider.kind == "anthropic":
        foreign = [{"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "else"}}}]
    messages: list[Message] = [
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "The weather?"},
        asked,
        {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
        {"role": "tool", "tool_call_id": "f.x:1", "content": "sun"},
        {**asked, "provider_blocks": foreign},
        {"role": "user", "content": "Well?"},
        {"role": "tool", "tool_call_id": "call_0", "content": "snow"},
    ]
    talk = ask(provider, ModelAnswer(text="wet"), calls=[call(*messages, tools=(WEATHER,))])
    assert talk.reply.text == "wet"
    sent = json.dumps(talk.server.body)
    assert "provider_blocks" not in sent
    assert "else" not in sent
    assert [sent.count(word) for word in ("rain", "sun", "snow")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("fault", "kind", "passing", "busy"),
    [
        ("throttled", "rate_limited", True, True),
        ("overloaded", "overloaded", True, True),
        ("no_money", "budget", False, False),
        ("bad_key", "auth", False, False),
        ("too_long", "context_overflow", False, False),
    ],
)
def test_a_refusal_has_its_kind_and_shows_no_key(
    provider: Provider, fault: str, kind: str, passing: bool, busy: bool
) -> None:
    talk = ask(provider, Fault(fault), calls=[call(), call(stream=True)])
    whole, streamed = (exchange.results[0] for exchange in talk.exchanges)
    found = talk.failure
    assert whole == streamed == found
    assert (found.kind, found.passing, found.busy) == (kind, passing, busy)
    assert SECRET not in found.message
    assert ("***" in found.message) == (fault == "bad_key")
    if fault == "throttled":
        wait = None if WAIT in unsupported_settings(provider.kind).not_reported else 2.0
        assert (found.status, found.retry_after) == (429, wait)


@both_ways
def test_an_answer_that_was_cut_or_refused_is_told_as_such(
    provider: Provider, stream: bool
) -> None:
    says = ModelAnswer(text="hel", stop="length"), ModelAnswer(text=None, stop="refusal")
    cut, refused = ask(provider, *says, calls=[call(stream=stream)] * 2).exchanges
    assert evaluate(cut.results[0], None).status == "truncated"
    assert evaluate(refused.results[0], None).status == "refused"


def test_every_kind_that_a_job_may_name_has_traits_and_a_backend():
    assert tuple(TRAITS) == get_args(BackendKind)
    config = BackendConfig(bedrock=BedrockConfig(1, region="us-east-1"))
    for kind in TRAITS:
        assert make_backend(kind, Transport(), config) is not None


def test_an_unknown_kind_is_refused_and_not_called_as_an_openai_server():
    with pytest.raises(UsageError, match="there is no backend gemini"):
        make_backend(cast("Any", "gemini"), Transport(), BackendConfig())
    assert unsupported_settings("gemini").text() == ""


def test_providers_with_prices_are_those_of_the_price_list():
    assert {traits.prices for traits in TRAITS.values() if traits.prices} == {
        price.provider for price in known_prices()
    }


def test_an_engine_is_known_by_the_name_that_it_reports():
    assert unsupported_settings("llama.cpp") == unsupported_settings("local")
    assert unsupported_settings("llama.cpp").unsupported == ("batches of chats",)
