"""Chat requests made of requests to OpenAI's ``/v1/responses``, for servers that have only chats.

Source: https://platform.openai.com/docs/api-reference/responses/create.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagent.backends.openai.chat import content_text
from bagent.types import Json, Message

_NO_FORM = ("previous_response_id", "conversation", "background", "prompt")
"""Fields that need a provider's memory of earlier responses."""

_CONVERTED = frozenset(
    (
        *("input", "instructions", "text", "tools", "tool_choice", "reasoning", "stream"),
        *("max_output_tokens", *_NO_FORM),
    )
)
_LEFT_OUT = frozenset(
    (
        *("store", "include", "truncation", "metadata", "max_tool_calls", "prompt_cache_key"),
        *("safety_identifier", "stream_options", "include_reasoning", "top_logprobs"),
    )
)
"""Fields without which the answer is of the same kind."""


def chat_request(body: Mapping[str, Json]) -> dict[str, Json]:
    """Return the chat request for a body of ``/v1/responses``.

    Raises:
        ValueError: chat completions have no form for something in it; the text names it.
    """
    for name in _NO_FORM:
        if body.get(name):
            raise ValueError(f"chat completions have no {name}")
    messages = _messages(body.get("input"))
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    hidden = _CONVERTED | _LEFT_OUT
    chat = {name: value for name, value in body.items() if name not in hidden and value is not None}
    chat["messages"] = messages
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    text, reasoning = body.get("text"), body.get("reasoning")
    form = _response_format(text.get("format") if isinstance(text, dict) else None)
    if form is not None:
        chat["response_format"] = form
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        chat["reasoning_effort"] = reasoning["effort"]
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _objects(body["tools"], "tools")]
        if body.get("tool_choice") is not None:
            chat["tool_choice"] = _tool_choice(body["tool_choice"])
    return chat


def _response_format(form: Json) -> Json:
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return None
    if form["type"] != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}


def _tool(tool: dict[str, Any]) -> Json:
    if tool.get("type") != "function":
        raise ValueError(f"chat completions have no tool of the type {tool.get('type')}")
    function = {k: v for k, v in tool.items() if k != "type" and v is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Json) -> Json:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise ValueError(f"chat completions have no tool_choice of the type {choice.get('type')}")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _messages(items: Json) -> list[Message]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    thought = ""
    for item in _objects(items, "input"):
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _reasoning(item)
            continue
        message = _message(item, kind)
        if message["role"] == "assistant":
            if thought:
                message["reasoning_content"] = thought
            _add_assistant(messages, message)
        else:
            messages.append(message)
        thought = ""
    return messages


def _message(item: dict[str, Any], kind: str) -> Message:
    if kind == "function_call_output":
        output = _content(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind != "message":
        raise ValueError(f"chat completions have no input item of the type {kind}")
    role = item.get("role") or "user"
    content = item.get("content")
    return {
        "role": role,
        "content": content_text(content) if role == "assistant" else _content(content),
    }


def _add_assistant(messages: list[Message], message: Message) -> None:
    """Append an assistant's message; text and calls of one turn are one message."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    else:
        messages.append(message)


def _reasoning(item: dict[str, Any]) -> str:
    lists = [_objects(item.get(name) or [], name) for name in ("content", "summary")]
    return "".join(str(part.get("text") or "") for parts in lists for part in parts)


def _content(content: Json) -> Json:
    """Return a text, or parts where some are images."""
    if not isinstance(content, list):
        return "" if content is None else content
    parts = [_part(part) for part in _objects(content, "content")]
    if all(part["type"] == "text" for part in parts):
        return "".join(str(part.get("text") or "") for part in parts)
    return parts


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "refusal"):
        return {"type": "text", "text": part.get("text") or part.get("refusal")}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise ValueError(f"chat completions have no content of the type {kind}")


def _objects(value: Json, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} must be a list of objects")
    return value
