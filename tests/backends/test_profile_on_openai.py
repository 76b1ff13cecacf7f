"""What the OpenAI backend learns from refusals."""

from __future__ import annotations

import asyncio

import pytest

from bagent.backends.request import CallSettings, OutputFormat
from support.backend_calls import QUICK, backend, endpoint, failure, reply, request
from support.fake_server import FakeServer
from support.replies import error_body, ok, status


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


def test_calls_that_were_under_way_when_it_was_learned_are_worth_another_try_too():
    settings = with_schema()
    notices = []

    async def main(fs):
        async with backend(notice=notices.append) as found:
            to = endpoint(fs.url)
            calls = [request(f"r{i}", settings) for i in range(20)]
            first = await asyncio.gather(*(found.send(to, [call], QUICK) for call in calls))
            again = await asyncio.gather(*(found.send(to, [call], QUICK) for call in calls))
            return first, again

    with FakeServer(refuse={"response_format": "x", "max_tokens": "y"}) as fs:
        first, again = asyncio.run(main(fs))
    assert all(exchange.learned for exchange in first)
    assert all(reply(exchange).text for exchange in again)
    assert len(notices) == 1


@pytest.mark.parametrize(
    "words",
    [
        "Unsupported parameter: 'stream' is not supported with this model.",
        "Your organization must be verified to stream this model.",
        "stream_options is not allowed",
        "Streaming is not supported",
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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (request(), "response_format is not supported"),
        (request(), "stream is not supported"),
        (request(max_tokens=5), "max_tokens is too large: 5. At most 3."),
        (request(max_tokens=5), "max_completion_tokens is too large"),
        (request(stream=True), "the upstreams are many"),
        (request(settings=with_schema(), stream=True), "temperature must be 1"),
    ],
)
def test_other_refusals_teach_nothing(fs, call, words):
    fs.set_script({"r1": [refusing(words)]})
    (exchange,), notices = talk(fs, call)
    assert not exchange.learned
    assert failure(exchange).kind == "rejected"
    assert notices == []


def test_a_schema_is_never_left_out_where_it_must_be_enforced(fs):
    fs.set_script({"r1": [refusing("response_format is not supported")]})
    (exchange,), _ = talk(fs, request(settings=with_schema()), enforce="native")
    assert not exchange.learned


def test_one_refused_schema_says_nothing_of_another(fs):
    fs.set_script({"r1": [refusing("the grammar is not supported"), ok()]})
    good, bad = with_schema("good"), with_schema("bad", b'{"type":"array"}')
    talk(fs, *(request(settings=settings) for settings in (bad, bad, good)))
    assert ["response_format" in seen.body for seen in fs.requests] == [True, False, True]


@pytest.mark.parametrize("code", [401, 404, 429, 500, 503])
def test_only_refusals_teach(fs, code):
    fs.set_script({"r1": [refusing("response_format", code)]})
    (exchange,), _ = talk(fs, request(settings=with_schema()))
    assert not exchange.learned
