"""What a strict server minds in a request body, and how prompts are found in it."""

from __future__ import annotations

import json
from typing import Any

Json = Any

ROLES = {"system", "developer", "user", "assistant", "tool"}


def message_text(message: Json) -> str:
    """Return the text of one chat message, its text parts joined."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def decode_tokens(tokens: list[int]) -> str:
    """Return the text of tokens; the server's tokens are the bytes of UTF-8."""
    return bytes(tokens).decode("utf-8", "replace")


def encode_tokens(text: str) -> list[int]:
    """Return the tokens of ``text``."""
    return list(text.encode("utf-8", "replace"))


def render(messages: list[Json], add_generation_prompt: bool = True) -> str:
    """Return the messages under the ChatML template."""
    text = "".join(f"<|im_start|>{m['role']}\n{message_text(m)}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def prompts(kind: str, body: Json) -> tuple[str, ...]:
    """Return the prompt texts of a request, one per answer that it asks for.

    Args:
        kind: ``chat``, ``batch``, ``completions`` or ``embeddings``.
        body: the decoded body.
    """
    if not isinstance(body, dict):
        return ()
    if kind == "chat":
        return ("\n".join(message_text(message) for message in body.get("messages") or []),)
    if kind == "batch":
        return tuple("\n".join(map(message_text, one)) for one in body.get("messages") or [])
    value = body.get("input" if kind == "embeddings" else "prompt")
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return (decode_tokens(value),)
    if not isinstance(value, list):
        return ()
    return tuple(one if isinstance(one, str) else decode_tokens(one) for one in value)


def complaint(kind: str, body: Json) -> str | None:
    """Return what a strict server minds in ``body``, or None where it is well formed."""
    if not isinstance(body, dict):
        return "the body is not a JSON object"
    if not isinstance(body.get("model"), str):
        return "model is not a string"
    if kind == "chat":
        return _conversation(body.get("messages"))
    if kind == "batch":
        found = [_conversation(one) for one in body.get("messages") or [None]]
        return next((words for words in found if words), None)
    return None if prompts(kind, body) else "there is no prompt"


def _conversation(messages: Json) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "messages is not a list with entries"
    asked: set[str] = set()
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"messages[{place}] has no known role"
        content = message.get("content")
        if not isinstance(content, (str, list)) and not message.get("tool_calls"):
            return f"messages[{place}] has no content"
        for call in message.get("tool_calls") or []:
            words = _call(call)
            if words:
                return f"messages[{place}]: {words}"
            asked.add(call["id"])
        if message["role"] == "tool" and message.get("tool_call_id") not in asked:
            return f"messages[{place}] answers a tool call that was not made"
    return None


def _call(call: Json) -> str | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        return "a tool call has no id or function"
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return f"arguments of {function.get('name')} are {type(arguments).__name__}, not a string"
    try:
        decoded = json.loads(arguments)
    except ValueError:
        return f"arguments of {function.get('name')} are not JSON"
    if not isinstance(decoded, dict):
        return f"arguments of {function.get('name')} do not decode to an object"
    return None
