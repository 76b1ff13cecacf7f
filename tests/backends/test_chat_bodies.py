"""Chat bodies: what is sent."""

from __future__ import annotations

import json

import pytest

from bagent.backends.chat_wire import BodyWriter
from bagent.backends.request import CallSettings, OutputFormat, Request, encode_payload

MESSAGES = [{"role": "user", "content": "hé"}]
PLAIN = CallSettings(model="m", sampling={}, extra={})


def chat(settings=PLAIN, **fields):
    return Request(settings, encode_payload(MESSAGES), messages=MESSAGES, **fields)


def test_a_plain_call_sends_only_what_was_set():
    assert BodyWriter("m").body(chat()) == (
        '{"model":"m","messages":[{"role":"user","content":"hé"}]}'.encode()
    )


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


def test_a_schema_that_is_not_strict_is_not_called_strict():
    output = OutputFormat("answer", b"{}", strict=False)
    settings = CallSettings(model="m", sampling={}, extra={}, output=output)
    body = json.loads(BodyWriter("m").body(chat(settings)))
    assert body["response_format"]["json_schema"] == {"name": "answer", "schema": {}}


def test_no_schema_is_sent_where_the_endpoint_refuses_them():
    settings = CallSettings(
        model="m", sampling={}, extra={}, output=OutputFormat("a", b"{}", strict=False)
    )
    assert b"response_format" not in BodyWriter("m", native_schema=False).body(chat(settings))


def test_no_model_is_sent_where_none_is_known():
    assert BodyWriter("").body(chat()).startswith(b'{"messages":[')
    warm = CallSettings(model=None, sampling={"temperature": 1}, extra={})
    assert BodyWriter("").body(chat(warm)).startswith(b'{"temperature":1,"messages":[')


def test_a_seed_of_the_request_stands_in_for_the_settings_seed():
    writer = BodyWriter("m")
    settings = CallSettings(model="m", sampling={"seed": 1}, extra={})
    seeds = [json.loads(writer.body(chat(settings, seed=seed)))["seed"] for seed in (None, 5, None)]
    assert seeds == [1, 5, 1]


def test_the_limit_of_the_answer_goes_by_the_name_that_the_model_wants():
    writer = BodyWriter("m", completion_limit="max_completion_tokens")
    body = json.loads(writer.body(chat(max_tokens=9)))
    assert body["max_completion_tokens"] == 9
    assert "max_tokens" not in body


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_that_the_user_put_among_the_extras_is_the_only_one(name):
    settings = CallSettings(model="m", sampling={}, extra={name: 3})
    body = BodyWriter("m").body(chat(settings, max_tokens=9))
    assert body.count(b"max_") == 1
    assert json.loads(body)[name] == 3


def test_raw_text_goes_under_prompt():
    request = Request(PLAIN, encode_payload("Once"), prompt="Once", path="/completions")
    assert BodyWriter("m").body(request, key="prompt") == b'{"model":"m","prompt":"Once"}'


def test_a_stream_is_not_asked_for_where_the_endpoint_refuses_it():
    assert b"stream" not in BodyWriter("m").body(chat(stream=True), stream=False)


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


def test_a_body_of_the_users_own_with_a_lone_surrogate_goes_out():
    request = Request(PLAIN, b"", body={"messages": [{"content": "\ud800"}]})
    assert json.loads(BodyWriter("").body(request)) == {"messages": [{"content": "�"}]}


def test_any_number_of_seeds_is_sent_right():
    writer = BodyWriter("m")
    seeds = [*range(600), *range(600)]
    assert [json.loads(writer.body(chat(seed=seed)))["seed"] for seed in seeds] == seeds
