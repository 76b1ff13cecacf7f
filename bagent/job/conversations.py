"""Conversations that stand in a row: messages in OpenAI's form, or ShareGPT's turns."""

from __future__ import annotations

import json
from typing import Any

from bagent.job.template import TemplateFailure
from bagent.job.words import shown
from bagent.types import Json, Message

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}
"""Who speaks in a ShareGPT turn, as the role of a message."""


class ConversationFault(TemplateFailure):
    """The column of a row holds no conversation."""

    kind = "bad_input"


def read_conversation(value: Json) -> list[Message]:
    """The messages in a row's column, in OpenAI's form.

    Takes a list of ``{role, content}`` or of ``{from, value}``, or its JSON text, as tables have
    it.

    Raises:
        ConversationFault: it is no such list; the text says which turn is wrong.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConversationFault("a text, no list of messages") from None
    if not isinstance(value, list):
        raise ConversationFault(f"{shown(value)}, no list of messages")
    if not value:
        raise ConversationFault("a list without messages")
    return [_message(turn, number) for number, turn in enumerate(value, 1)]


def is_conversation(value: Json) -> bool:
    """Whether a value is a list of messages; a text is not taken for one."""
    try:
        return isinstance(value, list) and bool(read_conversation(value))
    except ConversationFault:
        return False


def _message(turn: Json, number: int) -> Message:
    if not isinstance(turn, dict):
        raise ConversationFault(f"message {number} is {shown(turn)}, not {{role, content}}")
    if turn.get("role") is None and turn.get("from") is not None:
        return _from_turn(turn, number)
    role, content = turn.get("role"), turn.get("content")
    if role not in _ROLES:
        raise ConversationFault(f"message {number} has the role {shown(role)}")
    # Tables fill in the fields that only other messages have.
    message: Message = {name: one for name, one in turn.items() if one is not None}
    if isinstance(content, str) or (isinstance(content, list) and _all_parts(content)):
        return message
    if content is None and role == "assistant" and message.get("tool_calls"):
        return {"content": None, **message}
    raise ConversationFault(f"message {number} has the content {shown(content)}")


def _all_parts(content: list[Any]) -> bool:
    return bool(content) and all(isinstance(part, dict) and "type" in part for part in content)


def _from_turn(turn: dict[str, Json], number: int) -> Message:
    role = _SPEAKERS.get(str(turn["from"]).lower())
    if role is None:
        known = ", ".join(_SPEAKERS)
        raise ConversationFault(f"turn {number} is from {shown(turn['from'])}, not {known}")
    if not isinstance(turn.get("value"), str):
        raise ConversationFault(f"turn {number} has the value {shown(turn.get('value'))}")
    return {"role": role, "content": turn["value"]}
