"""Request bodies: typed, checked, and refused with vLLM's messages.

The rules are those of vLLM's ``entrypoints/openai`` (V1): unknown fields are ignored, ``n: null``
is 1, a completion without ``max_tokens`` gets 16 tokens and a chat the rest of the context, and a
call has at most 1024 prompts.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from bagent.sim import tokens
from bagent.types import Json, Message

MAX_PROMPTS = 1024
MAX_N = 16_384
MAX_STOPS = 4
COMPLETION_TOKENS = 16

R = TypeVar("R", bound=msgspec.Struct)


class ApiError(Exception):
    """An HTTP error response: ``kind`` is its ``type`` field, ``status`` also its ``code``."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """Return the JSON body, in the form of vLLM's."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct):
    """``stream_options`` of a request."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that chat and completion requests share; see vLLM's protocol for their meaning."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    n: int | None = 1
    seed: int | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool | None = False
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of ``/v1/chat/completions``; for ``/batch``, ``messages`` is a list of lists."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_prompt_text: bool | None = False


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``/v1/completions``."""

    prompt: str | list[Any] | None = None
    echo: bool | None = False


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/tokenize``: a ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: list[int]


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of ``/v1/embeddings``."""

    model: str | None = None
    input: str | list[Any]
    encoding_format: str = "float"
    dimensions: int | None = None


class RequestLimits(msgspec.Struct, frozen=True):
    """Token limits of one generation, checked against the context length."""

    max_tokens: int
    min_tokens: int
    ignore_eos: bool


def decode_request(body: bytes, kind: type[R]) -> R:
    """Decode a request body.

    Raises:
        ApiError: 400, it is no JSON or not of this kind.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        return msgspec.convert(json.loads(body), kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error)) from None
    except ValueError as error:
        position = error.pos if isinstance(error, json.JSONDecodeError) else 0
        detail = [
            {
                "type": "json_invalid",
                "loc": ("body", position),
                "msg": f"JSON decode error: {error}",
            }
        ]
        raise ApiError(400, str(detail), "Bad Request") from None


def check_model(requested: str | None, served: str) -> None:
    """Refuse another model's name with 404, as vLLM does; no name is accepted."""
    if requested and requested != served:
        raise ApiError(404, f"The model `{requested}` does not exist.", "NotFoundError", "model")


def check_generation(request: GenerationRequest, *, by_priority: bool) -> int:
    """Check the shared fields and return ``n``.

    Raises:
        ApiError: 400.
    """
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_N:
        raise ApiError(400, f"n must be at least 1 and at most {MAX_N}, got {n}.", param="n")
    if request.temperature is not None and request.temperature < 0:
        message = f"temperature must be non-negative, got {request.temperature}."
        raise ApiError(400, message, param="temperature")
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOPS:
        message = f"stop must have at most {MAX_STOPS} strings, got {len(request.stop)}."
        raise ApiError(400, message, param="stop")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.")
    if request.priority and not by_priority:
        raise ApiError(400, "Got priority but Priority scheduling is not enabled.")
    salt = request.cache_salt
    if salt is not None and (not salt or len(salt) > 128 or any(c in salt for c in "@/\\\0")):
        raise ApiError(
            400,
            "cache_salt must have 1 to 128 characters and none of '@', '/', '\\'.",
            param="cache_salt",
        )
    return n


def stop_strings(request: GenerationRequest) -> list[str]:
    """Return the stop strings."""
    if isinstance(request.stop, str):
        return [request.stop]
    return [s for s in request.stop or () if s]


def token_limits(request: GenerationRequest, prompt_tokens: int, context: int) -> RequestLimits:
    """Return how many tokens may and must be generated after a prompt.

    Args:
        request: its ``max_tokens`` (chat: ``max_completion_tokens`` first) and ``min_tokens``.
        prompt_tokens: length of the prompt.
        context: context length of the model.

    Raises:
        ApiError: 400, the context is too short, or a number is out of range.
    """
    requested = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        requested = request.max_completion_tokens
    if requested is not None and requested < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {requested}.", param="max_tokens")
    min_tokens = request.min_tokens or 0
    if prompt_tokens + max(requested or 0, 1) > context:
        output_tokens = requested or 0
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{output_tokens} output tokens and your prompt contains at least {prompt_tokens} "
            f"input tokens, for a total of at least {prompt_tokens + output_tokens} tokens. Please "
            "reduce the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    max_tokens = requested or context - prompt_tokens
    if requested is None and isinstance(request, CompletionRequest):
        max_tokens = min(max_tokens, COMPLETION_TOKENS)
    if not 0 <= min_tokens <= max_tokens:
        message = (
            f"min_tokens must be at least 0 and at most max_tokens={max_tokens}, got {min_tokens}."
        )
        raise ApiError(400, message, param="min_tokens")
    return RequestLimits(max_tokens, min_tokens, bool(request.ignore_eos))


def pack_prompts(prompt: Json, field: str = "prompt") -> list[bytes]:
    """Return the packed tokens of the prompts: text, texts, ids or lists of ids.

    Raises:
        ApiError: 400, there are none or too many, or it is something else.
    """
    if isinstance(prompt, str):
        return [_pack_prompt(prompt, field)]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(
            400, f"Either {field} or prompt_embeds must be provided and non-empty.", param=field
        )
    if all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
        prompt = [prompt]
    if len(prompt) > MAX_PROMPTS:
        message = f"At most {MAX_PROMPTS} prompts are allowed in one request, got {len(prompt)}."
        raise ApiError(400, message, param=field)
    return [_pack_prompt(part, field) for part in prompt]


def _pack_prompt(part: Json, field: str) -> bytes:
    if isinstance(part, str):
        packed = tokens.pack(part)
    elif isinstance(part, list):
        try:
            packed = tokens.pack_ids(part)
        except ValueError as error:
            raise ApiError(400, str(error), param=field) from None
    else:
        raise ApiError(
            400, f"{field} must be a string, a list of strings or token ids.", param=field
        )
    if not packed:
        raise ApiError(400, "The decoder prompt cannot be empty", param=field)
    return packed


def render_chat(request: ChatRequest | TokenizeRequest, messages: Json) -> str:
    """Return the prompt text of one conversation.

    Raises:
        ApiError: 400, a message is invalid.
    """
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a non-empty list.", param="messages")
    if not all(isinstance(message, dict) for message in messages):
        raise ApiError(400, "a message must be an object.", param="messages")
    tools = request.tools
    if isinstance(request, ChatRequest) and request.tool_choice == "none":
        tools = None
    try:
        return tokens.render(
            messages,
            tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None
