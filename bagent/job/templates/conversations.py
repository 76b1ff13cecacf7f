"""Conversations in a row's column, in OpenAI's or ShareGPT's form.

ShareGPT's form has several dialects; the tool turns are those of LLaMA-Factory:
https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md#sharegpt-format
"""

from __future__ import annotations

from typing import Any

from bagent.job.templates.template import TemplateFailure
from bagent.text.json import decode_json, encode_json
from bagent.text.suggest import describe_value
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
    "function_call": "call",
    "observation": "tool",
    "tool": "tool",
}
"""Who speaks in a ShareGPT turn, as the role of a message; ``call`` is an assistant's tool call."""


class ConversationFault(TemplateFailure):
    """The column of a row holds no conversation."""

    kind = "bad_input"


def read_conversation(value: Json) -> list[Message]:
    """Return the messages in a row's column, in OpenAI's form.

    Takes a list of ``{role, content}`` or of ``{from, value}``, or its JSON text, as tables have
    it.

    Raises:
        ConversationFault: it is no such list; the text says which turn is wrong.
    """
    if isinstance(value, str):
        try:
            value = decode_json(value)
        except ValueError:
            raise ConversationFault("a text, no list of messages") from None
    if not isinstance(value, list):
        raise ConversationFault(f"{describe_value(value)}, no list of messages")
    if not value:
        raise ConversationFault("a list without messages")
    messages: list[Message] = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict):
            raise ConversationFault(
                f"message {number} is {describe_value(turn)}, not {{role, content}}"
            )
        if turn.get("role") is None and turn.get("from") is not None:
            messages.append(_from_turn(turn, number, messages))
        else:
            messages.append(_message(turn, number))
    return messages


def is_conversation(value: Json) -> bool:
    """Return whether a value is a list of messages; a text is not taken for one."""
    try:
        return isinstance(value, list) and bool(read_conversation(value))
    except ConversationFault:
        return False


def _message(turn: dict[str, Json], number: int) -> Message:
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise ConversationFault(f"message {number} has the role {describe_value(role)}")
    # Tables fill in the fields that only other messages have.
    message: Message = {name: field for name, field in turn.items() if field is not None}
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = _calls(calls, number)
    if isinstance(content, str) or (isinstance(content, list) and _all_parts(content)):
        return message
    if content is None and role == "assistant" and calls:
        return {"content": None, **message}
    raise ConversationFault(f"message {number} has the content {describe_value(content)}")


def _all_parts(content: list[Any]) -> bool:
    return bool(content) and all(isinstance(part, dict) and "type" in part for part in content)


def _calls(calls: Json, number: int) -> list[Json]:
    """Return tool calls with their arguments as text; data sets also have them as objects."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConversationFault(f"message {number} has the tool_calls {describe_value(calls)}")
    return [_with_text_arguments(call) for call in calls]


def _with_text_arguments(call: dict[str, Any]) -> Json:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": encode_json(function["arguments"])}}


def _from_turn(turn: dict[str, Json], number: int, earlier: list[Message]) -> Message:
    role = _SPEAKERS.get(str(turn["from"]).lower())
    if role is None:
        speakers = ", ".join(_SPEAKERS)
        raise ConversationFault(
            f"turn {number} is from {describe_value(turn['from'])}, not {speakers}"
        )
    value = turn.get("value")
    if not isinstance(value, str):
        raise ConversationFault(f"turn {number} has the value {describe_value(value)}")
    if role == "call":
        return {"role": "assistant", "content": None, "tool_calls": _turn_calls(value, number)}
    if role == "tool":
        return {"role": "tool", "tool_call_id": _unanswered(earlier, number), "content": value}
    return {"role": role, "content": value}


def _turn_calls(value: str, number: int) -> list[Json]:
    """Return the tool calls of a turn: the JSON text of one ``{name, arguments}``, or a list."""
    try:
        decoded = decode_json(value)
    except ValueError:
        decoded = None
    functions = decoded if isinstance(decoded, list) else [decoded]
    if not functions or not all(isinstance(f, dict) and f.get("name") for f in functions):
        raise ConversationFault(f"turn {number} is no JSON text of a call {{name, arguments}}")
    calls: list[Json] = []
    for index, function in enumerate(functions):
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else encode_json(arguments or {})
        calls.append(
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {"name": function["name"], "arguments": text},
            }
        )
    return calls


def _unanswered(earlier: list[Message], number: int) -> str:
    """Return the id of the first tool call without a result."""
    answered = [message.get("tool_call_id") for message in earlier]
    for message in earlier:
        for call in message.get("tool_calls") or ():
            call_id = call.get("id")
            if isinstance(call_id, str) and call_id not in answered:
                return call_id
    raise ConversationFault(f"turn {number} is the result of a tool that no turn before it calls")
