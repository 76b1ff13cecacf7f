"""Anthropic's Messages API, at Anthropic, at gateways, and at vLLM's ``/v1/messages``.

Source: Anthropic's API reference and the types of its Python SDK, 2.14. System text is separate,
turns alternate, ``max_tokens`` is required, the tool results of a turn share one user message,
thinking is returned unchanged, ``output_config`` carries schema and effort, ``cache_control`` marks
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.failures import failure_from_body, not_json, unexpected_body
from bagent.backends.http.client import Transport
from bagent.backends.http.request import HttpExchange, HttpRequest
from bagent.backends.http.sse import TypedEventStream
from bagent.backends.messages import (
    ChatMessages,
    ImagePart,
    Part,
    ProviderBlocks,
    TextPart,
    ToolResultPart,
    ToolUse,
    read_conversation,
)
from bagent.backends.openai.chat import normalize_finish_reason, optional_text
from bagent.backends.openai.models import fetch_models
from bagent.backends.openai.raw_request import ChatRequests
from bagent.backends.prefix_cache import Marks, SharedPrefix
from bagent.backends.profile import Form
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.backends.wrappers import SingleRequestBackend
from bagent.clocks import unix
from bagent.text.json import decode_json, encode_json
from bagent.types import Failure, Json, Reply, ToolCall, Usage

MAX_TOKENS = 4096
"""Sent if the user set no limit: the API requires one."""

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop_sequences",
}
SAMPLING_NAMES = frozenset((*_SAMPLING, "reasoning_effort"))
"""The sampling parameters of the API."""

IGNORED_SAMPLING = frozenset(("seed",))
"""Parameters that are not sent, with one notice: answers are of the same kind without them."""

_EFFORT = {"minimal": "low"}
_CHOICES = {"auto": "auto", "required": "any", "none": "none"}
_CACHED = {"type": "ephemeral"}

VERSION = "2023-06-01"
"""Value of the header ``anthropic-version``."""

MAX_WRITERS = 64


class AnthropicWriter:
    """Writes the request bodies of one model.

    Args:
        form: as the endpoint was found to want it; see :class:`bagent.backends.profile.Form`.
        shared: knows which prefix of a stage's prompts is worth caching.
    """

    def __init__(self, model: str, form: Form, shared: SharedPrefix) -> None:
        self._model = model
        self._form = form
        self._shared = shared
        self._head: tuple[CallSettings, dict[str, Any], int] | None = None

    def body(self, request: Request, *, stream: bool) -> bytes:
        """Return the JSON bytes of ``request``.

        Raises:
            ValueError: the API has no way to say what the request holds.
        """
        conversation = read_conversation(request.messages or [], typed=True)
        if not conversation.turns:
            raise ValueError("a prompt needs a user message, not only system text")
        head, tools_size = self._kept_head(request.settings)
        fields = dict(head)
        fields.setdefault("max_tokens", request.max_tokens or MAX_TOKENS)
        system = list(conversation.system)
        output = request.settings.output
        if output is not None and not self._form.native_schema:
            # Do not repeat a schema that the prompt contains.
            instruction = schema_text(output.document)
            if not any(output.document.decode() in text for text in system):
                system.append(instruction)
        first = conversation.turns[0].parts[0]
        user = first.text if isinstance(first, TextPart) else ""
        marks = self._shared.look(tools_size, "\n\n".join(system), user)
        if system:
            blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in system]
            if marks.system:
                blocks[-1]["cache_control"] = _CACHED
            fields["system"] = blocks
        elif marks.system and "tools" in fields:
            fields["tools"] = [*fields["tools"][:-1], _marked(fields["tools"][-1])]
        fields["messages"] = _messages(conversation, marks, goes_on="tools" in fields)
        if request.tool_choice is not None and "tools" in fields:
            fields.setdefault("tool_choice", tool_choice(request.tool_choice))
        if stream:
            fields["stream"] = True
        return encode_payload(fields)

    def _kept_head(self, settings: CallSettings) -> tuple[dict[str, Any], int]:
        if self._head is None or self._head[0] is not settings:
            head = self._make_head(settings)
            size = len(encode_payload(head["tools"])) if "tools" in head else 0
            self._head = settings, head, size
        return self._head[1], self._head[2]

    def _make_head(self, settings: CallSettings) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self._model}
        config: dict[str, Any] = {}
        for name, value in settings.sampling.items():
            if name in self._form.without or name in IGNORED_SAMPLING:
                continue
            if name == "reasoning_effort":
                if value == "none":
                    fields["thinking"] = {"type": "disabled"}
                else:
                    config["effort"] = _EFFORT.get(value, value)
            elif name in _SAMPLING:
                wire = list(value) if isinstance(value, tuple) else value
                fields[_SAMPLING[name]] = [wire] if name == "stop" and wire == str(wire) else wire
            else:
                raise ValueError(f"Anthropic's API has no {name}")
        if settings.output is not None and self._form.native_schema:
            schema = msgspec.Raw(settings.output.document)
            config["format"] = {"type": "json_schema", "schema": schema}
        if config:
            fields["output_config"] = config
        if settings.tools:
            fields["tools"] = [tool_definition(tool) for tool in settings.tools]
        for name, value in settings.extra.items():
            fields[name] = tool_choice(value) if name == "tool_choice" else value
        return fields


def schema_text(document: bytes) -> str:
    """Return the instruction for a schema that the server does not enforce."""
    return (
        "Answer with only JSON that is valid under this JSON Schema: no other text, no code fence."
        f"\n{document.decode()}"
    )


def tool_definition(tool: Json) -> dict[str, Json]:
    """Convert a tool from OpenAI's form; any other form is returned unchanged."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return dict(tool)
    definition = {
        "name": function.get("name"),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }
    for name in ("description", "strict"):
        if function.get(name) is not None:
            definition[name] = function[name]
    return definition


