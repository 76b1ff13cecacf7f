"""OpenAI's ``/v1/responses``: request bodies made of chat requests, and replies.

Sources: https://platform.openai.com/docs/api-reference/responses/create, ``/object`` beside it,
https://platform.openai.com/docs/api-reference/responses-streaming and the types of the openai SDK
3.57 (``types/responses/response_create_params.py``). vLLM serves the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from bagent.backends.failures import failure_from_body, not_json, shorten, unexpected_body
from bagent.backends.http.sse import TypedEventStream
from bagent.backends.openai.chat import (
    PROVIDER_BLOCKS,
    RESPONSE_ITEMS,
    BodyWriter,
    content_text,
    read_tool_calls,
    read_usage,
)
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.text.json import decode_json
from bagent.types import Failure, Json, Message, Reply, ToolCall, Usage

LIMIT = "max_output_tokens"
LEAST_LIMIT = 16
"""OpenAI refuses a smaller limit of an answer; engines do not."""

_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"

PATH = "/responses"

RESPONSES_ONLY = frozenset(
    (
        *("o1-pro", "o3-pro", "o3-deep-research", "o4-mini-deep-research", "computer-use-preview"),
        *("gpt-5-codex", "gpt-5-pro", "gpt-5.1-codex-max", "gpt-5.5-pro", "gpt-5.6-cyber"),
        *("gpt-6-cyber", "gpt-6-rosalind", "gpt-6.2-astra-law", "gpt-rosalind-research"),
        *("gpt-daybreak-blue-latest", "gpt-daybreak-red-latest"),
    )
)
"""Models that chat completions refuse. Source: ``types/shared/responses_model.py`` of the openai
SDK 3.57, without the names that end in a date."""

WANTS_RESPONSES = re.compile(r"\bv1/responses\b|\bresponses (api|endpoint)\b", re.IGNORECASE)
"""A refusal of a chat for a model that only ``/responses`` serves."""

_DATE = re.compile(r"-\d{4}-\d\d-\d\d$")
_CUT = "max_output_tokens"
_HEARD = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
}
_ENDS = ("response.completed", "response.incomplete", "response.failed")


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
        text = fields.get("text", {})
        if "verbosity" in fields and isinstance(text, dict):
            fields["text"] = {**text, "verbosity": fields.pop("verbosity")}
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
            items.append(_result_item(message))
        elif role == "assistant" and _is_own(own):
            items += own
        else:
            content = _content(message.get("content"), str(role))
            if content or role != "assistant":
                items.append({"role": role, "content": content})
            items += [_call_item(call) for call in message.get("tool_calls") or ()]
    return items


def _is_own(blocks: Json) -> bool:
    return (
        isinstance(blocks, list)
        and bool(blocks)
        and all(isinstance(block, dict) and block.get("type") in RESPONSE_ITEMS for block in blocks)
    )


def _result_item(message: Message) -> Json:
    content = message.get("content")
    output = _content(content, "user") if isinstance(content, list) else content_text(content)
    call_id = str(message.get("tool_call_id") or message.get("name") or "")
    return {"type": "function_call_output", "call_id": call_id, "output": output or ""}


def _call_item(call: dict[str, Any]) -> Json:
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


@lru_cache(256)
def needs_responses(model: str) -> bool:
    """Return whether a model of OpenAI is served by ``/responses`` alone."""
    return _DATE.sub("", model) in RESPONSES_ONLY


def read_response(raw: bytes, headers: Mapping[str, str]) -> Reply | Failure:
    """Parse the body of an HTTP 200 response.

    An answer that ended early has the finish reason ``length`` or ``content_filter``. One that is
    still in progress (``background``) is a failure.
    """
    try:
        body = decode_json(raw, strict=True)
    except ValueError as error:
        return not_json(raw, headers.get("Content-Type", ""), error)
    if not isinstance(body, dict) or not isinstance(body.get("output"), list):
        return failure_from_body(body, headers) or unexpected_body("no response object", raw)
    return _result(body, headers, None)


def _result(
    body: dict[str, Any], headers: Mapping[str, str], ttft_ms: float | None
) -> Reply | Failure:
    """Return the reply of a response object, or why it holds no answer."""
    failure = failure_from_body(body, headers) if body.get("error") else None
    if failure is not None:
        return failure
    status = body.get("status", "completed")
    if status not in ("completed", "incomplete"):
        message = f"the response has not ended: its status is {shorten(str(status), 40)}"
        return Failure("bad_response", message, passing=status == "failed", status=200)
    items = body["output"]
    parts = [part for item in items for part in _parts(item, "message", "content")]
    calls = read_tool_calls([_call(item) for item in items if _type(item) == "function_call"])
    thinking = [
        part
        for item in items
        for name in ("summary", "content")
        for part in _parts(item, "reasoning", name)
    ]
    listed = [part["logprobs"] for part in parts if isinstance(part.get("logprobs"), list)]
    logprobs = [entry for entries in listed for entry in entries]
    return Reply(
        text=_joined(parts, "text"),
        finish_reason=_finish(body)
        if status == "incomplete"
        else "tool_calls"
        if calls
        else "stop",
        model=body["model"] if isinstance(body.get("model"), str) else None,
        reasoning=_joined(thinking, "text") or None,
        refusal=_joined(parts, "refusal") or None,
        tool_calls=calls,
        usage=response_usage(body.get("usage")),
        ttft_ms=ttft_ms,
        logprobs={"content": logprobs} if logprobs else None,
        request_id=body["id"] if isinstance(body.get("id"), str) else None,
        blocks=_returned(items) if calls else None,
    )


def _type(item: Json) -> str:
    return str(item.get("type")) if isinstance(item, dict) else ""


def _returned(items: list[Json]) -> list[Json] | None:
    """Return the items that the next turn sends back, None if none is reasoning."""
    if not any(_type(item) == "reasoning" for item in items):
        return None
    return [
        {name: value for name, value in item.items() if value is not None}
        for item in items
        if isinstance(item, dict) and _type(item) in RESPONSE_ITEMS
    ]


def _parts(item: Json, kind: str, name: str) -> list[dict[str, Any]]:
    """Return the parts under ``name`` of an item of this kind."""
    parts = item.get(name) if _type(item) == kind else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _joined(parts: list[dict[str, Any]], name: str) -> str | None:
    texts = [part[name] for part in parts if isinstance(part.get(name), str)]
    return "".join(texts) if texts else None


def _call(item: Any) -> dict[str, Any]:
    """Convert a function call to the form of a chat message."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id") or item.get("id"), "function": function}


