"""Request bodies and replies of OpenAI's chat completions.

Source: OpenAI's API reference for chat completions, and the deviations of vLLM, SGLang, NVIDIA
Dynamo and llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from bagent.backends.failures import failure_from_body, not_json, unexpected_body
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.text.json import decode_json, encode_json
from bagent.types import NO_USAGE, Failure, Json, Reply, ToolCall, Usage

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_NoText = Annotated[str, msgspec.Meta(max_length=0)]
_NoItems = Annotated[list[Json], msgspec.Meta(max_length=0)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Text(msgspec.Struct, gc=False):
    """A message or a delta that holds nothing but text."""

    content: str | None = None
    reasoning: _NoText | None = None
    reasoning_content: _NoText | None = None
    reasoning_details: _NoItems | None = None
    refusal: _NoText | None = None
    tool_calls: _NoItems | None = None
    function_call: None = None


class _Choice(msgspec.Struct):
    message: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Json = None
    error: None = None


class _PlainReply(msgspec.Struct):
    """The body of a response with one choice of plain text."""

    choices: tuple[_Choice]
    model: str | None = None
    id: str | None = None
    usage: _Usage | None = None
    error: None = None
    metrics: Json = None


class _Piece(msgspec.Struct):
    delta: _Text | None = None
    message: None = None
    text: str | None = None
    index: int = 0
    finish_reason: _NoText | None = None
    logprobs: None = None
    error: None = None


class PlainEvent(msgspec.Struct):
    """A stream event with one piece of plain text, which may be None."""

    choices: tuple[_Piece]
    model: str | None = None
    id: str | None = None
    usage: Json = None
    error: None = None
    metrics: None = None

    @property
    def text(self) -> str | None:
        """The piece, None if there is none for the first choice."""
        choice = self.choices[0]
        if choice.index:
            return None
        return choice.text if choice.delta is None else choice.delta.content


_decode_reply = msgspec.json.Decoder(_PlainReply).decode
_decode_piece = msgspec.json.Decoder(PlainEvent).decode
_REFUSALS = (msgspec.DecodeError, UnicodeError, RecursionError)


def decode_plain_event(data: bytes) -> PlainEvent | None:
    """Decode a stream event of plain text, None if it is of another form."""
    try:
        return _decode_piece(data)
    except _REFUSALS:
        return None


_LIMIT_KEYS = ("max_tokens", "max_completion_tokens")
_FINISH_WORDS = {
    "stop": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


_HINTS = {
    "lower": b',"priority":-%d',
    "higher": b',"priority":%d',
    "nvext": b',"nvext":{"agent_hints":{"priority":%d}}',
}

PROVIDER_BLOCKS = "provider_blocks"
"""Key of an assistant message that holds the turn in its provider's own form. It is not sent to
others, since a run may continue with another backend."""

RESPONSE_ITEMS = frozenset(("reasoning", "message", "function_call"))
"""Types of the blocks of a turn from OpenAI's responses."""

_OWN_MARK = b'"%s":' % PROVIDER_BLOCKS.encode()

MAX_PRIORITY = 100
"""Maximal priority of a conversation, which gains one with each turn."""


