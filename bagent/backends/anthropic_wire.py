"""Anthropic's Messages API: bodies out, replies in.

Source: Anthropic's API reference and the types of its Python SDK, 2.14: system text apart,
alternating turns, ``max_tokens`` always, tool results of one turn in one user message, thinking
given back unchanged, ``output_config`` for schema and effort, ``cache_control`` on blocks. vLLM
serves the same at ``/v1/messages``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bagent.backends.chat_wire import finish_word, optional_text
from bagent.backends.failures import from_body_error, shorten
from bagent.backends.forms import Form
from bagent.backends.json_text import decode_json, encode_json
from bagent.backends.prefix_cache import Marks, SharedPrefix
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.backends.turns import Asked, Image, Own, Part, Result, Talk, Text, read_talk
from bagent.types import Failure, Json, Reply, ToolCall, Usage

MAX_TOKENS = 4096
"""Asked for where the user named no number: the API wants one with every call."""

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop_sequences",
}
SAMPLING_NAMES = frozenset((*_SAMPLING, "reasoning_effort"))
"""The sampling parameters that the API has."""

LEFT_OUT = frozenset(("seed",))
"""Parameters that are left out, which is said once: answers are the same kind without them."""

_EFFORT = {"minimal": "low"}
_CHOICES = {"auto": "auto", "required": "any", "none": "none"}
_CACHED = {"type": "ephemeral"}


class AnthropicWriter:
    """Makes request bodies of one model's calls.

    Args:
        form: as the endpoint was found to want it; see :class:`bagent.backends.forms.Form`.
        shared: knows which prefix of a stage's prompts is worth caching.
    """

    def __init__(self, model: str, form: Form, shared: SharedPrefix) -> None:
        self._model = model
        self._form = form
        self._shared = shared
        self._head: tuple[CallSettings, dict[str, Any], int] | None = None

    def body(self, request: Request, *, stream: bool) -> bytes:
        """JSON bytes of ``request``.

        Raises:
            ValueError: the API has no way to say what the request holds.
        """
        talk = read_talk(request.messages or [], typed=True)
        if not talk.turns:
            raise ValueError("a prompt needs a user message, not only system text")
        head, tools_size = self._kept_head(request.settings)
        fields = dict(head)
        fields.setdefault("max_tokens", request.max_tokens or MAX_TOKENS)
        system = list(talk.system)
        output = request.settings.output
        if output is not None and not self._form.native_schema:
            # Where the schema stands in the prompt already it is not told twice.
            words = schema_text(output.document)
            if not any(output.document.decode() in text for text in system):
                system.append(words)
        first = talk.turns[0].parts[0]
        user = first.text if isinstance(first, Text) else ""
        marks = self._shared.look(tools_size, "\n\n".join(system), user)
        if system:
            blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in system]
            if marks.system:
                blocks[-1]["cache_control"] = _CACHED
            fields["system"] = blocks
        elif marks.system and "tools" in fields:
            fields["tools"] = [*fields["tools"][:-1], _marked(fields["tools"][-1])]
        fields["messages"] = _messages(talk, marks, goes_on="tools" in fields)
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
            if name in self._form.without or name in LEFT_OUT:
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
    """Words that ask for the schema where the server does not enforce it."""
    return (
        "Answer with only JSON that is valid under this JSON Schema: no other text, no code fence."
        f"\n{document.decode()}"
    )


def tool_definition(tool: Json) -> dict[str, Json]:
    """A tool in OpenAI form as Anthropic's; one that is in neither form stays as it is."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return dict(tool)
    found = {
        "name": function.get("name"),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }
    for name in ("description", "strict"):
        if function.get(name) is not None:
            found[name] = function[name]
    return found


def tool_choice(value: Json) -> Json:
    """A choice of tools in OpenAI form as Anthropic's."""
    if isinstance(value, str):
        return {"type": _CHOICES.get(value, value)}
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        return {"type": "tool", "name": value["function"].get("name")}
    return value