def _finish(body: dict[str, Any]) -> str:
    details = body.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    return "length" if reason in (_CUT, None) else str(reason)


def response_usage(usage: Json) -> Usage:
    """Return the token counts of a response; what is missing or null stays None."""
    if not isinstance(usage, dict):
        return Usage()
    return read_usage(
        {
            "prompt_tokens": usage.get("input_tokens"),
            "completion_tokens": usage.get("output_tokens"),
            "prompt_tokens_details": usage.get("input_tokens_details"),
            "completion_tokens_details": usage.get("output_tokens_details"),
        }
    )


class ResponsesStream(TypedEventStream):
    """Assembles a streamed response, whose last event holds the whole of it.

    Args:
        heard: gets each piece, ``text`` or ``reasoning``.
    """

    last_event = "the event response.completed"

    def __init__(
        self,
        started: float,
        clock: Callable[[], float],
        on_call: Callable[[ToolCall], None] | None = None,
        heard: Callable[[str, str], None] | None = None,
    ) -> None:
        super().__init__(started, clock, on_call)
        self._heard = heard
        self._text: list[str] = []
        self._items: list[Json] = []
        self._response: dict[str, Any] | None = None

    def _event(self, kind: str, event: dict[str, Any]) -> None:
        self.pieces += 1
        if kind.endswith(".delta"):
            self._seen()
            heard_kind = _HEARD.get(kind)
            piece = str(event.get("delta") or "")
            if heard_kind == "text":
                self._text.append(piece)
            if heard_kind is not None and self._heard is not None:
                self._heard(heard_kind, piece)
        elif kind == "response.output_item.done":
            item = event.get("item")
            self._items.append(item)
            if self._on_call is not None and _type(item) == "function_call":
                for call in read_tool_calls([_call(item)]):
                    self._on_call(call)
        elif kind in _ENDS and isinstance(event.get("response"), dict):
            self._response = event["response"]
            self.done = True

    @property
    def whole(self) -> bool:
        """Whether the last event was received."""
        return self._response is not None

    @property
    def text(self) -> str:
        """The text received so far."""
        return "".join(self._text)

    def _reply(self, ttft_ms: float | None) -> Reply | Failure:
        assert self._response is not None
        # Some servers leave the items out of the last event.
        output = self._response.get("output")
        items = output if output and isinstance(output, list) else self._items
        return _result({**self._response, "output": items}, {}, ttft_ms)

    def _read_whole(self, raw: bytes) -> Reply | Failure:
        return read_response(raw, {})