class BodyWriter:
    """Writes the request bodies of one model; what calls share is encoded once.

    Args:
        model: empty sends none, for servers that have only one.
        native_schema: False omits ``response_format``.
        completion_limit: ``max_tokens``, or ``max_completion_tokens`` for OpenAI's newer models.
        without: names of sampling parameters to omit.
        hints: how to raise the priority of conversations that return from their tools: ``lower``
            or ``higher`` numbers, or ``nvext``; empty for none.
        strict: False omits the strict mode of schemas and tools.
    """

    stream_members = b',"stream":true,"stream_options":{"include_usage":true}'
    limit_keys: tuple[str, ...] = _LIMIT_KEYS
    """Fields that limit the answer."""
    least_limit = 1
    """A smaller limit is sent as this one."""

    def __init__(
        self,
        model: str,
        *,
        native_schema: bool = True,
        completion_limit: str = "max_tokens",
        messages_key: str = "messages",
        without: frozenset[str] = frozenset(),
        hints: str = "",
        strict: bool = True,
    ) -> None:
        self.model = model
        self.native_schema = native_schema
        self._strict = strict
        self._limit_key = completion_limit
        self._limit_member = b',"%b":%%d' % completion_limit.encode()
        self._messages_name = b'"%b":' % messages_key.encode()
        self._without = without
        self._hint = _HINTS.get(hints)
        self._heads: dict[tuple[int, int | None], tuple[CallSettings, bytes, bool]] = {}

    def body(self, request: Request, *, key: str | None = None, stream: bool = True) -> bytes:
        """Return the JSON bytes of ``request``; ``key`` names the payload."""
        if request.body is not None:
            return self._own_body(request.body)
        head, limited, chosen = self._kept_head(request)
        name = self._messages_name if key is None else b'"%b":' % key.encode()
        parts = [head, name, self._payload(request)]
        if request.max_tokens is not None and not limited:
            parts.append(self._limit_member % max(request.max_tokens, self.least_limit))
        if request.tool_choice is not None and not chosen:
            choice = self._tool_choice(request.tool_choice)
            parts.append(b',"tool_choice":' + encode_payload(choice))
        if request.returning and self._hint is not None:
            parts.append(self._hint % min(request.returning, MAX_PRIORITY))
        if request.stream and stream:
            parts.append(self.stream_members)
        parts.append(b"}")
        return b"".join(parts)

    def group_body(
        self, request: Request, key: str, payloads: Sequence[bytes], extra: bytes = b""
    ) -> bytes:
        """Return the JSON bytes for calls like ``request``, their payloads in a list called
        ``key``.

        ``extra`` is JSON text of further members, each after a comma.
        """
        head, limited, _ = self._kept_head(request)
        parts = [head, b'"', key.encode(), b'":[', b",".join(payloads), b"]"]
        if request.max_tokens is not None and not limited:
            limit_key = "max_tokens" if key == "prompt" else self._limit_key
            parts.append(b',"%s":%d' % (limit_key.encode(), request.max_tokens))
        parts += [extra, b"}"]
        return b"".join(parts)

    def _kept_head(self, request: Request) -> tuple[bytes, bool, bool]:
        settings = request.settings
        cached = self._heads.get((id(settings), request.seed))
        if cached is None:
            if len(self._heads) > 256:
                self._heads.clear()
            cached = settings, *self._head(settings, request.seed)
            self._heads[(id(settings), request.seed)] = cached
        return cached[1], cached[2], "tool_choice" in settings.extra

    def _head(self, settings: CallSettings, seed: int | None) -> tuple[bytes, bool]:
        """Return the beginning of the body, and whether it limits the answer already."""
        fields = self._fields(settings, seed)
        limited = any(fields.get(name) is not None for name in self.limit_keys)
        head = encode_payload(fields)[:-1]
        return head + b"," if fields else head, limited

    def _fields(self, settings: CallSettings, seed: int | None) -> dict[str, Any]:
        """Return what the calls of ``settings`` share."""
        fields: dict[str, Any] = {"model": self.model} if self.model else {}
        fields.update(settings.sampling)
        if seed is not None:
            fields["seed"] = seed
        for name in self._without:
            fields.pop(name, None)
        if settings.tools:
            tools = list(settings.tools)
            fields["tools"] = tools if self._strict else [*map(_without_strict, tools)]
        if settings.output is not None and self.native_schema:
            schema: dict[str, Any] = {
                "name": settings.output.name,
                "schema": msgspec.Raw(settings.output.document),
            }
            if settings.output.strict and self._strict:
                schema["strict"] = True
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        fields.update(settings.extra)
        return fields

    def _tool_choice(self, choice: Json) -> Json:
        """Return a tool choice in the form of the API."""
        return choice

    def _payload(self, request: Request) -> bytes:
        """Return the messages or the prompt in the form of the API, without blocks of others."""
        messages = request.messages
        if messages is None or len(messages) < 3 or _OWN_MARK not in request.payload:
            return request.payload
        return encode_payload(
            [{k: v for k, v in message.items() if k != PROVIDER_BLOCKS} for message in messages]
        )

    def _own_body(self, body: Mapping[str, Json]) -> bytes:
        """Return a body written by the user, without streaming and with the chosen model."""
        fields = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
        if self.model:
            fields["model"] = self.model
        if self._limit_key not in fields and fields.get("max_tokens") is not None:
            fields[self._limit_key] = fields.pop("max_tokens")
        return encode_payload(fields)


