"""The OpenAI-compatible backend against servers on 127.0.0.1: requests, answers, probes."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import pytest

from bagent.backends.endpoint import Capabilities
from bagent.backends.openai.models import read_models
from bagent.backends.request import CallSettings
from support.backend_calls import (
    PLAIN,
    QUICK,
    ask,
    backend,
    endpoint,
    failure,
    reply,
    request,
)
from support.fake_server import FakeServer
from support.replies import (
    cut_body,
    delta,
    ok,
    raw,
    status,
    wire,
)

# --- requests ---------------------------------------------------------------------------------


def test_a_plain_call_sends_exactly_its_bytes(fs):
    to = endpoint(fs.url, headers={"Authorization": "Bearer k"}, query={"api-version": "1"})
    exchange = ask(to)
    (seen,) = fs.requests
    assert seen.raw == b'{"model":"m","messages":[{"role":"user","content":"id=r1"}]}'
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["content-type"] == "application/json"
    assert seen.headers["content-length"] == str(len(seen.raw))
    assert seen.headers["authorization"] == "Bearer k"
    assert seen.headers["user-agent"] == "bagent"
    assert "cookie" not in seen.headers
    assert reply(exchange).finish_reason == "stop"
    assert (exchange.status, exchange.stale_connection, exchange.learned) == (200, False, False)
    assert exchange.sent <= exchange.first_byte <= exchange.done
    assert exchange.first_token is None


def test_the_model_is_the_settings_else_the_endpoints_tag_else_what_a_probe_found():
    auto = CallSettings(model=None, sampling={}, extra={})

    async def main(fs):
        async with backend() as found:
            plain, tagged = endpoint(fs.url), endpoint(fs.url, tags={"model": "tagged"})
            for to, settings in ((plain, auto), (tagged, auto), (tagged, PLAIN)):
                await found.send(to, [request(settings=settings)], QUICK)
            await found.probe(plain, 5.0)
            await found.send(plain, [request(settings=auto)], QUICK)

    with FakeServer(strict=False) as fs:
        asyncio.run(main(fs))
        models = [seen.body.get("model") for seen in fs.requests]
    assert models == [None, "tagged", "m", "fake-model"]


async def test_a_connection_is_used_again_after_an_answer_and_after_a_stream(fs):
    async with backend() as found:
        to = endpoint(fs.url)
        for streamed in (False, True, True, False):
            reply(await found.send(to, [request(stream=streamed)], QUICK))
    assert len(fs.requests) == 4
    assert fs.connections == 1


# --- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "none of it"])
def test_a_compressed_answer_is_read_and_a_broken_one_a_passing_failure(fs, encoding):
    body = b'{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}'
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding, bytes)(body)
    name = "gzip" if encoding == "none of it" else encoding
    fs.set_script({"r1": [raw(packed, headers={"Content-Encoding": name})]})
    exchange = ask(fs.url)
    if encoding == "none of it":
        assert (failure(exchange).kind, failure(exchange).passing) == ("bad_response", True)
    else:
        assert reply(exchange).text == "yes"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("charset", "text"),
    [
        ("iso-8859-1", "café"),
        ('"Windows-1252"', "50 €"),
        ("utf-16", "ü"),
        ("utf-16le", "yes"),
        ("utf-8", "é"),
        ("x", "é"),
    ],
)
def test_an_answer_is_decoded_by_the_charset_that_it_names(fs, charset, text, stream):
    body = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    encoding = "utf-8" if charset == "x" else charset.strip('"')
    content = json.dumps(body, ensure_ascii=False).encode(encoding)
    fs.set_script({"r1": [raw(content, f"application/json; charset={charset}")]})
    assert reply(ask(fs.url, request(stream=stream))).text == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", [200, 204])
def test_a_good_status_without_a_body_is_named(fs, code, stream):
    fs.set_script({"r1": [raw("", "text/plain", status=code)]})
    found = failure(ask(fs.url, request(stream=stream)))
    assert (found.kind, found.passing, found.status) == ("bad_response", True, code)
    assert found.message == f"HTTP {code} without a body"


def test_a_redirect_is_not_followed(fs):
    fs.set_script({"r1": [status(308, headers={"Location": f"{fs.url}/elsewhere"})]})
    found = failure(ask(fs.url))
    assert (found.kind, found.passing, found.status) == ("rejected", False, 308)
    assert f"{fs.url}/elsewhere" in found.message
    assert len(fs.requests) + len(fs.probes) == 1


def test_a_body_that_breaks_off_is_a_passing_failure(fs):
    fs.set_script({"r1": [cut_body(ok("a long answer"), 30)]})
    found = failure(ask(fs.url))
    assert (found.kind, found.passing, found.status) == ("bad_response", True, None)
    assert "here broke off" in found.message


@pytest.mark.parametrize(
    "content", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01\x00\x02\x02\x28", b"HTTP/9.9 hello\r\n"]
)
def test_a_server_that_speaks_no_http_is_a_passing_failure(fs, content):
    fs.set_script({"r1": [wire(content)]})
    found = failure(ask(endpoint(fs.url, query={"key": "s3cret"})))
    assert (found.kind, found.passing) == ("bad_response", True)
    assert "no HTTP from here" in found.message
    assert "s3cret" not in found.message


# --- streams ----------------------------------------------------------------------------------


def test_whole_json_in_answer_to_a_stream_is_taken(fs):
    body = b'{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}'
    fs.set_script({"r1": [raw(body)], "r2": [raw(body, "text/event-stream")]})
    for row in ("r1", "r2"):
        assert reply(ask(fs.url, request(row, stream=True))).text == "yes"


@pytest.mark.parametrize("content_type", ["text/plain", "application/json", "text/event-stream"])
def test_a_stream_that_was_not_asked_for_or_is_called_otherwise_is_taken(fs, content_type):
    body = b": hi\n\n" + b"".join(
        b"data: " + json.dumps(chunk).encode() + b"\n\n"
        for chunk in (delta("yes"), delta(finish_reason="stop"))
    )
    fs.set_script({"r1": [raw(body, content_type)]})
    assert reply(ask(fs.url)).text == "yes"


# --- probes -----------------------------------------------------------------------------------


def probe(url, seconds=5.0, **fields):
    async def main():
        async with backend() as found:
            return await found.probe(endpoint(url, **fields), seconds)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, Capabilities(models=("a", "b"))),
        ({"data": [{"id": "a", "max_model_len": 10, "owned_by": "vllm"}]},
         Capabilities(models=("a",), context=10, engine="vllm")),
        ({"data": [{"id": "a", "meta": {"n_ctx": 512}}]},
         Capabilities(models=("a",), context=512)),
        ({"data": [{"id": "a", "context_window": 7}]}, Capabilities(models=("a",), context=7)),
        ({"data": [{"id": "a", "max_model_len": "10"}]}, Capabilities(models=("a",))),
        ({"data": [None, 1, {}, {"id": None}, {"id": 5}]}, Capabilities(models=("5",))),
        ({"data": None}, Capabilities()),
        ({"data": {}}, Capabilities()),
        ([], Capabilities()),
        (None, Capabilities()),
        ("x", Capabilities()),
    ],
)  # fmt: skip
def test_any_list_of_models_is_read(body, found):
    assert read_models(body) == found