def tool_choice(value: Json) -> Json:
    """Convert a tool choice from OpenAI's form."""
    if isinstance(value, str):
        return {"type": _CHOICES.get(value, value)}
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        return {"type": "tool", "name": value["function"].get("name")}
    return value


def _messages(conversation: ChatMessages, marks: Marks, *, goes_on: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in conversation.turns:
        blocks = [_block(part) for part in turn.parts]
        messages.append({"role": turn.role, "content": blocks})
    first = messages[0]["content"]
    if marks.user and first[0].get("type") == "text":
        text = first[0]["text"]
        head = {"type": "text", "text": text[: marks.user], "cache_control": _CACHED}
        tail = {"type": "text", "text": text[marks.user :]}
        first[:1] = [head, tail] if tail["text"].strip() else [{**head, "text": text}]
    last = messages[-1]
    if last["role"] == "assistant" and last["content"][-1].get("type") == "text":
        # The API refuses a prefilled answer that ends with blanks.
        block = last["content"][-1]
        last["content"][-1] = {**block, "text": block["text"].rstrip()}
    elif goes_on and len(messages) > 1 and (marks.system or marks.user):
        last["content"][-1] = _marked(last["content"][-1])
    return messages


def _marked(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "cache_control": _CACHED}


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        if part.url:
            return {"type": "image", "source": {"type": "url", "url": part.url}}
        source = {"type": "base64", "media_type": part.media_type, "data": part.data}
        return {"type": "image", "source": source}
    if isinstance(part, ToolUse):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": part.arguments}
    if isinstance(part, ToolResultPart):
        return _result_block(part)
    if isinstance(part, ProviderBlocks):
        return part.block
    raise AssertionError(part)


def _result_block(part: ToolResultPart) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": part.id}
    if part.parts:
        block["content"] = [_block(inner) for inner in part.parts]
    if part.failed:
        block["is_error"] = True
    return block


def read_message(raw: bytes, content_type: str, headers: Mapping[str, str]) -> Reply | Failure:
    """Parse the body of an HTTP 200 response."""
    try:
        body = decode_json(raw, strict=True)
        failure = failure_from_body(body, headers) if _is_error(body) else None
        if failure is not None:
            return failure
        if isinstance(body, dict) and isinstance(body.get("content"), list):
            return reply_from_message(body)
        return unexpected_body("no message", raw)
    except ValueError as error:
        return not_json(raw, content_type, error)


def _is_error(body: Json) -> bool:
    return not isinstance(body, dict) or body.get("type") == "error" or "content" not in body


def reply_from_message(body: dict[str, Any], ttft_ms: float | None = None) -> Reply:
    """Convert a message, received whole or assembled from a stream, to a reply.

    Raises:
        ValueError: something in it is nested too deeply.
    """
    blocks = [block for block in body["content"] if isinstance(block, dict)]
    texts = [block["text"] for block in blocks if isinstance(block.get("text"), str)]
    thoughts = [str(block.get("thinking") or "") for block in blocks]
    details = body.get("stop_details")
    refusal = details.get("explanation") if isinstance(details, dict) else None
    plain = all(block.get("type") == "text" for block in blocks)
    # The API returns blank texts but refuses them in requests.
    returned_blocks = [
        b for b in blocks if b.get("type") != "text" or str(b.get("text") or "").strip()
    ]
    return Reply(
        text="".join(texts) if texts else None,
        finish_reason=normalize_finish_reason(body.get("stop_reason")),
        model=optional_text(_answering_model(blocks) or body.get("model")),
        reasoning="".join(thoughts) or None,
        refusal=refusal if isinstance(refusal, str) and refusal else None,
        tool_calls=tuple(tool_call(block) for block in blocks if block.get("type") == "tool_use"),
        usage=read_usage(body.get("usage")),
        ttft_ms=ttft_ms,
        request_id=optional_text(body.get("id")),
        blocks=None if plain else returned_blocks,
    )


def _answering_model(blocks: list[dict[str, Any]]) -> Json:
    """Return the model named by the last ``fallback`` block, None without one."""
    targets = [block.get("to") for block in blocks if block.get("type") == "fallback"]
    return targets[-1].get("model") if targets and isinstance(targets[-1], dict) else None


def tool_call(block: dict[str, Any]) -> ToolCall:
    """Convert a ``tool_use`` block; its arguments become JSON text."""
    arguments = block.get("input")
    return ToolCall(
        id=str(block.get("id") or ""),
        name=str(block.get("name") or ""),
        arguments=arguments
        if isinstance(arguments, str)
        else encode_json({} if arguments is None else arguments),
    )


def read_usage(value: Json) -> Usage:
    """Return the token counts. The prompt is the sum of uncached, written and read tokens."""
    if not isinstance(value, dict):
        return Usage()
    fresh, written, read = (
        _count(value, name)
        for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    )
    details = value.get("output_tokens_details")
    return Usage(
        prompt=None if fresh is None else fresh + (written or 0) + (read or 0),
        cached=read,
        completion=_count(value, "output_tokens"),
        reasoning=_count(details, "thinking_tokens") if isinstance(details, dict) else None,
        cache_write=written,
    )


def _count(value: dict[str, Any], name: str) -> int | None:
    number = value.get(name)
    return number if isinstance(number, int) and not isinstance(number, bool) else None


_GROWING = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "compaction_delta": ("content", "content"),
}
"""The deltas that append to a text: the key of the block, and that of the delta."""