def _without_strict(tool: Json) -> Json:
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {**tool, "function": function}


def read_reply(raw: bytes, content_type: str, headers: Mapping[str, str]) -> Reply | Failure:
    """Parse the body of an HTTP 200 response to a chat or text completion.

    Of several choices the one with index 0 is taken.
    """
    return read_plain_reply(raw) or _read_patiently(raw, content_type, headers)


def read_plain_reply(raw: bytes) -> Reply | None:
    """Parse a response of plain text, None if it is of another form."""
    try:
        body = _decode_reply(raw)
    except _REFUSALS:
        return None
    choice, counts = body.choices[0], body.usage
    usage = NO_USAGE
    if counts is not None:
        prompt, answer = counts.prompt_tokens_details, counts.completion_tokens_details
        usage = Usage(
            counts.prompt_tokens,
            None if prompt is None else prompt.cached_tokens,
            counts.completion_tokens,
            None if answer is None else answer.reasoning_tokens,
        )
    return Reply(
        text=choice.text if choice.message is None else choice.message.content,
        finish_reason=normalize_finish_reason(choice.finish_reason),
        model=body.model,
        usage=usage,
        ttft_ms=None if body.metrics is None else server_ttft({"metrics": body.metrics}),
        logprobs=choice.logprobs,
        request_id=body.id,
    )


def _read_patiently(raw: bytes, content_type: str, headers: Mapping[str, str]) -> Reply | Failure:
    try:
        body = decode_json(raw, strict=True)
        failure = failure_from_body(body, headers)
        if failure is not None:
            return failure
        choices = body.get("choices") if isinstance(body, dict) else None
        choice = first_choice(choices)
        if choice is not None:
            return choice_error(choice) or reply_from_choice(choice, body)
        problem = "choices without a clear first one" if choices else "no choices"
        return unexpected_body(problem, raw)
    except ValueError as error:
        return not_json(raw, content_type, error)


def first_choice(choices: Json) -> dict[str, Any] | None:
    """Return the choice with index 0, or the only one; None if it is ambiguous."""
    if not isinstance(choices, list):
        return None
    candidates = [choice for choice in choices if isinstance(choice, dict)]
    if len(choices) > 1:
        candidates = [choice for choice in candidates if choice.get("index") == 0]
    return candidates[0] if len(candidates) == 1 else None


def choice_error(choice: dict[str, Any]) -> Failure | None:
    """Return the failure inside a choice (OpenRouter), None if there is none."""
    return failure_from_body({"error": choice["error"]}, {}) if choice.get("error") else None


def reply_from_choice(choice: dict[str, Any], body: dict[str, Any]) -> Reply:
    """Convert one choice, with the usage of the whole ``body``.

    Raises:
        ValueError: something in it is nested too deeply.
    """
    message = choice.get("message")
    if not isinstance(message, dict):
        message = {"content": choice.get("text")}
    calls = raw_tool_calls(message)
    return Reply(
        text=content_text(message.get("content")),
        finish_reason=normalize_finish_reason(choice.get("finish_reason")),
        model=optional_text(body.get("model")),
        reasoning=reasoning_text(message) or None,
        refusal=_str(message.get("refusal")) or None,
        tool_calls=read_tool_calls(calls),
        message=reasoning_fields(message) if calls else None,
        usage=read_usage(body.get("usage")),
        ttft_ms=server_ttft(body),
        logprobs=choice.get("logprobs"),
        request_id=optional_text(body.get("id")),
    )


