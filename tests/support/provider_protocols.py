"""Providers' wire forms for one neutral answer, and the rules that each makes of requests.

``ModelAnswer`` is what a model says; a wire writes it as its provider would, whole or streamed, and
complains of requests that the provider would refuse. Sources of the engines: vLLM 0.33, SGLang
0.5.23 and NVIDIA Dynamo 1.6, as released.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import msgspec

from support.response_bodies import sse, streamed

Json = Any
SECRET = "key-5up3rs3cret"


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. ``calls`` are (id, name, arguments); ``thought`` is thinking with a signature.

    ``prompt`` counts the whole prompt, ``cached`` what was read from a cache and ``written``
    what was written to one.
    """

    text: str | None = "hello world"
    calls: tuple[tuple[str, str, dict[str, Json]], ...] = ()
    stop: str = "stop"
    thought: str | None = None
    prompt: int = 30
    cached: int = 20
    written: int = 0
    completion: int = 7


class Wire:
    """One provider's protocol, as a server speaks it.

    Each has ``complaint(body)``: what is wrong with a request, None if nothing is; ``whole(say)``:
    the body of an answer; ``events(say)``: the pieces of a streamed one; ``inner_error()``: the
    piece of a stream that reports an error.
    """

    content_type = "text/event-stream"
    ERRORS: ClassVar[dict[str, tuple[int, str | None, str]]]
    """Status, name and message of each refusal."""
    BAD: str | None = "invalid_request_error"
    """The name of a refusal of a request that is wrong."""
    WAITS: ClassVar[dict[str, str]] = {"throttled": "2"}
    """The seconds to wait that refusals tell."""

    def streamed(self, path: str, body: Json) -> bool:
        """Whether the request asks for a stream."""
        return bool(body.get("stream"))

    def error(self, kind: str) -> tuple[int, dict[str, str], Json]:
        """Status, headers and body of a refusal: throttled, overloaded, no_money, bad_key,
        too_long, or ``bad:WORDS`` for a request that is wrong."""
        status, name, message = self.refusal(kind)
        headers = {"Retry-After": self.WAITS[kind]} if kind in self.WAITS else {}
        return status, headers, self.error_body(status, name, message)

    def refusal(self, kind: str) -> tuple[int, str | None, str]:
        """Status, name and message."""
        bad = kind.startswith("bad:")
        return (400, self.BAD, kind.removeprefix("bad:")) if bad else self.ERRORS[kind]

    def error_body(self, status: int, name: str | None, message: str) -> Json:
        """An error object in the provider's form."""
        raise NotImplementedError


# --- OpenAI -----------------------------------------------------------------------------------


class OpenAIWire(Wire):
    """Chat completions."""

    BAD = None
    WAITS: ClassVar = {"throttled": "2", "overloaded": "1"}
    ERRORS: ClassVar = {
        "throttled": (429, None, "Rate limit reached"),
        "overloaded": (503, None, "The engine is overloaded"),
        "no_money": (429, "insufficient_quota", "You exceeded your current quota."),
        "bad_key": (401, "invalid_api_key", f"Incorrect API key provided: {SECRET}"),
        "too_long": (400, "context_length_exceeded", "maximum context length is 100 tokens."),
    }

    def complaint(self, body: Json) -> str | None:
        """OpenAI takes roles in any order; only what it never takes is refused."""
        known = {"system", "developer", "user", "assistant", "tool"}
        roles = [message.get("role") for message in body["messages"]]
        return None if set(roles) <= known else f"roles {roles}"

    def whole(self, say: ModelAnswer) -> Json:
        """A chat completion."""
        message: dict[str, Json] = {"role": "assistant", "content": say.text}
        if say.thought:
            message["reasoning"] = say.thought
        if say.calls:
            message["tool_calls"] = [self._call(*call) for call in say.calls]
        if say.stop == "refusal":
            message["content"], message["refusal"] = None, "I cannot help with that."
        choice = {"index": 0, "message": message, "finish_reason": self._stop(say)}
        head = {"id": "c1", "created": 1_700_000_000, "model": "m-1"}
        return {**head, "choices": [choice], "usage": self._usage(say)}

    def events(self, say: ModelAnswer) -> list[bytes]:
        """Chunks, the usage in one of its own."""
        chunks = streamed("chat", self.whole(say), {"stream_options": {"include_usage": True}})
        return [*map(sse, chunks), b"data: [DONE]\n\n"]

    @staticmethod
    def _call(call_id: str, name: str, arguments: Json) -> Json:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"id": call_id, "type": "function", "function": function}

    @staticmethod
    def _stop(say: ModelAnswer) -> str:
        return "stop" if say.stop == "refusal" else say.stop

    @staticmethod
    def _usage(say: ModelAnswer) -> Json:
        details = {"cached_tokens": say.cached}
        tokens = {"prompt_tokens": say.prompt, "completion_tokens": say.completion}
        return {**tokens, "prompt_tokens_details": details}

    def error_body(self, status: int, name: str | None, message: str) -> Json:
        """OpenAI's error objects."""
        kind = "invalid_request_error" if status in (400, 401) else "server_error"
        return {"error": {"message": message, "type": kind, "code": name}}

    def inner_error(self) -> bytes:
        """An error object in place of a chunk."""
        return sse({"error": {"message": "The server had an error", "code": 503}})