def _messages(talk: Talk, marks: Marks, *, goes_on: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in talk.turns:
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
        # The API refuses an answer begun for the model that ends in blanks.
        block = last["content"][-1]
        last["content"][-1] = {**block, "text": block["text"].rstrip()}
    elif goes_on and len(messages) > 1 and (marks.system or marks.user):
        last["content"][-1] = _marked(last["content"][-1])
    return messages


def _marked(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "cache_control": _CACHED}


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Image):
        if part.url:
            return {"type": "image", "source": {"type": "url", "url": part.url}}
        source = {"type": "base64", "media_type": part.media_type, "data": part.data}
        return {"type": "image", "source": source}
    if isinstance(part, Asked):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": part.arguments}
    if isinstance(part, Result):
        return _result_block(part)
    if isinstance(part, Own):
        return part.block
    raise AssertionError(part)


def _result_block(part: Result) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": part.id}
    if part.parts:
        block["content"] = [_block(inner) for inner in part.parts]
    if part.failed:
        block["is_error"] = True
    return block


def read_message(raw: bytes, content_type: str, headers: Mapping[str, str]) -> Reply | Failure:
    """The reply in the body of an HTTP 200 answer."""
    try:
        body = decode_json(raw)
        failure = from_body_error(body, headers) if _is_error(body) else None
        if failure is not None:
            return failure
        if isinstance(body, dict) and isinstance(body.get("content"), list):
            return reply_from_message(body)
        what = "no message"
    except ValueError:
        what = f"not JSON ({content_type.split(';')[0] or 'no content type'})"
    shown = shorten(raw[:800].decode("utf-8", "replace"), 200) or "nothing"
    return Failure("bad_response", f"{what} behind HTTP 200: {shown}", passing=True, status=200)


def _is_error(body: Json) -> bool:
    return not isinstance(body, dict) or body.get("type") == "error" or "content" not in body


def reply_from_message(body: dict[str, Any], ttft_ms: float | None = None) -> Reply:
    """A message as a reply; ``body`` is what the API answers, or a stream put together.

    Raises:
        ValueError: something in it is nested too deeply.
    """
    blocks = [block for block in body["content"] if isinstance(block, dict)]
    texts = [block["text"] for block in blocks if isinstance(block.get("text"), str)]
    thoughts = [str(block.get("thinking") or "") for block in blocks]
    details = body.get("stop_details")
    refusal = details.get("explanation") if isinstance(details, dict) else None
    plain = all(block.get("type") == "text" for block in blocks)
    # The API gives blank texts and refuses to take them back.
    kept = [b for b in blocks if b.get("type") != "text" or str(b.get("text") or "").strip()]
    return Reply(
        text="".join(texts) if texts else None,
        finish_reason=finish_word(body.get("stop_reason")),
        model=optional_text(_answering_model(blocks) or body.get("model")),
        reasoning="".join(thoughts) or None,
        refusal=refusal if isinstance(refusal, str) and refusal else None,
        tool_calls=tuple(tool_call(block) for block in blocks if block.get("type") == "tool_use"),
        usage=read_usage(body.get("usage")),
        ttft_ms=ttft_ms,
        request_id=optional_text(body.get("id")),
        blocks=None if plain else kept,
    )


def _answering_model(blocks: list[dict[str, Any]]) -> Json:
    """Return the model that the last ``fallback`` block hands over to, None without one."""
    targets = [block.get("to") for block in blocks if block.get("type") == "fallback"]
    return targets[-1].get("model") if targets and isinstance(targets[-1], dict) else None


def tool_call(block: dict[str, Any]) -> ToolCall:
    """The tool call of a ``tool_use`` block, its arguments as JSON text."""
    told = block.get("input")
    return ToolCall(
        id=str(block.get("id") or ""),
        name=str(block.get("name") or ""),
        arguments=told if isinstance(told, str) else encode_json({} if told is None else told),
    )


def read_usage(value: Json) -> Usage:
    """Token counts: a prompt is what was not cached, what was written and what was read."""
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
