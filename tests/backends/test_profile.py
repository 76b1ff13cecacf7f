"""What an endpoint teaches: refusals in the words of many servers, and optional features."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from bagent.backends.endpoint import Endpoint
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.profile import EndpointForms, EndpointProfiles, Form
from bagent.backends.request import CallSettings, OutputFormat, Request
from bagent.types import Failure, Reply
from support.backend_calls import PLAIN, QUICK, backend, endpoint, reply, request
from support.fake_server import FakeServer
from support.replies import error_body, ok, ok_tools, status, tool_call

HERE = Endpoint("here", "http://here/v1")
SAMPLING = {"temperature": 0, "top_p": 0.9, "top_k": 5, "seed": 1}


def taught(words: str, **fields: Any) -> tuple[bool, Form, list[str]]:
    """Whether a refusal taught anything, the form after it, what people were told."""
    notices: list[str] = []
    forms = EndpointForms(EndpointProfiles(), "auto", notices.append)
    sent = Request(CallSettings("m", SAMPLING, {}), b"[]", **fields)
    failure = Failure("rejected", f"HTTP 400: {words}", status=400)
    learned = forms.learn(HERE, sent, failure, Form())
    return learned, forms.of(HERE, sent), notices


RENAMED = Form(completion_limit="max_completion_tokens")


def without(name: str) -> Form:
    return Form(without=frozenset({name}))


NO_TEMPERATURE = without("temperature")


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ("Unsupported parameter: 'max_tokens' is not supported with this model. Use"
         " 'max_completion_tokens' instead.", RENAMED),
        ("Please use `max_completion_tokens` instead of `max_tokens` for this model", RENAMED),
        ("Unsupported value: 'temperature' does not support 0 with this model.", NO_TEMPERATURE),
        ("invalid temperature: only 1 is allowed for this model", NO_TEMPERATURE),
        ("`temperature` is deprecated for this model.", NO_TEMPERATURE),
        ("`temperature` may only be set to 1 when thinking is enabled.", NO_TEMPERATURE),
        ("This model doesn't support the temperature field.", NO_TEMPERATURE),
        ("`temperature` and `top_p` cannot both be specified for this model.", without("top_p")),
        ("Malformed input request: extraneous key [top_k] is not permitted", without("top_k")),
        ("Additional properties are not allowed ('top_k' was unexpected)", without("top_k")),
        ("The topP parameter isn't supported", without("top_p")),
        ("Unknown argument: seed", without("seed")),
    ],
)  # fmt: skip
def test_a_parameter_that_a_model_refuses_is_renamed_or_left_out_and_said(
    words: str, form: Form
) -> None:
    learned, found, notices = taught(words)
    assert (learned, found) == (True, form)
    for name, notice in zip(form.without, notices, strict=True):
        assert f"refuses {name}; it is no longer sent" in notice


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("temperature must be between 0 and 2", {}),
        ("Invalid 'top_p': decimal above maximum value. Expected a value <= 1", {}),
        ("max_tokens is too large: 5. At most 3.", {"max_tokens": 5}),
        ("the upstreams are many", {"stream": True}),
        # which were not sent
        ("Unsupported parameter: 'frequency_penalty'", {}),
        ("response_format is not supported", {}),
    ],
)
def test_other_refusals_teach_nothing(words: str, fields: dict[str, Any]) -> None:
    assert taught(words, **fields) == (False, Form(), [])


def test_a_refused_strict_schema_is_sent_without_strict_before_it_goes_to_the_prompt() -> None:
    notices: list[str] = []
    forms = EndpointForms(EndpointProfiles(), "auto", notices.append)
    output = OutputFormat("answer", b"{}", strict=True)
    request = Request(CallSettings("m", {}, {}, output=output), b"[]")
    words = "Invalid schema for response_format 'answer': schema must have a 'type' key."
    forms_used = []
    while forms.learn(
        HERE, request, Failure("rejected", words, status=400), forms.of(HERE, request)
    ):
        form = forms.of(HERE, request)
        forms_used.append((form.strict, form.native_schema))
    assert forms_used == [(False, True), (False, False)]
    assert len(notices) == 2


def test_a_refused_strict_tool_is_sent_without_strict() -> None:
    tool = {"type": "function", "function": {"name": "pick", "parameters": {}, "strict": True}}
    forms = EndpointForms(EndpointProfiles(), "auto", list[str]().append)
    request = Request(CallSettings("m", {}, {}, tools=[tool]), b"[]")
    words = "Invalid schema for function 'pick': In context=(), schema must have a 'type' key."
    assert forms.learn(HERE, request, Failure("rejected", words, status=400), Form())
    body = json.loads(BodyWriter("m", strict=forms.of(HERE, request).strict).body(request))
    assert "strict" not in body["tools"][0]["function"]


def with_schema(name="answer", document=b'{"type":"object"}'):
    output = OutputFormat(name, document, strict=False)
    return CallSettings(model="m", sampling={}, extra={}, output=output)


def refusing(words, code=400):
    return status(code, error_body(code, words, "BadRequestError"))


def talk(fs, *calls, **options):
    """Send the calls one after the other on one backend; the exchanges and the notices."""
    notices = []

    async def main():
        async with backend(notice=notices.append, **options) as found:
            to = endpoint(fs.url)
            return [await found.send(to, [call], QUICK) for call in calls]

    return asyncio.run(main()), notices


async def test_calls_that_were_under_way_when_it_was_learned_are_worth_another_try_too():
    notices = []
    with FakeServer(refuse={"response_format": "x", "max_tokens": "y"}) as fs:
        async with backend(notice=notices.append) as found:
            calls = [request(f"r{i}", with_schema()) for i in range(20)]
            first, again = [
                await asyncio.gather(*(found.send(endpoint(fs.url), [c], QUICK) for c in calls))
                for _ in range(2)
            ]
    assert all(exchange.learned for exchange in first)
    assert all(reply(exchange).text for exchange in again)
    assert len(notices) == 1


@pytest.mark.parametrize(
    "words",
    [
        "Unsupported parameter: 'stream' is not supported with this model.",
        "Your organization must be verified to stream this model.",
        "stream_options is not allowed",
    ],
)
def test_an_endpoint_that_refuses_to_stream_is_asked_for_whole_answers(fs, words):
    fs.set_script({"r1": [refusing(words), ok("whole")]})
    (first, second, third), notices = talk(fs, *(request(stream=True) for _ in range(3)))
    assert first.learned
    assert (reply(second).text, reply(third).text) == ("whole", "whole")
    assert ["stream" in seen.body for seen in fs.requests] == [True, False, False]
    (notice,) = notices
    assert notice.startswith("here refuses to stream; ")


def test_one_refused_schema_says_nothing_of_another(fs):
    fs.set_script({"r1": [refusing("the grammar is not supported"), ok()]})
    good, bad = with_schema("good"), with_schema("bad", b'{"type":"array"}')
    talk(fs, *(request(settings=settings) for settings in (bad, bad, good)))
    assert ["response_format" in seen.body for seen in fs.requests] == [True, False, True]


@pytest.mark.parametrize(
    ("code", "options"), [(404, {}), (500, {}), (400, {"enforce": "native"})], ids=str
)
def test_a_schema_stays_where_it_must_be_enforced_and_after_other_failures(fs, code, options):
    fs.set_script({"r1": [refusing("response_format is not supported", code)]})
    (exchange,), _ = talk(fs, request(settings=with_schema()), **options)
    assert not exchange.learned


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BOTH = CallSettings(
    "m",
    {},
    {},
    output=OutputFormat("answer", b'{"type":"object"}', strict=False),
    tools=(TOOL,),
    schema_excludes_tools=True,
)
CALL = ok_tools(tool_call("add", "{}"))
REFUSED = status(400, error_body(400, "tools and a grammar exclude each other"))


def asked(fs, *calls, **fields):
    """Send the calls one after the other; the exchanges, and the bodies that the server saw."""

    async def main():
        async with backend() as found:
            to = endpoint(fs.url, **fields)
            await found.probe(to, 5)
            return [await found.send(to, [call], QUICK) for call in calls]

    return asyncio.run(main()), [seen.body for seen in fs.requests]


def schemas(bodies):
    return ["response_format" in body for body in bodies]


def back(number, settings=PLAIN):
    """A call of a conversation that comes back from its tools for the nth time."""
    return request(settings=settings, returning=number)


def test_an_engine_that_calls_a_tool_under_a_schema_gets_both():
    with FakeServer({"*": [CALL, ok("{}"), CALL]}) as fs:
        exchanges, bodies = asked(fs, *(request(settings=BOTH) for _ in range(3)))
    assert schemas(bodies) == [True] * 3
    assert not any(exchange.learned for exchange in exchanges)
    assert reply(exchanges[0]).tool_calls and reply(exchanges[1]).text == "{}"


@pytest.mark.parametrize("first", [ok("{}"), REFUSED, status(501)], ids=["none", "400", "501"])
def test_an_engine_that_cannot_have_both_is_asked_again_without_the_schema(first):
    none = request(settings=BOTH, tool_choice="none")
    with FakeServer({"*": [first, CALL, ok("well"), ok("{}")]}) as fs:
        calls = [request(settings=BOTH) for _ in range(3)]
        exchanges, bodies = asked(fs, *calls, none)
    assert schemas(bodies) == [True, False, False, True]
    assert [exchange.learned for exchange in exchanges] == [True, False, False, False]
    assert not isinstance(exchanges[0].results[0], Reply)
    assert reply(exchanges[1]).tool_calls and reply(exchanges[2]).text == "well"


def test_a_turn_that_has_to_call_a_tool_finds_nothing_out():
    forced = request(settings=BOTH, tool_choice="required")
    with FakeServer({"*": [CALL]}) as fs:
        _, bodies = asked(fs, forced, request(settings=BOTH), msgspec.structs.replace(forced))
    assert schemas(bodies) == [False, True, True]


@pytest.mark.parametrize(
    ("owner", "tags", "told"),
    [
        ("vllm", {}, [None, -1, -2]),
        ("sglang", {}, [None] * 3),
        ("sglang", {"priority": "higher"}, [None, 1, 2]),
        ("fake", {"priority": "lower"}, [None, -1, -2]),
        ("vllm", {"priority": "none"}, [None] * 3),
    ],
)
def test_engines_have_priorities_of_their_own_direction(owner, tags, told):
    models = [{"id": "m", "owned_by": owner}]
    with FakeServer({"*": [ok("x")]}, models=models) as fs:
        _, bodies = asked(fs, back(0), back(1), back(2), tags=tags)
    assert [body.get("priority") for body in bodies] == told
    assert not any("nvext" in body for body in bodies)


@pytest.mark.parametrize("extra", [{"priority": 7}, {"nvext": {"osl": 9}}])
def test_what_the_job_sets_itself_is_left_alone(extra):
    with FakeServer({"*": [ok("x")]}, flavour="vllm") as fs:
        _, (body,) = asked(fs, back(1, CallSettings("m", {}, extra)))
    assert {name: body[name] for name in ("priority", "nvext") if name in body} == extra


def test_dynamo_is_told_by_a_hint_and_higher_is_earlier():
    with FakeServer({"*": [ok("x")]}, models=[{"id": "m", "owned_by": "nvidia"}]) as fs:
        _, bodies = asked(fs, back(0), back(3), back(1000))
    hints = [body.get("nvext", {}).get("agent_hints", {}).get("priority") for body in bodies]
    assert hints == [None, 3, 100]
    assert not any("priority" in body for body in bodies)


NOT_ENABLED = status(400, error_body(400, "Got priority -1 but it is not enabled."))
TOO_LONG = status(400, error_body(400, "the prompt is too long"))


@pytest.mark.parametrize(
    ("script", "priorities", "learned"),
    [
        ([NOT_ENABLED, ok("x")], [-1, None, None], [True, False, False]),
        ([ok("x"), NOT_ENABLED, ok("x")], [-1, -1, None], [False, True, False]),
        ([TOO_LONG, ok("x")], [-1, -1, -1], [False] * 3),
    ],
    ids=["never", "no more", "another refusal"],
)
def test_a_server_that_refuses_priorities_is_told_none_from_then_on(script, priorities, learned):
    with FakeServer({"*": script}, flavour="vllm") as fs:
        exchanges, bodies = asked(fs, back(1), back(1), back(1))
    assert [body.get("priority") for body in bodies] == priorities
    assert [exchange.learned for exchange in exchanges] == learned
