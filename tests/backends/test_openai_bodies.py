"""Chat bodies: what is sent."""

from __future__ import annotations

import json

import msgspec
import pytest

from bagent.backends.openai.chat import BodyWriter
from bagent.backends.request import CallSettings, OutputFormat, Request, encode_payload

MESSAGES = [{"role": "user", "content": "hé"}]
PLAIN = CallSettings(model="m", sampling={}, extra={})


def chat(settings=PLAIN, **fields):
    return Request(settings, encode_payload(MESSAGES), messages=MESSAGES, **fields)


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
    request = Request(PLAIN, b"", body=own)
    assert json.loads(BodyWriter("").body(request)) == {
        "model": "theirs",
        "messages": [],
        "top_k": 3,
    }
    assert json.loads(BodyWriter("m").body(request))["model"] == "m"
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
