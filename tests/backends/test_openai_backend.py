"""The OpenAI-compatible backend: bodies that it sends, answers and lists of models."""

from __future__ import annotations

import json

import msgspec
import pytest

from bagent.backends.endpoint import Capabilities
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.openai.models import read_models
from bagent.backends.request import CallSettings, OutputFormat, Request, encode_payload
from support.backend_calls import PLAIN, QUICK, ask, backend, endpoint, failure, reply, request
from support.fake_server import FakeServer
from support.replies import delta, raw, status, wire


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
    with FakeServer(allow_faults=True) as fs:
        async with backend() as found:
            plain, tagged = endpoint(fs.url), endpoint(fs.url, tags={"model": "tagged"})
            for to, settings in ((plain, auto), (tagged, auto), (tagged, PLAIN)):
                await found.send(to, [request(settings=settings)], QUICK)
            await found.probe(plain, 5.0)
            await found.send(plain, [request(settings=auto)], QUICK)
        models = [seen.body.get("model") for seen in fs.requests]
    assert models == [None, "tagged", "m", "fake-model"]


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


@pytest.mark.parametrize(
    ("answer", "stream", "kind", "words"),
    [
        (raw("", "text/plain", status=200), False, "bad_response", "HTTP 200 without a body"),
        (raw("", "text/plain", status=204), True, "bad_response", "HTTP 204 without a body"),
        (raw(b"{}", headers={"Content-Encoding": "gzip"}), False, "bad_response", "here"),
        (wire(b"SSH-2.0-OpenSSH_9.2\r\n"), False, "bad_response", "no HTTP from here"),
        (wire(b"\x15\x03\x01\x00\x02\x02\x28"), False, "bad_response", "no HTTP from here"),
        # a redirect is not followed
        (status(308, headers={"Location": "http://x/y"}), False, "rejected", "to http://x/y"),
    ],
)
def test_what_is_no_answer_is_a_failure_that_says_so(fs, answer, stream, kind, words):
    fs.set_script({"r1": [answer]})
    found = failure(ask(endpoint(fs.url, query={"key": "s3cret"}), request(stream=stream)))
    assert (found.kind, found.passing) == (kind, kind == "bad_response")
    assert words in found.message
    assert "s3cret" not in found.message
    assert len(fs.requests) + len(fs.probes) == 1


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


CHAT = [{"role": "user", "content": "hé"}]


def chat(settings=PLAIN, **fields):
    return Request(settings, encode_payload(CHAT), messages=CHAT, **fields)


def test_every_setting_has_its_place():
    settings = CallSettings(
        model="m",
        sampling={"temperature": 0, "seed": 7},
        extra={"top_k": 5},
        output=OutputFormat("answer", b'{"type":"object"}', strict=True),
        tools=[{"type": "function"}],
    )
    body = BodyWriter("m").body(chat(settings, max_tokens=9, stream=True))
    assert (
        body
        == (
            '{"model":"m","temperature":0,"seed":7,"tools":[{"type":"function"}],'
            '"response_format":{"type":"json_schema","json_schema":{"name":"answer",'
            '"schema":{"type":"object"},"strict":true}},"top_k":5,'
            '"messages":[{"role":"user","content":"hé"}],"max_tokens":9,'
            '"stream":true,"stream_options":{"include_usage":true}}'
        ).encode()
    )


def test_a_seed_of_the_request_stands_in_for_the_settings_seed():
    writer = BodyWriter("m")
    settings = CallSettings(model="m", sampling={"seed": 1}, extra={})
    seeds = [json.loads(writer.body(chat(settings, seed=seed)))["seed"] for seed in (None, 5, None)]
    assert seeds == [1, 5, 1]


def test_a_limit_that_the_user_put_among_the_extras_is_the_only_one():
    settings = CallSettings(model="m", sampling={}, extra={"max_completion_tokens": 3})
    body = BodyWriter("m").body(chat(settings, max_tokens=9))
    assert body.count(b"max_") == 1
    assert json.loads(body)["max_completion_tokens"] == 3


def test_a_body_of_the_users_own_goes_out_as_it_is_but_never_streams():
    own = {"model": "theirs", "messages": [], "stream": True, "stream_options": {}, "top_k": 3}
    sent = Request(PLAIN, b"", body=own)
    assert json.loads(BodyWriter("").body(sent)) == {"model": "theirs", "messages": [], "top_k": 3}
    assert json.loads(BodyWriter("m").body(sent))["model"] == "m"
    assert own["stream"] is True


def test_a_body_of_the_users_own_names_its_limit_as_the_model_wants():
    writer = BodyWriter("", completion_limit="max_completion_tokens")
    renamed = writer.body(Request(PLAIN, b"", body={"max_tokens": 5}))
    kept = writer.body(Request(PLAIN, b"", body={"max_completion_tokens": 5}))
    assert json.loads(renamed) == json.loads(kept) == {"max_completion_tokens": 5}


BASE = CallSettings(
    model="m",
    sampling={"temperature": 0, "seed": 1},
    extra={"top_k": 5},
    output=OutputFormat("answer", b'{"type":"object"}', strict=True),
    tools=[{"type": "function", "function": {"name": "f"}}],
    max_tokens=100,
)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"sampling": {"temperature": 1, "seed": 1}},
        {"extra": {"top_k": "5"}},
        {"output": OutputFormat("other", b'{"type":"object"}', strict=True)},
        {"output": OutputFormat("answer", b'{"type":"array"}', strict=True)},
        {"output": OutputFormat("answer", b'{"type":"object"}', strict=False)},
        {"max_tokens": None},
    ],
)
def test_fingerprints_differ_where_answers_may(change):
    assert msgspec.structs.replace(BASE, **change).fingerprint() != BASE.fingerprint()


def test_a_fingerprint_takes_any_text():
    settings = CallSettings(model="m", sampling={"stop": ["\ud800"]}, extra={})
    assert len(settings.fingerprint()) == 32


def test_a_lone_surrogate_is_sent_as_the_replacement_character():
    value = [{"k\ud800": ["v\udfff", "\ud83d\ude00", 1, None, 1.5, True]}]
    assert json.loads(encode_payload(value).decode()) == [
        {"k\ufffd": ["v\ufffd", "\U0001f600", 1, None, 1.5, True]}
    ]