# --- OpenAI's responses -----------------------------------------------------------------------


class ResponsesWire(OpenAIWire):
    """``/v1/responses``, with the rules that it enforces; errors are those of chats."""

    def complaint(self, body: Json) -> str | None:
        """Nothing of chat completions; its tools name their function beside the type."""
        if "input" not in body:
            return super().complaint(body)
        unknown = body.keys() & {"messages", "max_tokens", "response_format", "stream_options"}
        if unknown:
            return f"Unknown parameter: {sorted(unknown)}"
        nested = [tool for tool in body.get("tools") or () if "function" in tool]
        return "tools: missing required parameter: name" if nested else None

    def whole(self, say: ModelAnswer) -> Json:
        """A response object."""
        cut = say.stop == "length"
        return {
            "id": "resp_1",
            "object": "response",
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": "m-1",
            "output": self._items(say),
            "usage": {
                "input_tokens": say.prompt,
                "input_tokens_details": {"cached_tokens": say.cached},
                "output_tokens": say.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }

    def events(self, say: ModelAnswer) -> list[bytes]:
        """The events of each item, and the whole response at the end."""
        response = self.whole(say)
        begun = {**response, "status": "in_progress", "output": [], "usage": None}
        events: list[Json] = [{"type": "response.created", "response": begun}]
        for index, item in enumerate(response["output"]):
            empty = {**item, "content": [], "arguments": ""}
            events.append({"type": "response.output_item.added", "item": empty})
            events += [
                {"type": f"response.{kind}.delta", "output_index": index, "delta": piece}
                for kind, piece in self._deltas(item)
            ]
            events.append({"type": "response.output_item.done", "item": item})
        events.append({"type": f"response.{response['status']}", "response": response})
        return [sse(event, event["type"]) for event in events]

    @staticmethod
    def _items(say: ModelAnswer) -> list[Json]:
        items: list[Json] = []
        if say.thought:
            summary = [{"type": "summary_text", "text": say.thought}]
            head = {"type": "reasoning", "id": "rs_1", "encrypted_content": "s1g=="}
            items.append({**head, "summary": summary})
        if say.text is not None or say.stop == "refusal":
            part = {"type": "output_text", "text": say.text, "annotations": []}
            if say.stop == "refusal":
                part = {"type": "refusal", "refusal": "I cannot help with that."}
            items.append({"type": "message", "id": "msg_1", "role": "assistant", "content": [part]})
        for call_id, name, arguments in say.calls:
            head = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id}
            items.append({**head, "name": name, "arguments": json.dumps(arguments)})
        return items

    @staticmethod
    def _deltas(item: Json) -> list[tuple[str, str]]:
        if item["type"] == "function_call":
            return [("function_call_arguments", piece) for piece in pieces(item["arguments"])]
        if item["type"] == "reasoning":
            return [("reasoning_summary_text", item["summary"][0]["text"])]
        part = item["content"][0]
        kind = "refusal" if part["type"] == "refusal" else "output_text"
        return [(kind, piece) for piece in pieces(part.get("text") or part.get("refusal"))]

    def inner_error(self) -> bytes:
        """An event of its own."""
        error = {"type": "error", "code": "503", "message": "The server had an error"}
        return sse(error, "error")


# --- Anthropic --------------------------------------------------------------------------------

