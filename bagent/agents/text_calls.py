"""Tool calls that a server hands through as text, in the marks that models are taught.

An engine that was started without a tool parser for its model does so. Source: the chat templates
of Hermes 2 Pro, Qwen 2.5 and 3, SmolLM 2 (``<tool_call>``), Llama 3.1 (``<function=...>``), Qwen 3
Coder (``<function=...>`` with a ``<parameter=...>`` for each argument) and Mistral
(``[TOOL_CALLS]``, since its version 11 with ``[ARGS]`` behind the name).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from bagent.answers.thinking import split_thinking
from bagent.backends.json_text import decode_json, encode_json
from bagent.types import Json, Reply, ToolCall

_OPEN = re.compile(r"\s*(?:<tool_call>|<function=(?P<name>[\w.-]{1,200})>)\s*(?={)")
_CLOSE = re.compile(r"\s*(?:</tool_call>|</function>|\Z)\s*")
_PARTS = re.compile(
    r"\s*(?:<tool_call>\s*)?<function=(?P<name>[\w.-]{1,200})>\s*(?=<(?:param|/func))"
)
_PART = re.compile(r"\s*<parameter=(?P<name>[^>\n]{1,200})>\n?(?P<text>.*?)\n?</parameter>", re.S)
_PARTS_END = re.compile(r"\s*</function>\s*(?:</tool_call>|\Z)?\s*")
_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(
    r"\s*\[TOOL_CALLS\]\s*(?P<name>[\w.-]{1,200})(?:\[CALL_ID\][\w-]{1,200})?(?:\[ARGS\])?\s*(?={)"
)
_DECODER = json.JSONDecoder()


def with_calls_of_text(reply: Reply, definitions: Sequence[Json] = ()) -> Reply:
    """``reply`` with the calls that its text consists of, or itself.

    Only where the text holds nothing else, thinking apart: whoever quotes a call does not ask for
    it. What is no whole JSON is not mended. ``definitions`` are those of the tools: they tell what
    is a text where all arguments are written as such.
    """
    if reply.tool_calls or reply.blocks is not None or not reply.text:
        return reply
    text = split_thinking(reply.text).text.strip()
    try:
        calls = [
            ToolCall(f"call_{place}", name, arguments)
            for place, (name, arguments) in enumerate(_found(text, definitions))
        ]
    except ValueError:
        return reply
    if not calls:
        return reply
    return msgspec.structs.replace(reply, text=None, tool_calls=tuple(calls))


def _found(text: str, definitions: Sequence[Json]) -> Iterator[tuple[str, str]]:
    """Names and arguments; ValueError where something else stands between or behind them."""
    if _NAMED.match(text):
        yield from _named_first(text)
        return
    if text.startswith(_MISTRAL):
        listed = decode_json(text[len(_MISTRAL) :])
        yield from map(_named, listed if isinstance(listed, list) else [listed])
        return
    place = 0
    while place < len(text):
        parts = _PARTS.match(text, place)
        if parts is not None:
            written, place = _in_parts(text, parts.end(), _parameters(definitions, parts["name"]))
            yield parts["name"], written
            continue
        opened = _OPEN.match(text, place)
        if opened is None:
            raise ValueError("no call")
        value, end = _read(text, opened.end())
        yield (opened["name"], _text(value)) if opened["name"] else _named(value)
        closed = _CLOSE.match(text, end)
        if closed is None:
            raise ValueError("more than a call")
        place = closed.end()


def _named_first(text: str) -> Iterator[tuple[str, str]]:
    """Calls that say their name before their arguments."""
    place = 0
    while place < len(text):
        opened = _NAMED.match(text, place)
        if opened is None:
            raise ValueError("more than a call")
        value, place = _read(text, opened.end())
        yield opened["name"], _text(value)


def _in_parts(text: str, place: int, parameters: Json) -> tuple[str, int]:
    """The arguments of a call that names each by itself, and where the call ends."""
    arguments: dict[str, Json] = {}
    while (part := _PART.match(text, place)) is not None:
        place, name, value = part.end(), part["name"], part["text"]
        arguments[name] = value
        if not _takes_text(parameters.get(name)):
            with suppress(ValueError):
                arguments[name] = decode_json(value)
    ended = _PARTS_END.match(text, place)
    if ended is None:
        raise ValueError("not whole")
    return encode_json(arguments), ended.end()


def _parameters(definitions: Sequence[Json], name: str) -> Json:
    """The schemas of a tool's arguments by their names; empty where there is no such tool."""
    for tool in definitions:
        if tool["function"]["name"] == name:
            return tool["function"]["parameters"].get("properties") or {}
    return {}


def _takes_text(schema: Json) -> bool:
    """Whether an argument may be a text; True where nothing is said."""
    if not isinstance(schema, dict):
        return True
    types = schema.get("type")
    choices = schema.get("anyOf") or schema.get("oneOf")
    if types is None and isinstance(choices, list):
        return any(map(_takes_text, choices))
    if types is None:
        return "$ref" not in schema
    return "string" in (types if isinstance(types, list) else [types])


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
