"""Requests and replies of Amazon Bedrock's Converse.

Source: the ``bedrock-runtime`` service model of botocore 1.44 (``Converse``, ``ConverseStream``).
System texts, tools and cache points are elements of lists, tool results stand in user turns,
reasoning is returned unchanged.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any

import msgspec

from bagent.backends.anthropic import MAX_TOKENS, schema_text
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
from bagent.backends.prefix_cache import Marks, SharedPrefix
from bagent.backends.profile import Form
from bagent.backends.request import OutputFormat, Request
from bagent.text.json import decode_json, encode_json
from bagent.types import Failure, Json, Reply, ToolCall, Usage

_INFERENCE = {"temperature": "temperature", "top_p": "topP", "stop": "stopSequences"}
SAMPLING_NAMES = frozenset((*_INFERENCE, "top_k", "reasoning_effort"))
"""The sampling parameters that Converse has or passes on."""

IGNORED_SAMPLING = frozenset(("seed",))
"""Parameters that are not sent, with one notice."""

_TOP_LEVEL = frozenset(
    (
        *("additionalModelRequestFields", "additionalModelResponseFieldPaths", "guardrailConfig"),
        *("performanceConfig", "promptVariables", "requestMetadata", "serviceTier"),
    )
)
_CACHE_POINT = {"cachePoint": {"type": "default"}}
_CHOICES: dict[str, dict[str, Json]] = {"auto": {"auto": {}}, "required": {"any": {}}}
_REDACTED = "redactedContent"


def converse_arguments(
    request: Request, model: str, form: Form, shared: SharedPrefix
) -> dict[str, Any]:
    """Return the arguments of ``converse`` and ``converse_stream`` for a call.

    Args:
        model: a model's id, or the ARN of a model, an inference profile or a prompt router.
        form: as the model was found to want it.
        shared: knows which prefix of a stage's prompts is worth caching.

    Raises:
        ValueError: Converse has no way to say what the request holds.
    """
    conversation = read_conversation(request.messages or [], typed=False)
    if not conversation.turns:
        raise ValueError("a prompt needs a user message, not only system text")
    settings = request.settings
    fields = _settings(request, form)
    system = list(conversation.system)
    tools = [_tool(tool) for tool in settings.tools]
    if settings.output is not None and not form.native_schema:
        document = settings.output.document
        if not any(document.decode() in text for text in system):
            system.append(schema_text(document))
    first = conversation.turns[0].parts[0]
    user = first.text if isinstance(first, TextPart) else ""
    size = len(encode_json(tools)) if tools else 0
    marks = shared.look(size, "\n\n".join(system), user)
    point = [_CACHE_POINT] if marks.system else []
    if system:
        fields["system"] = [*({"text": text} for text in system), *point]
    if tools:
        choice = fields.pop("tool_choice", None)
        if choice is None and request.tool_choice not in (None, "none"):
            choice = _choice(request.tool_choice)  # the API has no "none"
        config: dict[str, Any] = {"tools": tools if system else [*tools, *point]}
        if choice is not None:
            config["toolChoice"] = choice
        fields["toolConfig"] = config
    fields["modelId"] = model
    fields["messages"] = _messages(conversation, marks, goes_on=bool(tools))
    return fields


def _settings(request: Request, form: Form) -> dict[str, Any]:
    settings = request.settings
    inference: dict[str, Any] = {"maxTokens": request.max_tokens or MAX_TOKENS}
    more: dict[str, Any] = {}
    output: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for name, value in settings.sampling.items():
        if name in form.without or name in IGNORED_SAMPLING:
            continue
        if name in _INFERENCE:
            converted = list(value) if isinstance(value, tuple) else value
            inference[_INFERENCE[name]] = (
                [converted] if name == "stop" and converted == str(converted) else converted
            )
        elif name == "top_k":
            more["top_k"] = value
        elif name == "reasoning_effort":
            output["effort"] = value
        else:
            raise ValueError(f"Bedrock's Converse has no {name}")
    for name, value in settings.extra.items():
        if name == "tool_choice":
            fields[name] = _choice(value)
        elif name in _TOP_LEVEL:
            fields[name] = value
        else:
            more[name] = value
    if settings.output is not None and form.native_schema:
        output["textFormat"] = _format(settings.output)
    if output:
        fields["outputConfig"] = output
    if more:
        converted = fields.get("additionalModelRequestFields")
        fields["additionalModelRequestFields"] = {**(converted or {}), **more}
    return {"inferenceConfig": inference, **fields}


def _format(output: OutputFormat) -> dict[str, Json]:
    schema = {"name": output.name, "schema": output.document.decode()}
    return {"type": "json_schema", "structure": {"jsonSchema": schema}}


def _tool(tool: Json) -> dict[str, Json]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return dict(tool)
    spec: dict[str, Json] = {
        "name": function.get("name"),
        "inputSchema": {"json": function.get("parameters") or {"type": "object"}},
    }
    if function.get("description"):
        spec["description"] = function["description"]
    return {"toolSpec": spec}


def _choice(value: Json) -> Json:
    if isinstance(value, str):
        return _CHOICES.get(value)
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        return {"tool": {"name": value["function"].get("name")}}
    return value


def _messages(conversation: ChatMessages, marks: Marks, *, goes_on: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": turn.role, "content": [_block(part) for part in turn.parts]}
        for turn in conversation.turns
    ]
    first = messages[0]["content"]
    if marks.user and "text" in first[0]:
        head, tail = first[0]["text"][: marks.user], first[0]["text"][marks.user :]
        first[:1] = [{"text": head}, _CACHE_POINT, *([{"text": tail}] if tail.strip() else [])]
    if goes_on and len(messages) > 1 and (marks.system or marks.user):
        messages[-1]["content"].append(_CACHE_POINT)
    return messages


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"text": part.text}
    if isinstance(part, ImagePart):
        return _image(part)
    if isinstance(part, ToolUse):
        used = {"toolUseId": part.id, "name": part.name, "input": part.arguments}
        return {"toolUse": used}
    if isinstance(part, ToolResultPart):
        content = [_block(inner) for inner in part.parts] or [{"text": "(no output)"}]
        result: dict[str, Any] = {"toolUseId": part.id, "content": content}
        if part.failed:
            result["status"] = "error"
        return {"toolResult": result}
    if isinstance(part, ProviderBlocks):
        return _with_bytes(part.block)
    raise AssertionError(part)


def _image(image: ImagePart) -> dict[str, Any]:
    if image.url:
        raise ValueError("Bedrock takes images as bytes, not by address: write image: FILE")
    try:
        content = base64.b64decode(image.data, validate=True)
    except binascii.Error:
        raise ValueError("an image is no base64") from None
    form = image.media_type.removeprefix("image/").replace("jpg", "jpeg")
    return {"image": {"format": form, "source": {"bytes": content}}}


def _with_bytes(block: dict[str, Json]) -> dict[str, Any]:
    """Decode redacted reasoning: bytes on the wire, base64 in journals."""
    reasoning = block.get("reasoningContent")
    if isinstance(reasoning, dict) and isinstance(reasoning.get(_REDACTED), str):
        return {"reasoningContent": {_REDACTED: base64.b64decode(reasoning[_REDACTED])}}
    return block


def _with_text(block: dict[str, Any]) -> dict[str, Json]:
    reasoning = block.get("reasoningContent")
    if isinstance(reasoning, dict) and isinstance(reasoning.get(_REDACTED), bytes):
        text = base64.b64encode(reasoning[_REDACTED]).decode("ascii")
        return {"reasoningContent": {_REDACTED: text}}
    return block


def read_converse(
    content: list[dict[str, Any]], stop: Json, usage: Json, model: str, ttft_ms: float | None = None
) -> Reply:
    """Convert content blocks, stop reason and usage to a reply."""
    texts = [block["text"] for block in content if isinstance(block.get("text"), str)]
    thoughts = []
    for block in content:
        reasoning = block.get("reasoningContent")
        reasoning_text = reasoning.get("reasoningText") if isinstance(reasoning, dict) else None
        thoughts.append(
            str(reasoning_text.get("text") or "") if isinstance(reasoning_text, dict) else ""
        )
    plain = all(block.keys() == {"text"} for block in content)
    uses = [block.get("toolUse") for block in content]
    returned_blocks = [_with_text(b) for b in content if str(b.get("text", "x")).strip()]
    return Reply(
        text="".join(texts) if texts else None,
        finish_reason=normalize_finish_reason(stop),
        model=model,
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(tool_call(use) for use in uses if isinstance(use, dict)),
        usage=read_usage(usage),
        ttft_ms=ttft_ms,
        blocks=None if plain else returned_blocks,
    )


def read_answer(answer: dict[str, Any], model: str) -> Reply:
    """Convert the result of ``converse`` to a reply."""
    output = answer.get("output")
    message = output.get("message") if isinstance(output, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    blocks = (
        [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    )
    reply = read_converse(blocks, answer.get("stopReason"), answer.get("usage"), model)
    request_id = optional_text((answer.get("ResponseMetadata") or {}).get("RequestId"))
    return msgspec.structs.replace(reply, request_id=request_id)


def tool_call(used: dict[str, Any]) -> ToolCall:
    """Convert a ``toolUse`` block; its input is an object, or text in a stream."""
    arguments_input = used.get("input")
    arguments = (
        arguments_input
        if isinstance(arguments_input, str)
        else encode_json({} if arguments_input is None else arguments_input)
    )
    return ToolCall(str(used.get("toolUseId") or ""), str(used.get("name") or ""), arguments)


def parsed_input(text: str) -> Json:
    """Parse the input of a streamed tool call; text that is not JSON stays text."""
    if not text.strip():
        return {}
    try:
        return decode_json(text)
    except ValueError:
        return text


def read_usage(value: Json) -> Usage:
    """Return the token counts. The prompt is the sum of uncached, written and read tokens."""
    if not isinstance(value, dict):
        return Usage()
    names = ("inputTokens", "outputTokens", "cacheReadInputTokens", "cacheWriteInputTokens")
    counts = [value.get(name) for name in names]
    fresh, completion, read, written = (n if isinstance(n, int) else None for n in counts)
    return Usage(
        prompt=None if fresh is None else fresh + (read or 0) + (written or 0),
        cached=read,
        completion=completion,
        cache_write=written,
    )


class BedrockStream:
    """Assembles a streamed answer from decoded events; see :meth:`take`.

    Only a stop reason completes an answer. One thread writes; others may read ``first_token`` and
    ``heard``, both in seconds on ``clock``.

    Args:
        started: when the request was sent.
        model: named in the reply, since events name none.
        on_call: gets every tool call once its arguments are whole, in the thread that reads.
        on_piece: gets every piece of text and reasoning there, after the word for which it is;
            and ``first`` with no text when an answer begins.
    """

    def __init__(
        self,
        started: float,
        clock: Callable[[], float],
        model: str,
        on_call: Callable[[ToolCall], None] | None = None,
        on_piece: Callable[[str, str], None] | None = None,
    ) -> None:
        self._on_call = on_call
        self._on_piece = on_piece
        self._clock = clock
        self._started = started
        self._model = model
        self.heard = started
        self.first_token: float | None = None
        self.abandoned = False
        """Set by who no longer waits: the rest of the stream is then not read."""
        self.tool_calls: list[ToolCall] = []
        """Calls whose arguments are whole: each may be run before the stream ends."""
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, list[str]] = {}
        self._stop: str | None = None
        self._usage: Any = None

    def take(self, event: dict[str, Any]) -> None:
        """Apply the next event, ``{name: fields}`` as boto3 yields it."""
        self.heard = self._clock()
        for name, fields in event.items():
            if name == "contentBlockStart":
                start = fields.get("start") or {}
                if "toolUse" in start:
                    self._seen()
                    self._blocks[fields["contentBlockIndex"]] = {"toolUse": {**start["toolUse"]}}
            elif name == "contentBlockDelta":
                self._delta(fields["contentBlockIndex"], fields.get("delta") or {})
            elif name == "contentBlockStop":
                self._block_ends(fields["contentBlockIndex"])
            elif name == "messageStop":
                self._stop = fields.get("stopReason")
            elif name == "metadata":
                self._usage = fields.get("usage")

    def _seen(self) -> None:
        if self.first_token is None:
            self.first_token = self._clock()
            if self._on_piece is not None:
                self._on_piece("first", "")

    def _delta(self, index: int, delta: dict[str, Any]) -> None:
        if "text" in delta:
            self._seen()
            block = self._blocks.setdefault(index, {"text": ""})
            block["text"] = block.get("text", "") + delta["text"]
            self._emit("text", delta["text"])
        elif "toolUse" in delta:
            self._seen()
            self._inputs.setdefault(index, []).append(delta["toolUse"].get("input") or "")
        elif "reasoningContent" in delta:
            self._reasoning(index, delta["reasoningContent"])

    def _reasoning(self, index: int, delta: dict[str, Any]) -> None:
        self._seen()
        block = self._blocks.setdefault(index, {"reasoningContent": {}})["reasoningContent"]
        if "redactedContent" in delta:
            block["redactedContent"] = block.get("redactedContent", b"") + delta["redactedContent"]
            return
        reasoning_text = block.setdefault("reasoningText", {"text": ""})
        for name in ("text", "signature"):
            if name in delta:
                reasoning_text[name] = reasoning_text.get(name, "") + delta[name]
        self._emit("reasoning", delta.get("text") or "")

    def _emit(self, kind: str, text: str) -> None:
        if text and self._on_piece is not None:
            self._on_piece(kind, text)

    def _block_ends(self, index: int) -> None:
        used = self._join(index)
        if used is not None:
            call = tool_call(used)
            self.tool_calls.append(call)
            if self._on_call is not None:
                self._on_call(call)

    def _join(self, index: int) -> dict[str, Any] | None:
        """Join the input of a block's tool use; None for any other block."""
        used: dict[str, Any] | None = self._blocks.get(index, {}).get("toolUse")
        if used is not None:
            used["input"] = parsed_input("".join(self._inputs.pop(index, ())))
        return used

    @property
    def whole(self) -> bool:
        """Whether a stop reason was received."""
        return self._stop is not None

    @property
    def text(self) -> str:
        """The text received so far."""
        return "".join(block.get("text", "") for _, block in sorted(self._blocks.items()))

    def result(self) -> Reply | Failure:
        """Return the reply, or the failure of a stream without a stop reason."""
        if self._stop is None:
            message = "the stream ended without a stop reason"
            return Failure("bad_response", message, True, 200, text=self.text or None)
        for index in list(self._inputs):  # the end of their blocks was never reported
            self._join(index)
        ttft = None if self.first_token is None else (self.first_token - self._started) * 1000
        content = [block for _, block in sorted(self._blocks.items())]
        return read_converse(content, self._stop, self._usage, self._model, ttft)
