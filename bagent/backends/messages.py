"""Conversion of OpenAI chat messages to alternating turns, for Anthropic and Amazon Bedrock.

Both take system text separately, alternate user and assistant, and want the results of all tool
calls of a turn in one user message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from bagent.backends.openai.chat import PROVIDER_BLOCKS, RESPONSE_ITEMS, content_text
from bagent.text.json import decode_json, encode_json
from bagent.types import Json, Message, Reply

_NO_ID = re.compile(r"[^A-Za-z0-9_-]")
_BEGINNING, _NO_RESULT = ".", "(no result)"
MAX_ID_LENGTH = 64
"""Limit of both providers for the id of a tool call."""

_DATA_URL = re.compile(r"data:(image/[\w.+-]+);base64,(.*)", re.DOTALL)


class TextPart(msgspec.Struct, frozen=True):
    """Plain text, never blank."""

    text: str


class ImagePart(msgspec.Struct, frozen=True):
    """An image: base64 ``data`` of ``media_type``, or else its ``url``."""

    media_type: str = ""
    data: str = ""
    url: str = ""


class ToolUse(msgspec.Struct, frozen=True):
    """A tool call of the assistant; ``arguments`` is an object."""

    id: str
    name: str
    arguments: dict[str, Json]


class ToolResultPart(msgspec.Struct, frozen=True):
    """The result of a tool call."""

    id: str
    parts: tuple[TextPart | ImagePart, ...]
    failed: bool = False


class ProviderBlocks(msgspec.Struct, frozen=True):
    """A block in the provider's own form, sent back unchanged."""

    block: dict[str, Json]


Part = TextPart | ImagePart | ToolUse | ToolResultPart | ProviderBlocks


class ChatTurn(msgspec.Struct):
    """Consecutive messages of one side; ``role`` is ``user`` or ``assistant``."""

    role: str
    parts: list[Part]


class ChatMessages(msgspec.Struct):
    """A conversation: its system texts in order, and its alternating turns."""

    system: list[str]
    turns: list[ChatTurn]


def assistant_message(reply: Reply) -> Message:
    """Return the message that continues a conversation after ``reply``.

    It holds the tool calls and what the provider wants back unchanged, such as signed thinking.
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
        message[PROVIDER_BLOCKS] = reply.blocks
    return message


def read_conversation(messages: Sequence[Message], *, typed: bool | None = None) -> ChatMessages:
    """Return the system texts and the alternating turns of ``messages``, without blank texts.

    The result begins with the user, has unique ids of tool calls, and answers each call at the
    beginning of the next turn, whatever server or file the messages come from.

    Args:
        typed: whether the provider's own blocks name their ``type``, as Anthropic's do and
            Bedrock's do not; turns with blocks of another provider are sent as their text and
            calls. None takes all.

    Raises:
        ValueError: a role or a part of a message has no form in turns.
    """
    talk = ChatMessages([], [])
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer"):
            text = content_text(message.get("content"))
            if text and text.strip():
                talk.system.append(text)
        elif role in ("user", "assistant"):
            parts = _parts(message) if role == "user" else _assistant_parts(message, typed)
            _add(talk, str(role), parts)
        elif role in ("tool", "function"):
            _add(talk, "user", [_result(message)])
        else:
            raise ValueError(f"a message with the role {role!r}")
    if talk.turns and talk.turns[0].role == "assistant":
        talk.turns.insert(0, ChatTurn("user", [TextPart(_BEGINNING)]))
    _pair(talk.turns)
    return talk


def _pair(turns: list[ChatTurn]) -> None:
    """Make the ids of calls unique and give each call its result."""
    used: set[str] = set()
    calls: list[ToolUse] = []
    original_ids: list[str] = []
    for turn in turns:
        if turn.role == "user":
            turn.parts = _with_results(turn.parts, calls, original_ids)
            continue
        calls, original_ids = [], []
        for index, part in enumerate(turn.parts):
            if isinstance(part, ToolUse):
                new = turn.parts[index] = msgspec.structs.replace(part, id=_new_id(part.id, used))
                calls.append(new)
                original_ids.append(part.id)
            elif isinstance(part, ProviderBlocks) and (block_id := _id_of(part.block)):
                used.add(block_id)
                calls.append(ToolUse(block_id, "", {}))
                original_ids.append(block_id)


def _new_id(original: str, used: set[str]) -> str:
    base = _NO_ID.sub("_", original)[:MAX_ID_LENGTH] or "call"
    unique, count = base, 1
    while unique in used:
        count += 1
        unique = f"{base[: MAX_ID_LENGTH - 5]}_{count}"
    used.add(unique)
    return unique


def _id_of(block: dict[str, Json]) -> str:
    """Return the id of a call in a provider's own form, empty if the block is no call."""
    used = block.get("toolUse")
    if isinstance(used, dict):
        return str(used.get("toolUseId") or "")
    return str(block.get("id") or "") if block.get("type") == "tool_use" else ""


