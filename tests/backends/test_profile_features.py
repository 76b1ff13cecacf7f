"""What the OpenAI backend finds out of an endpoint by trying it once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from bagent.backends.request import CallSettings, OutputFormat
from bagent.types import Reply
from support.backend_calls import QUICK, backend, endpoint, reply, request
from support.fake_server import FakeServer
from support.replies import error_body, ok, ok_tools, status, tool_call

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BOTH = CallSettings(
    "m",
    {},
    {},
    output=OutputFormat("answer", b'{"type":"object"}', strict=False),
    tools=(TOOL,),
    schema_excludes_tools=True,
)
PLAIN = CallSettings("m", {}, {})
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
