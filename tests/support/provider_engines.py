"""Engines that speak OpenAI's protocol each in its own way; see :mod:`support.provider_protocols`.

Sources: vLLM 0.33, SGLang 0.5.23 and NVIDIA Dynamo 1.6, as released.
"""

from __future__ import annotations

from support.provider_protocols import Json, ModelAnswer, OpenAIWire, sse

_OVERFLOW = "This model's maximum context length is 100 tokens. However, your request has 110."
_BAD_KEY = "Unauthorized: key-5up3rs3cret"


class VllmWire(OpenAIWire):
    """vLLM: its errors have a number as code; a full engine never refuses, a gateway does."""

    def error(self, kind: str) -> tuple[int, dict[str, str], Json]:
        """vLLM's error objects; those of spent money are a gateway's before it."""
        if kind.startswith("bad:"):
            return 400, {}, self._error(400, "BadRequestError", kind[4:])
        errors: dict[str, tuple[int, dict[str, str], str, str]] = {
            "throttled": (429, {"Retry-After": "2"}, "RateLimitError", "Too many requests"),
            "overloaded": (503, {"Retry-After": "1"}, "ServiceUnavailable", "server is busy"),
            "no_money": (402, {}, "PaymentRequired", "payment required"),
            "bad_key": (401, {}, "Unauthorized", _BAD_KEY),
            "too_long": (400, {}, "BadRequestError", _OVERFLOW),
        }
        status, headers, name, message = errors[kind]
        return status, headers, self._error(status, name, message)

    def _error(self, status: int, name: str, message: str) -> Json:
        return {"error": {"message": message, "type": name, "param": None, "code": status}}

    def inner_error(self) -> bytes:
        """An error object in place of a chunk."""
        return sse(self._error(503, "ServiceUnavailable", "engine is overloaded"))


class SglangWire(VllmWire):
    """SGLang: flat error bodies, reasoning under ``reasoning_content``, a full queue is 503."""

    def whole(self, say: ModelAnswer) -> Json:
        """A chat completion; ``matched_stop`` beside the finish reason."""
        found = super().whole(say)
        choice = found["choices"][0]
        choice["matched_stop"] = None
        _reasoned(choice["message"])
        return {**found, "metadata": {"weight_version": "default"}}

    def events(self, say: ModelAnswer) -> list[bytes]:
        """Chunks whose thinking has SGLang's name."""
        return [
            event.replace(b'"reasoning":', b'"reasoning_content":') for event in super().events(say)
        ]

    def error(self, kind: str) -> tuple[int, dict[str, str], Json]:
        """Its own words for a full queue, and for prompts that are too long."""
        status, headers, body = super().error(kind)
        if kind == "overloaded":
            return 503, {}, self._error(503, "InternalServerError", "The request queue is full.")
        if kind == "too_long":
            words = "The input (110 tokens) is longer than the model's context length (100 tokens)."
            return 400, {}, self._error(400, "BadRequestError", words)
        return status, headers, body

    def _error(self, status: int, name: str, message: str) -> Json:
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

    def complaint(self, body: Json) -> str | None:
        """Unknown fields at the top are a 400."""
        unknown = sorted(body.keys() - self.KNOWN)
        if unknown:
            return f"Unsupported parameter: {', '.join(unknown)}"
        return super().complaint(body)

    def error(self, kind: str) -> tuple[int, dict[str, str], Json]:
        """529 in place of 503."""
        if kind == "overloaded":
            return 529, {}, self._error(529, "overloaded", "All workers are busy, try again later")
        return super().error(kind)

    def _error(self, status: int, name: str, message: str) -> Json:
        return {"message": message, "type": name, "code": status}


def _reasoned(message: dict[str, Json]) -> None:
    if "reasoning" in message:
        message["reasoning_content"] = message.pop("reasoning")