STOP_WORDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicWire(Wire):
    """The Messages API, with the rules that it enforces."""

    ERRORS: ClassVar = {
        "throttled": (429, "rate_limit_error", "Too many requests"),
        "overloaded": (529, "overloaded_error", "Overloaded"),
        "no_money": (400, Wire.BAD, "Your credit balance is too low to access the Anthropic API."),
        "bad_key": (401, "authentication_error", f"invalid x-api-key {SECRET}"),
        "too_long": (400, Wire.BAD, "prompt is too long: 210000 tokens > 200000 maximum"),
    }

    def complaint(self, body: Json) -> str | None:
        """max_tokens, alternating roles, no system role, no blank text, results first."""
        if not isinstance(body.get("max_tokens"), int):
            return "max_tokens: Field required"
        roles = [message["role"] for message in body["messages"]]
        if roles != [("user", "assistant")[n % 2] for n in range(len(roles))]:
            return f"messages: roles must alternate between user and assistant, got {roles}"
        for message in body["messages"]:
            kinds = [block["type"] for block in message["content"]]
            if "tool_result" in kinds[kinds.count("tool_result") :]:
                return "messages: tool_result blocks come first"
            for block in message["content"]:
                if block["type"] == "text" and not block["text"].strip():
                    return "messages: text content blocks must be non-empty"
        return results_complaint(body["messages"], "tool_use", "tool_result", "id", "tool_use_id")

    def whole(self, say: ModelAnswer) -> Json:
        """A message."""
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m-1",
            "content": self._blocks(say),
            **self._stop(say),
            "usage": self._usage(say),
        }

    def events(self, say: ModelAnswer) -> list[bytes]:
        """The six kinds of events, the counts cumulative."""
        usage = {**self._usage(say), "output_tokens": 1}
        start = {**self.whole(say), "content": [], "stop_reason": None, "usage": usage}
        events: list[Json] = [{"type": "message_start", "message": start}, {"type": "ping"}]
        for index, block in enumerate(self._blocks(say)):
            empty, deltas = self._parts(block)
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events += [
                {"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas
            ]
            events.append({"type": "content_block_stop", "index": index})
        usage = {"output_tokens": say.completion}
        events.append({"type": "message_delta", "delta": self._stop(say), "usage": usage})
        events.append({"type": "message_stop"})
        return [sse(event, event["type"]) for event in events]

    @staticmethod
    def _blocks(say: ModelAnswer) -> list[Json]:
        blocks: list[Json] = []
        if say.thought:
            blocks.append({"type": "thinking", "thinking": say.thought, "signature": "s1g=="})
        if say.text is not None:
            blocks.append({"type": "text", "text": say.text})
        blocks += [
            {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
            for call_id, name, arguments in say.calls
        ]
        return blocks

    @staticmethod
    def _parts(block: Json) -> tuple[Json, list[Json]]:
        kind = block["type"]
        if kind == "text":
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
            return {"type": "text", "text": ""}, deltas
        if kind == "thinking":
            told = {"type": "thinking_delta", "thinking": block["thinking"]}
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return {"type": "thinking", "thinking": "", "signature": ""}, [told, signed]
        text = json.dumps(block["input"])
        parts = ("", text[:3], text[3:])
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in parts]
        return {**block, "input": {}}, deltas

    @staticmethod
    def _stop(say: ModelAnswer) -> dict[str, Json]:
        reason = STOP_WORDS.get(say.stop, say.stop)
        if say.stop != "refusal":
            return {"stop_reason": reason, "stop_sequence": None}
        details = {"type": "refusal", "category": "cyber", "explanation": "I cannot do that."}
        return {"stop_reason": reason, "stop_details": details}

    @staticmethod
    def _usage(say: ModelAnswer) -> Json:
        return {
            "input_tokens": say.prompt - say.cached - say.written,
            "cache_creation_input_tokens": say.written,
            "cache_read_input_tokens": say.cached,
            "output_tokens": say.completion,
        }

    def error_body(self, status: int, name: str | None, message: str) -> Json:
        """Anthropic's error objects."""
        return {"type": "error", "error": {"type": name, "message": message}}

    def inner_error(self) -> bytes:
        """An event of its own."""
        return sse(self.error("overloaded")[2], "error")


# --- engines of one's own -----------------------------------------------------------------------


class VllmWire(OpenAIWire):
    """vLLM: its errors have a number as code; a full engine never refuses, a gateway does.

    Those of spent money are a gateway's before it.
    """

    BAD = "BadRequestError"
    ERRORS: ClassVar = {
        "throttled": (429, "RateLimitError", "Too many requests"),
        "overloaded": (503, "ServiceUnavailable", "server is busy"),
        "no_money": (402, "PaymentRequired", "payment required"),
        "bad_key": (401, "Unauthorized", f"Unauthorized: {SECRET}"),
        "too_long": (
            400,
            BAD,
            "This model's maximum context length is 100 tokens. However, your request has 110.",
        ),
    }

    def error_body(self, status: int, name: str | None, message: str) -> Json:
        """vLLM's error objects."""
        return {"error": {"message": message, "type": name, "param": None, "code": status}}

    def inner_error(self) -> bytes:
        """An error object in place of a chunk."""
        return sse(self.error_body(503, "ServiceUnavailable", "engine is overloaded"))


class SglangWire(VllmWire):
    """SGLang: flat error bodies, reasoning under ``reasoning_content``, a full queue is 503."""

    WAITS = Wire.WAITS
    ERRORS: ClassVar = {
        **VllmWire.ERRORS,
        "overloaded": (503, "InternalServerError", "The request queue is full."),
        "too_long": (
            400,
            VllmWire.BAD,
            "The input (110 tokens) is longer than the model's context length (100 tokens).",
        ),
    }

    def whole(self, say: ModelAnswer) -> Json:
        """A chat completion; ``matched_stop`` beside the finish reason."""
        found = super().whole(say)
        choice = found["choices"][0]
        choice["matched_stop"] = None
        if "reasoning" in choice["message"]:
            choice["message"]["reasoning_content"] = choice["message"].pop("reasoning")
        return {**found, "metadata": {"weight_version": "default"}}

    def events(self, say: ModelAnswer) -> list[bytes]:
        """Chunks whose thinking has SGLang's name."""
        return [
            event.replace(b'"reasoning":', b'"reasoning_content":') for event in super().events(say)
        ]

    def error_body(self, status: int, name: str | None, message: str) -> Json:
        """Flat, with a null beside."""
        flat = {"object": "error", "message": message, "type": name, "param": None}
        return {**flat, "code": status}


class DynamoWire(VllmWire):
    """Dynamo's frontend: flat errors, 529 where no worker is free, and fields that it does not
    know are refused."""

    KNOWN = frozenset(
        {"model", "messages", "stream", "stream_options", "tools", "tool_choice", "nvext"}
        | {"response_format", "temperature", "top_p", "max_tokens", "max_completion_tokens"}
        | {"seed", "stop", "n", "logprobs", "chat_template_kwargs"}
    )
    WAITS = Wire.WAITS
    ERRORS: ClassVar = {
        **VllmWire.ERRORS,
        "overloaded": (529, "overloaded", "All workers are busy, try again later"),
    }

    def complaint(self, body: Json) -> str | None:
        """Unknown fields at the top are a 400."""
        unknown = sorted(body.keys() - self.KNOWN)
        if unknown:
            return f"Unsupported parameter: {', '.join(unknown)}"
        return super().complaint(body)

    def error_body(self, status: int, name: str | None, message: str) -> Json:
        """Flat."""
        return {"message": message, "type": name, "code": status}


# --- for all ----------------------------------------------------------------------------------


def pieces(text: str | None) -> list[str]:
    """A text in the pieces in which a model might stream it."""
    if not text:
        return []
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def results_complaint(
    messages: Json, use: str, result: str, use_id: str, result_id: str
) -> str | None:
    """What is wrong with tool results: each turn of uses wants all of its results right after, and
    ids are of few characters and used once."""
    every = [b[use_id] for message in messages for b in message["content"] if b["type"] == use]
    if len(set(every)) != len(every):
        return f"{use} ids must be unique, got {every}"
    odd = [one for one in every if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", one)]
    if odd:
        return f"ids of {use} should match pattern ^[a-zA-Z0-9_-]+$, got {odd}"
    for message, after in zip(messages, [*messages[1:], None], strict=True):
        asked = [block[use_id] for block in message["content"] if block["type"] == use]
        found = [b[result_id] for b in after["content"] if b["type"] == result] if after else []
        if asked != found and (asked or found):
            return f"tool uses {asked} are followed by the results {found}"
    return None
