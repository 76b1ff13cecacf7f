"""The OpenAI-compatible backend against servers on 127.0.0.1: requests, answers, probes."""

from __future__ import annotations

import json

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
    delta,
    raw,
    status,
    wire,
)


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


async def test_the_model_is_the_settings_else_the_endpoints_tag_else_what_a_probe_found():
    auto = CallSettings(model=None, sampling={}, extra={})
    with FakeServer(strict=False) as fs:
        async with backend() as found:
            plain, tagged = endpoint(fs.url), endpoint(fs.url, tags={"model": "tagged"})
            for to, settings in ((plain, auto), (tagged, auto), (tagged, PLAIN)):
                await found.send(to, [request(settings=settings)], QUICK)
            await found.probe(plain, 5.0)
            await found.send(plain, [request(settings=auto)], QUICK)
        models = [seen.body.get("model") for seen in fs.requests]
    assert models == [None, "tagged", "m", "fake-model"]


def test_a_compressed_answer_that_is_broken_is_a_passing_failure(fs):
    fs.set_script({"r1": [raw(b"{}", headers={"Content-Encoding": "gzip"})]})
    found = failure(ask(fs.url))
    assert (found.kind, found.passing) == ("bad_response", True)


@pytest.mark.parametrize(
    ("charset", "text", "stream"),
    [
        ("iso-8859-1", "café", False),
        ('"Windows-1252"', "50 €", True),
        ("utf-16", "ü", True),
        ("x", "é", False),
    ],
)
def test_an_answer_is_decoded_by_the_charset_that_it_names(fs, charset, text, stream):
    body = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    encoding = "utf-8" if charset == "x" else charset.strip('"')
    content = json.dumps(body, ensure_ascii=False).encode(encoding)
    fs.set_script({"r1": [raw(content, f"application/json; charset={charset}")]})
    assert reply(ask(fs.url, request(stream=stream))).text == text


@pytest.mark.parametrize(("code", "stream"), [(200, False), (204, True)])
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


@pytest.mark.parametrize("content", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01\x00\x02\x02\x28"])
def test_a_server_that_speaks_no_http_is_a_passing_failure(fs, content):
    fs.set_script({"r1": [wire(content)]})
    found = failure(ask(endpoint(fs.url, query={"key": "s3cret"})))
    assert (found.kind, found.passing) == ("bad_response", True)
    assert "no HTTP from here" in found.message
    assert "s3cret" not in found.message


WHOLE = b'{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}'
STREAM = b": hi\n\n" + b"".join(
    b"data: " + json.dumps(chunk).encode() + b"\n\n"
    for chunk in (delta("yes"), delta(finish_reason="stop"))
)


@pytest.mark.parametrize(
    ("body", "content_type", "stream"),
    [
        (WHOLE, "application/json", True),
        (WHOLE, "text/event-stream", True),
        (STREAM, "text/plain", False),
        (STREAM, "text/event-stream", False),
    ],
)
def test_an_answer_of_the_other_form_or_called_otherwise_is_taken(fs, body, content_type, stream):
    fs.set_script({"r1": [raw(body, content_type)]})
    assert reply(ask(fs.url, request(stream=stream))).text == "yes"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"data": [{"id": "a", "max_model_len": 10, "owned_by": "vllm"}]},
         Capabilities(models=("a",), context=10, engine="vllm")),
        ({"data": [{"id": "a", "meta": {"n_ctx": 512}}]},
         Capabilities(models=("a",), context=512)),
        ({"data": [{"id": "a", "max_model_len": "10"}]}, Capabilities(models=("a",))),
        ({"data": [None, 1, {}, {"id": None}, {"id": 5}]}, Capabilities(models=("5",))),
        ({"data": {}}, Capabilities()),
        ([], Capabilities()),
    ],
)  # fmt: skip
def test_any_list_of_models_is_read(body, found):
    assert read_models(body) == found