def _index(event: dict[str, Any]) -> int:
    """Return the number of the block that an event is about."""
    index = event.get("index")
    return index if isinstance(index, int) else 0


def _object(event: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a field of an event that has to be an object; an empty one where it is none."""
    value = event.get(name)
    return value if isinstance(value, dict) else {}


class AnthropicStream(TypedEventStream):
    """Assembles a streamed message. Token counts are cumulative, so the last ones count."""

    last_event = "a stop reason"

    def __init__(
        self,
        started: float,
        clock: Callable[[], float],
        on_call: Callable[[ToolCall], None] | None = None,
    ) -> None:
        super().__init__(started, clock, on_call)
        self.tool_calls: list[ToolCall] = []
        """Calls whose arguments are whole: each may be run before the stream ends."""
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, list[str]] = {}

    def _event(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "message_start":
            self.pieces += 1
            self._message.update(_object(event, "message"))
            self._count(self._message.get("usage"))
        elif kind == "content_block_start":
            self.pieces += 1
            block = dict(_object(event, "content_block"))
            self._blocks[_index(event)] = block
            if block.get("text") or block.get("type") == "tool_use":
                self._seen()
        elif kind == "content_block_delta":
            self.pieces += 1
            self._delta(_index(event), _object(event, "delta"))
        elif kind == "content_block_stop":
            self._block_ends(_index(event))
        elif kind == "message_delta":
            self.pieces += 1
            self._message.update(_object(event, "delta"))
            self._count(event.get("usage"))
        elif kind == "message_stop":
            self.done = True

    def _count(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self._usage.update({name: n for name, n in usage.items() if n is not None})

    def _delta(self, index: int, delta: dict[str, Any]) -> None:
        block = self._blocks.setdefault(index, {"type": "text", "text": ""})
        kind = str(delta.get("type"))
        if kind == "input_json_delta":
            self._inputs.setdefault(index, []).append(str(delta.get("partial_json") or ""))
            self._seen()
        elif kind in _GROWING:
            key, source = _GROWING[kind]
            block[key] = str(block.get(key) or "") + str(delta.get(source) or "")
            if kind in ("text_delta", "thinking_delta"):
                self._seen()
            if delta.get("encrypted_content") is not None:  # of a compaction; the last one counts
                block["encrypted_content"] = delta["encrypted_content"]
        elif kind == "citations_delta":
            earlier = block.get("citations")
            earlier = earlier if isinstance(earlier, list) else []
            block["citations"] = [*earlier, delta.get("citation")]

    def _block_ends(self, index: int) -> None:
        block = self._blocks.get(index)
        if block is None:
            return
        self._join(block, index)
        if block.get("type") != "tool_use":
            return
        call = tool_call(block)
        self.tool_calls.append(call)
        if self._on_call is not None:
            self._on_call(call)

    def _join(self, block: dict[str, Any], index: int) -> None:
        """Join the pieces of a call's input. Input that is not JSON stays text."""
        text = "".join(self._inputs.pop(index, ()))
        if text.strip():
            try:
                block["input"] = decode_json(text)
            except ValueError:
                block["input"] = text

    @property
    def whole(self) -> bool:
        """Whether a stop reason was received: losing the rest does no harm."""
        return bool(self._message.get("stop_reason"))

    @property
    def text(self) -> str:
        """The text received so far."""
        return "".join(str(block.get("text") or "") for _, block in sorted(self._blocks.items()))

    def _reply(self, ttft_ms: float | None) -> Reply:
        for index in list(self._inputs):  # the end of their blocks was never reported
            self._join(self._blocks[index], index)
        blocks = [block for _, block in sorted(self._blocks.items())]
        return reply_from_message(
            {**self._message, "content": blocks, "usage": self._usage}, ttft_ms=ttft_ms
        )

    def _read_whole(self, raw: bytes) -> Reply | Failure:
        return read_message(raw, "text/event-stream", {})


class AnthropicBackend(SingleRequestBackend):
    """Sends one call per request to ``/messages``.

    The endpoint's headers hold the key (``x-api-key``, or what a gateway requires) and the version.

    Args:
        enforce: ``auto`` asks for the schema by ``output_config`` until the endpoint refuses it,
            ``native`` asks always, ``prompt`` never.
        clock: Unix seconds.
        notice: called with a line for people when something is learned or left out.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        enforce: str = "auto",
        clock: Callable[[], float] = unix,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(enforce, clock, notice)
        self._transport = transport
        self._http = HttpExchange(transport, self._profiles, clock)
        self._chats = ChatRequests("Anthropic's API", IGNORED_SAMPLING, notice)
        self._writers: dict[tuple[str, Form, int], tuple[CallSettings, AnthropicWriter]] = {}

    async def _send(
        self, endpoint: Endpoint, request: Request, timeouts: Timeouts, exchange: Exchange
    ) -> Reply | Failure:
        try:
            chat = self._chats.unpack(request)
            form = self._forms.of(endpoint, chat)
            stream = chat.stream and form.stream
            body = self._writer(endpoint, chat, form).body(chat, stream=stream)
        except ValueError as error:
            return Failure("rejected", f"not sent to {endpoint.name}: {error}")
        reader = None
        if stream:
            on_call = chat.watch() if chat.watch else None
            reader = AnthropicStream(exchange.sent, self._clock, on_call)
        http_request = HttpRequest(endpoint, "/messages", body, timeouts, chat.began)
        result = await self._http.send(http_request, exchange, read_message, reader)
        if isinstance(result, Failure) and exchange.status is not None:
            exchange.learned = self._forms.learn(endpoint, chat, result, form)
        return result

    def _writer(self, endpoint: Endpoint, request: Request, form: Form) -> AnthropicWriter:
        settings = request.settings
        model = settings.model or endpoint.tags.get("model") or self._profiles.of(endpoint).model
        key = (model, form, id(settings))
        cached = self._writers.get(key)
        if cached is None:
            if len(self._writers) >= MAX_WRITERS:
                self._writers.clear()
            # Keep a reference to the settings, so that their id is not reused.
            cached = settings, AnthropicWriter(model, form, SharedPrefix())
            self._writers[key] = cached
        return cached[1]

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """GET ``/models``. A missing route is not a failure.

        A list of several models selects none of them: the job has to name one.
        """
        capabilities = await fetch_models(self._transport, endpoint, seconds)
        if isinstance(capabilities, Failure) or not capabilities.models_route:
            return capabilities
        if len(capabilities.models) == 1:
            self._profiles.of(endpoint).update(capabilities)
            return capabilities
        return Capabilities(engine=capabilities.engine, models_route=True)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()
