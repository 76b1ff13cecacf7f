"""Chat messages in OpenAI form as turns of user and assistant, for providers that want these.

Anthropic and Amazon Bedrock take system text apart, user and assistant by turns, and the results
of all tool calls of one turn in one user message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from bagent.backends.chat_wire import content_text
from bagent.backends.json_text import decode_json, encode_json
from bagent.types import Json, Message, Reply

OWN_BLOCKS = "provider_blocks"
"""The key of an assistant message that holds the turn in its provider's own form."""

_DATA_URL = re.compile(r"data:(image/[\w.+-]+);base64,(.*)", re.DOTALL)


class Text(msgspec.Struct, frozen=True):
    """Plain text, never blank."""

    text: str


class Image(msgspec.Struct, frozen=True):
    """An image: base64 ``data`` of ``media_type``, or where neither is known its ``url``."""

    media_type: str = ""
    data: str = ""
    url: str = ""


class Asked(msgspec.Struct, frozen=True):
    """A tool call of the assistant; ``arguments`` is an object."""

    id: str
    name: str
    arguments: dict[str, Json]


class Result(msgspec.Struct, frozen=True):
    """What a tool answered."""

    id: str
    parts: tuple[Text | Image, ...]
    failed: bool = False


class Own(msgspec.Struct, frozen=True):
    """A block in the provider's own form, given back unchanged."""

    block: dict[str, Json]


Part = Text | Image | Asked | Result | Own


class Turn(msgspec.Struct):
    """Everything that one side said in a row; ``role`` is ``user`` or ``assistant``."""

    role: str
    parts: list[Part]


class Talk(msgspec.Struct):
    """A conversation: its system texts in order, and its turns, which alternate."""

    system: list[str]
    turns: list[Turn]


def assistant_message(reply: Reply) -> Message:
    """The message with which a conversation goes on after ``reply``, with its tool calls.

    What the provider wants back unchanged, such as thinking with its signature, is in it.
    """
    message: Message = {"role": "assistant", "content": reply.text or "", **(reply.message or {})}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
    if reply.blocks is not None:
        message[OWN_BLOCKS] = reply.blocks
    return message


def read_talk(messages: Sequence[Message]) -> Talk:
    """System texts and alternating turns of ``messages``; blank texts are left out.

    Raises:
        ValueError: a role or a part of a message that cannot be told in turns.
    """
    talk = Talk([], [])
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer"):
            text = content_text(message.get("content"))
            if text and text.strip():
                talk.system.append(text)
        elif role in ("user", "assistant"):
            parts = _assistant_parts(message) if role == "assistant" else _parts(message)
            _add(talk, str(role), parts)
        elif role in ("tool", "function"):
            _add(talk, "user", [_result(message)])
        else:
            raise ValueError(f"a message with the role {role!r}")
    return talk


def _add(talk: Talk, role: str, parts: list[Part]) -> None:
    if not parts:
        return
    if talk.turns and talk.turns[-1].role == role:
        talk.turns[-1].parts += parts
    else:
        talk.turns.append(Turn(role, parts))


def _assistant_parts(message: Message) -> list[Part]:
    own = message.get(OWN_BLOCKS)
    if isinstance(own, list) and own:
        return [Own(block) for block in own]
    parts: list[Part] = list(_parts(message))
    for place, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        name, told = str(function.get("name") or ""), function.get("arguments")
        parts.append(Asked(str(call.get("id") or f"call_{place}"), name, _arguments(told)))
    return parts


def _arguments(told: Json) -> dict[str, Json]:
    """The arguments as an object: text that is none was the model's mistake, and stays visible."""
    if isinstance(told, str):
        try:
            value = decode_json(told) if told.strip() else {}
        except ValueError:
            return {"arguments": told}
    else:
        value = {} if told is None else told
    return value if isinstance(value, dict) else {"arguments": value}


def _result(message: Message) -> Result:
    parts = tuple(part for part in _parts(message) if isinstance(part, Text | Image))
    call_id = str(message.get("tool_call_id") or message.get("name") or "")
    return Result(call_id, parts, bool(message.get("is_error")))


def _parts(message: Message) -> list[Part]:
    content = message.get("content")
    if isinstance(content, list):
        found = [_part(entry) for entry in content]
        return [part for part in found if part is not None]
    text = content if isinstance(content, str) else "" if content is None else encode_json(content)
    return [Text(text)] if text.strip() else []


def _part(entry: Json) -> Text | Image | None:
    if isinstance(entry, str):
        return Text(entry) if entry.strip() else None
    kind = entry.get("type") if isinstance(entry, dict) else None
    if kind == "text":
        text = str(entry.get("text") or "")
        return Text(text) if text.strip() else None
    if kind == "image_url":
        told = entry.get("image_url")
        url = str(told.get("url") if isinstance(told, dict) else told)
        found = _DATA_URL.fullmatch(url)
        return Image(found[1].lower(), found[2]) if found else Image(url=url)
    raise ValueError(f"a part of the kind {kind!r} in a message")
