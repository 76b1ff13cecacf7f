"""Request bodies of OpenAI's ``/v1/responses``, made of chat requests.

Source: https://platform.openai.com/docs/api-reference/responses/create and the types of the openai
SDK 3.57 (``types/responses/response_create_params.py``); vLLM takes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagent.backends.openai.chat import (
    PROVIDER_BLOCKS,
    RESPONSE_ITEMS,
    BodyWriter,
    content_text,
)
from bagent.backends.openai.responses import needs_responses
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.text.json import decode_json
from bagent.types import Json, Message

LIMIT = "max_output_tokens"
LEAST_LIMIT = 16
"""OpenAI refuses a smaller limit of an answer; engines do not."""

_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


def goes_to_responses(request: Request, api: str, model: str) -> bool:
    """Return whether a call of ``model`` goes to ``/responses`` by the backend's ``api``.

    Bodies that the user wrote go to the route that they name, raw prompts to completions.
    """
    if api == "chat" or request.body is not None or request.prompt is not None:
        return False
    return api == "responses" or needs_responses(model)


class ResponsesWriter(BodyWriter):
    """Writes the request bodies of one model; see :class:`BodyWriter`.

    Responses are not stored by the provider. Turns with tools ask for encrypted reasoning, which
    the next turn sends back.

    Args:
        least_limit: a smaller limit of an answer is sent as this one.
    """

    stream_members = b',"stream":true'
    limit_keys = (LIMIT,)

    def __init__(self, model: str, *, least_limit: int = LEAST_LIMIT, **form: Any) -> None:
        self.least_limit = least_limit
        super().__init__(model, **{**form, "completion_limit": LIMIT, "messages_key": "input"})

    def _fields(self, settings: CallSettings, seed: int | None) -> dict[str, Any]:
        fields = super()._fields(settings, seed)
        include = [_ENCRYPTED] if settings.tools else []
        for name in BodyWriter.limit_keys:
            if name in fields:
                fields[LIMIT] = fields.pop(name)
        if "response_format" in fields:
            fields["text"] = {"format": text_format(fields.pop("response_format"))}
        if "reasoning_effort" in fields:
            fields["reasoning"] = {"effort": fields.pop("reasoning_effort")}
        if "tools" in fields:
            fields["tools"] = [tool_definition(tool) for tool in fields["tools"]]
        if "tool_choice" in fields:
            fields["tool_choice"] = tool_choice(fields["tool_choice"])
        if fields.pop("logprobs", None):
            include.append(_LOGPROBS)
        fields.setdefault("store", False)
        if include and "include" not in self._without:
            fields.setdefault("include", include)
        return fields

    def _tool_choice(self, choice: Json) -> Json:
        return tool_choice(choice)

    def _payload(self, request: Request) -> bytes:
        messages = request.messages
        if messages is None:
            messages = decode_json(request.payload)
        return encode_payload(input_items(messages))


def text_format(response_format: Json) -> Json:
    """Convert a ``response_format`` to ``text.format``."""
    if not isinstance(response_format, dict):
        return response_format
    schema = response_format.get("json_schema")
    return {"type": "json_schema", **schema} if isinstance(schema, dict) else response_format


def tool_definition(tool: Json) -> Json:
    """Convert a tool of chat completions; any other is returned unchanged.

    Without ``strict`` the API would take tools as strict.
    """
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    return {"type": "function", "parameters": None, "strict": False, **function}


def tool_choice(choice: Json) -> Json:
    """Convert a tool choice of chat completions."""
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        return {"type": "function", "name": choice["function"].get("name")}
    return choice


def input_items(messages: Sequence[Message]) -> list[Json]:
    """Convert chat messages to the items of an input.

    A turn that came from this API is sent as its own items, so that its reasoning goes on.
    """
    items: list[Json] = []
    for message in messages:
        role = message.get("role")
        own: Any = message.get(PROVIDER_BLOCKS)
        if role in ("tool", "function"):
            items.append(_result(message))
        elif role == "assistant" and _is_own(own):
            items += own
        else:
            content = _content(message.get("content"), str(role))
            if content or role != "assistant":
                items.append({"role": role, "content": content})
            items += [_call(call) for call in message.get("tool_calls") or ()]
    return items


def _is_own(blocks: Json) -> bool:
    return (
        isinstance(blocks, list)
        and bool(blocks)
        and all(isinstance(block, dict) and block.get("type") in RESPONSE_ITEMS for block in blocks)
    )


def _result(message: Message) -> Json:
    content = message.get("content")
    output = _content(content, "user") if isinstance(content, list) else content_text(content)
    call_id = str(message.get("tool_call_id") or message.get("name") or "")
    return {"type": "function_call_output", "call_id": call_id, "output": output or ""}


def _call(call: dict[str, Any]) -> Json:
    function = call.get("function") or {}
    return {
        "type": "function_call",
        "call_id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments") or "{}",
    }


def _content(content: Json, role: str) -> Json:
    """Return a text, or the parts of a content with images; an assistant has text only."""
    if not isinstance(content, list) or role == "assistant":
        return content_text(content) or ""
    return [_part(part) for part in content]


def _part(part: Json) -> Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return {"type": "input_text", "text": part.get("text")}
    if kind == "image_url":
        image = part.get("image_url")
        image = image if isinstance(image, dict) else {"url": image}
        detail = image.get("detail") or "auto"
        return {"type": "input_image", "image_url": image.get("url"), "detail": detail}
    return {"type": "input_text", "text": part} if isinstance(part, str) else part
