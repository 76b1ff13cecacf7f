"""Requests before their wire form."""

from __future__ import annotations

import json

import msgspec
import pytest

from bagent.backends.request import CallSettings, OutputFormat, encode_payload

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
        {"model": None},
        {"model": "other"},
        {"sampling": {"temperature": 1, "seed": 1}},
        {"sampling": {"temperature": 0}},
        {"extra": {}},
        {"extra": {"top_k": "5"}},
        {"output": None},
        {"output": OutputFormat("other", b'{"type":"object"}', strict=True)},
        {"output": OutputFormat("answer", b'{"type":"array"}', strict=True)},
        {"output": OutputFormat("answer", b'{"type":"object"}', strict=False)},
        {"tools": []},
        {"max_tokens": None},
    ],
)
def test_fingerprints_differ_where_answers_may(change):
    assert msgspec.structs.replace(BASE, **change).fingerprint() != BASE.fingerprint()


def test_fingerprints_do_not_depend_on_the_order_of_keys():
    turned = msgspec.structs.replace(BASE, sampling={"seed": 1, "temperature": 0})
    assert turned.fingerprint() == BASE.fingerprint()


def test_a_fingerprint_takes_any_text():
    settings = CallSettings(model="m", sampling={"stop": ["\ud800"]}, extra={})
    assert len(settings.fingerprint()) == 32


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("a\ud800b", "a�b"),
        ("\udc00", "�"),
        ("a\ud800", "a�"),
        ("\ud800\ud800x", "��x"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ufeffa\ud800", "\ufeffa�"),
        ([{"k\ud800": ["v\udfff", 1, None, 1.5, True]}], [{"k�": ["v�", 1, None, 1.5, True]}]),
    ],
)
def test_a_lone_surrogate_is_sent_as_the_replacement_character(value, sent):
    assert json.loads(encode_payload(value).decode()) == sent


def test_payloads_are_compact_utf8():
    assert encode_payload([{"role": "user", "content": "ü\n"}]) == (
        '[{"role":"user","content":"ü\\n"}]'.encode()
    )
