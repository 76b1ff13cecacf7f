"""Tool calls that a server hands through as text, in the marks that models are taught.

An engine that was started without a tool parser for its model does so. Source: the chat templates
of Hermes 2 Pro, Qwen 2.5 and 3, SmolLM 2 (``<tool_call>``), Llama 3.1 (``<function=...>``) and
Mistral (``[TOOL_CALLS]``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from bagent.answers.thinking import split_thinking
from bagent.backends.json_text import decode_json, encode_json
from bagent.types import Json, Reply, ToolCall

_OPEN = re.compile(r"\s*(?:<tool_call>|<function=(?P<name>[\w.-]{1,200})>)\s*(?={)")
_CLOSE = re.compile(r"\s*(?:</tool_call>|</function>|\Z)\s*")
_MISTRAL = "[TOOL_CALLS]"
_DECODER = json.JSONDecoder()


def with_calls_of_text(reply: Reply) -> Reply:
    """``reply`` with the calls that its text consists of, or itself.

    Only where the text holds nothing else, thinking apart: whoever quotes a call does not ask for
    it. What is no whole JSON is not mended.
    """
    if reply.tool_calls or reply.blocks is not None or not reply.text:
        return reply
    text = split_thinking(reply.text).text.strip()
    try:
        calls = [
            ToolCall(f"call_{place}", name, arguments)
            for place, (name, arguments) in enumerate(_found(text))
        ]
    except ValueError:
        return reply
    if not calls:
        return reply
    return msgspec.structs.replace(reply, text=None, tool_calls=tuple(calls))


def _found(text: str) -> Iterator[tuple[str, str]]:
    """Names and arguments; ValueError where something else stands between or behind them."""
    if text.startswith(_MISTRAL):
        listed = decode_json(text[len(_MISTRAL) :])
        yield from map(_named, listed if isinstance(listed, list) else [listed])
        return
    place = 0
    while place < len(text):
        opened = _OPEN.match(text, place)
        if opened is None:
            raise ValueError("no call")
        value, end = _read(text, opened.end())
        yield (opened["name"], _text(value)) if opened["name"] else _named(value)
        closed = _CLOSE.match(text, end)
        if closed is None:
            raise ValueError("more than a call")
        place = closed.end()


def _read(text: str, place: int) -> tuple[Json, int]:
    """The JSON value that begins there, and where it ends."""
    try:
        return _DECODER.raw_decode(text, place)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _named(call: Json) -> tuple[str, str]:
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        raise ValueError("no name")
    return name, _text(call.get("arguments", call.get("parameters")))


def _text(arguments: Json) -> str:
    if arguments is None:
        return "{}"
    return arguments if isinstance(arguments, str) else encode_json(arguments)