def raw_tool_calls(message: Mapping[str, Json]) -> Json:
    """Return the tool calls of a message or delta, including the legacy ``function_call``."""
    calls, older = message.get("tool_calls"), message.get("function_call")
    return [{"function": older}] if not calls and isinstance(older, dict) else calls


REASONING_KEYS = ("reasoning", "reasoning_content", "reasoning_details")
"""Fields for reasoning, which servers want back in the turns after a tool call."""


def reasoning_fields(message: Mapping[str, Json]) -> dict[str, Json] | None:
    """Return the reasoning fields of a message unchanged; None if there are none."""
    fields = {name: message[name] for name in REASONING_KEYS if message.get(name)}
    return fields or None


def normalize_finish_reason(value: Json) -> str | None:
    """Map a finish reason to OpenAI's values; an unknown one is unchanged, a missing one None."""
    if value is None:
        return None
    word = value if isinstance(value, str) else encode_json(value)
    return _FINISH_WORDS.get(word) or _FINISH_WORDS.get(word.lower(), word)


def reasoning_text(message: dict[str, Any]) -> str:
    """Return the reasoning of a message or delta, from its own field or parts of its content.

    Source of the parts: Mistral's API, ``{"type": "thinking", "thinking": [{"text": ...}]}``.
    """
    named = _str(message.get("reasoning")) or _str(message.get("reasoning_content"))
    content = message.get("content")
    if named or not isinstance(content, list):
        return named
    parts = [part for part in content if _is_reasoning(part)]
    return "".join(content_text(part.get(part["type"], part.get("text"))) or "" for part in parts)


def _is_reasoning(part: Json) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")


def _str(value: Json) -> str:
    return value if isinstance(value, str) else ""


def server_ttft(body: dict[str, Any]) -> float | None:
    """Return the server's own time to first token in ms (vLLM's ``metrics``), or None."""
    metrics = body.get("metrics")
    value = metrics.get("time_to_first_token_ms") if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) else None


def optional_text(value: Json) -> str | None:
    """Return ``value`` as text, None if there is none."""
    return value if value is None or isinstance(value, str) else encode_json(value)


def content_text(content: Json) -> str | None:
    """Return the text of a content field: a string, None, a list of parts or one part."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, dict) and content.get("type") in ("text", "output_text"):
        content = [content]
    if isinstance(content, list):
        return "".join(
            _str(part.get("text")) if isinstance(part, dict) else _str(part)
            for part in content
            if not _is_reasoning(part)
        )
    return encode_json(content)


def read_tool_calls(value: Json) -> tuple[ToolCall, ...]:
    """Return the tool calls of a message; arguments may be text, an object or missing."""
    if not value or not isinstance(value, list | dict):
        return ()
    calls = []
    for position, entry in enumerate([value] if isinstance(value, dict) else value):
        function = entry.get("function") if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            if not isinstance(entry, dict) or not entry.get("name"):
                continue
            function = entry
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = "{}" if arguments is None else encode_json(arguments)
        calls.append(
            ToolCall(
                id=str(entry.get("id") or f"call_{position}"),
                name=str(function.get("name") or ""),
                arguments=arguments or "{}",
            )
        )
    return tuple(calls)


def read_usage(value: Json) -> Usage:
    """Return the token counts; what is missing or null stays None."""
    if not isinstance(value, dict):
        return Usage()
    prompt_details = value.get("prompt_tokens_details")
    details = value.get("completion_tokens_details")
    return Usage(
        prompt=_count(value, "prompt_tokens"),
        cached=_count(prompt_details, "cached_tokens"),
        completion=_count(value, "completion_tokens"),
        reasoning=_count(details, "reasoning_tokens"),
    )


MAX_COUNT = 1 << 53
"""A larger token count is a server error, and no column can hold it."""


def _count(value: Json, name: str) -> int | None:
    number = value.get(name) if isinstance(value, dict) else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return int(number) if 0 <= number <= MAX_COUNT else None