def _with_results(parts: list[Part], calls: list[ToolUse], original_ids: list[str]) -> list[Part]:
    """Return a user's parts with the results of ``calls`` first, one for each.

    Results name the calls by their ``original_ids``. One that matches no call becomes text.
    """
    results: list[Part] = []
    others: list[Part] = []
    unanswered = list(zip(original_ids, calls, strict=True))
    for part in parts:
        if not isinstance(part, ToolResultPart):
            others.append(part)
            continue
        matches = [pair for pair in unanswered if pair[0] == part.id]
        # Old conversations give the function name instead of an id, or neither.
        matches += [pair for pair in unanswered if part.id in (pair[1].name, "")]
        if matches:
            unanswered.remove(matches[0])
            results.append(msgspec.structs.replace(part, id=matches[0][1].id))
        else:
            others += part.parts
    results += [
        ToolResultPart(call.id, (TextPart(_NO_RESULT),), failed=True) for _, call in unanswered
    ]
    return results + others


def _add(talk: ChatMessages, role: str, parts: list[Part]) -> None:
    if not parts:
        return
    if talk.turns and talk.turns[-1].role == role:
        talk.turns[-1].parts += parts
    else:
        talk.turns.append(ChatTurn(role, parts))


def _assistant_parts(message: Message, typed: bool | None) -> list[Part]:
    own = message.get(PROVIDER_BLOCKS)
    if isinstance(own, list) and own and _is_own(own, typed):
        return [ProviderBlocks(block) for block in own]
    parts: list[Part] = list(_parts(message))
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        name, arguments = str(function.get("name") or ""), function.get("arguments")
        parts.append(ToolUse(str(call.get("id") or f"call_{index}"), name, _arguments(arguments)))
    return parts


def _is_own(blocks: list[Json], typed: bool | None) -> bool:
    return typed is None or all(
        isinstance(block, dict)
        and ("type" in block) == typed
        and block.get("type") not in RESPONSE_ITEMS
        for block in blocks
    )


def _arguments(raw: Json) -> dict[str, Json]:
    """Return the arguments as an object; text that is none is the model's error and kept."""
    if isinstance(raw, str):
        try:
            value = decode_json(raw) if raw.strip() else {}
        except ValueError:
            return {"arguments": raw}
    else:
        value = {} if raw is None else raw
    return value if isinstance(value, dict) else {"arguments": value}


def _result(message: Message) -> ToolResultPart:
    parts = tuple(part for part in _parts(message) if isinstance(part, TextPart | ImagePart))
    call_id = str(message.get("tool_call_id") or message.get("name") or "")
    return ToolResultPart(call_id, parts, bool(message.get("is_error")))


def _parts(message: Message) -> list[Part]:
    content = message.get("content")
    if isinstance(content, list):
        parts = [_part(entry) for entry in content]
        return [part for part in parts if part is not None]
    text = content if isinstance(content, str) else "" if content is None else encode_json(content)
    return [TextPart(text)] if text.strip() else []


def _part(entry: Json) -> TextPart | ImagePart | None:
    if isinstance(entry, str):
        return TextPart(entry) if entry.strip() else None
    kind = entry.get("type") if isinstance(entry, dict) else None
    if kind == "text":
        text = str(entry.get("text") or "")
        return TextPart(text) if text.strip() else None
    if kind == "image_url":
        image = entry.get("image_url")
        url = str(image.get("url") if isinstance(image, dict) else image)
        match = _DATA_URL.fullmatch(url)
        return ImagePart(match[1].lower(), match[2]) if match else ImagePart(url=url)
    raise ValueError(f"a part of the kind {kind!r} in a message")
