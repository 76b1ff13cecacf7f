"""Translation between chat completions and responses, where an endpoint has only one of them.

Chat completions as the proxy writes them, and what it remembers of their turns, are here too.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import failure_from_status
from bagent.backends.http.client import Transport
from bagent.backends.http.request import SSE, body_chunks, read_body
from bagent.backends.messages import assistant_message
from bagent.backends.openai.chat import PROVIDER_BLOCKS, read_reply
from bagent.backends.openai.raw_request import CHAT, unpack_body
from bagent.backends.openai.responses import PATH as RESPONSES
from bagent.backends.openai.responses import (
    WANTS_RESPONSES,
    ResponsesStream,
    ResponsesWriter,
    needs_responses,
    read_response,
)
from bagent.backends.openai.responses_server import ResponseEvents, chat_request, event_bytes
from bagent.backends.openai.stream import StreamReader
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.text.json import decode_json
from bagent.types import Failure, Json, Reply, Usage

DONE = b"data: [DONE]\n\n"

_TYPES = {
    "budget": "insufficient_quota",
    "rate_limited": "rate_limit_exceeded",
    "overloaded": "overloaded_error",
    "auth": "authentication_error",
    "context_overflow": "context_length_exceeded",
    "refused": "content_filter",
    "rejected": "invalid_request_error",
    "timeout": "timeout",
}
"""``type`` and ``code`` of an error, by failure kind."""

_STATUS = {"timeout": 504, "rejected": 400, "auth": 401, "refused": 400, "context_overflow": 400}
_KEPT_STATUS = frozenset({408, 429})
_HEAD = re.compile(r"HTTP \d{3}: ")


def completion(reply: Reply, model: str) -> dict[str, Json]:
    """Return a complete answer; ``model`` is the requested name."""
    message = {**assistant_message(reply), "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.refusal:
        message["refusal"] = reply.refusal
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
    return {
        "id": reply.request_id or f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.model or model,
        "choices": [choice],
        "usage": usage_of(reply.usage),
    }


def usage_of(usage: Usage) -> dict[str, Json]:
    """Return token counts, null for unknown ones."""
    prompt, answer = usage.prompt, usage.completion
    total = None if prompt is None or answer is None else prompt + answer
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class StreamId(msgspec.Struct, frozen=True):
    """What all chunks of a streamed answer have in common."""

    id: str
    model: str


def chunk_bytes(stream: StreamId, kind: str, text: str) -> bytes:
    """Return a chunk of a streamed answer; ``kind`` is ``text`` or ``reasoning``."""
    name = "content" if kind == "text" else "reasoning_content"
    return _chunk(stream, {"role": "assistant", name: text})


def last_chunks(
    stream: StreamId, result: Reply | Failure, *, streamed: bool, usage: bool
) -> Iterator[bytes]:
    """Yield the end of a stream: tool calls, finish reason and usage.

    Args:
        stream: the answer.
        result: how it ended.
        streamed: whether text and reasoning have been sent.
        usage: whether the client wants token counts.
    """
    if isinstance(result, Failure):
        status, body = _error(result)
        yield _event({"error": {**body["error"], "code": status}})
        return
    if not streamed:
        for kind, text in (("reasoning", result.reasoning), ("text", result.text)):
            if text:
                yield chunk_bytes(stream, kind, text)
    message = assistant_message(result)
    delta = {name: message[name] for name in message.keys() - {"role", "content"}}
    if result.tool_calls:
        calls = message["tool_calls"]
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    yield _chunk(stream, delta, result.finish_reason)
    if usage:
        yield _event({**_head(stream), "choices": [], "usage": usage_of(result.usage)})
    yield DONE


def _head(stream: StreamId) -> dict[str, Json]:
    return {
        "id": stream.id,
        "object": "chat.completion.chunk",
        "created": 0,
        "model": stream.model,
    }


def _chunk(stream: StreamId, delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event({**_head(stream), "choices": [choice]})


def _event(value: Json) -> bytes:
    return b"data: " + encode_payload(value) + b"\n\n"


def error_of(failure: Failure) -> tuple[int, bytes]:
    """Return the HTTP status and body for a failure."""
    status, body = _error(failure)
    return status, msgspec.json.encode(body)


def _error(failure: Failure) -> tuple[int, dict[str, dict[str, Json]]]:
    status = failure.status or _STATUS.get(failure.kind, 502)
    if status < 400 or (failure.passing and status < 500 and status not in _KEPT_STATUS):
        status = 503 if failure.kind == "overloaded" else 502
    kind = _TYPES.get(failure.kind, failure.kind)
    message = _HEAD.sub("", failure.message, count=1)
    return status, {"error": {"message": message, "type": kind, "code": kind, "param": None}}


MAX_TURNS = 4096
"""Turns whose provider blocks are remembered, for clients that send back only the tool calls."""


class TurnMemory:
    """Provider blocks of turns with tools, for clients that send back only the tool calls."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[str, list[Json]] = OrderedDict()

    def remember(self, reply: Reply) -> None:
        """Remember the blocks that must be sent back with the tool calls of a turn."""
        if reply.blocks is not None and reply.tool_calls:
            self._blocks[reply.tool_calls[0].id] = reply.blocks
            if len(self._blocks) > MAX_TURNS:
                self._blocks.popitem(last=False)

    def restore(self, body: dict[str, Json]) -> None:
        """Restore signed or encrypted reasoning in the turns of a body that lacks it."""
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            first = calls[0] if isinstance(calls, list) and calls else None
            if isinstance(first, dict) and PROVIDER_BLOCKS not in message:
                blocks = self._blocks.get(str(first.get("id")))
                if blocks is not None:
                    message[PROVIDER_BLOCKS] = blocks


_NOT_IN_RESPONSES = ("stop", "logit_bias", "presence_penalty", "frequency_penalty")
"""Fields of chats that change the answer and that responses lack."""

_NO_ROUTE = frozenset({404, 501})
_JSON = "application/json"
_JSON_HEADERS = {"Content-Type": _JSON}

if TYPE_CHECKING:
    import aiohttp

    from bagent.backends.http.connection import PlainResponse

Response: TypeAlias = "aiohttp.ClientResponse | PlainResponse | TranslatedResponse"


class Translation(Protocol):
    """One request in the form that its endpoint serves, and its answer in that of the client."""

    path: str
    body: bytes

    def whole(self, raw: bytes) -> bytes:
        """Return a whole answer for the client."""
        ...

    def feed(self, chunk: bytes) -> bytes:
        """Return what the client gets for a chunk of the endpoint's stream."""
        ...

    def end(self) -> bytes:
        """Return the end of the client's stream."""
        ...


class ResponseByChat:
    """A request for a response, answered by a chat completion.

    Raises:
        ValueError: chat completions have no form for something in it.
    """

    path = CHAT

    def __init__(self, body: dict[str, Json]) -> None:
        self.body = encode_payload(chat_request(body))
        name = f"resp_{secrets.token_hex(12)}"
        self._events = ResponseEvents(name, int(time.time()), str(body.get("model") or ""))
        self._reader = StreamReader(0.0, lambda: 0.0, heard=self._heard)
        self._new = self._events.begin()
        self._streamed = False

    def _heard(self, kind: str, text: str) -> None:
        self._streamed = True
        self._new += self._events.piece(kind, text)

    def whole(self, raw: bytes) -> bytes:
        """Return the response object; an error as it came."""
        reply = read_reply(raw, _JSON, {})
        if isinstance(reply, Failure):
            return raw
        return msgspec.json.encode(self._events.finish(reply)[-1]["response"])

    def feed(self, chunk: bytes) -> bytes:
        """Return the events of the chunk's text."""
        self._reader.feed(chunk)
        events, self._new = self._new, []
        return event_bytes(events)

    def end(self) -> bytes:
        """Return the events from the end of the text to that of the response."""
        result = self._reader.result()
        if isinstance(result, Failure):
            events = self._events.fail(result.kind, result.message)
        else:
            events = self._events.finish(result, streamed=self._streamed)
        return event_bytes([*self._new, *events])


class ChatByResponse:
    """A chat, answered by a response.

    Raises:
        ValueError: responses have no form for something in it.
    """

    path = RESPONSES

    def __init__(self, body: dict[str, Json], memory: TurnMemory) -> None:
        for name in _NOT_IN_RESPONSES:
            if body.pop(name, None):
                raise ValueError(f"responses have no {name}")
        memory.restore(body)
        self._memory = memory
        stream = bool(body.get("stream"))
        request = unpack_body(Request(CallSettings(None, {}, {}), b"", body=body, stream=stream))
        self._model = str(body.get("model") or "")
        # The API takes no seed, and answers of the same kind without it.
        writer = ResponsesWriter(self._model, without=frozenset({"seed"}))
        self.body = writer.body(request, stream=stream)
        self._usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._stream = StreamId(f"chatcmpl-{secrets.token_hex(8)}", self._model)
        self._reader = ResponsesStream(0.0, lambda: 0.0, heard=self._heard)
        self._new: list[bytes] = []
        self._streamed = False

    def _heard(self, kind: str, text: str) -> None:
        self._streamed = True
        self._new.append(chunk_bytes(self._stream, kind, text))

    def _remembered(self, result: Reply | Failure) -> Reply | Failure:
        """Remember the reasoning of a turn with tools; the client gets none of its blocks."""
        if isinstance(result, Failure):
            return result
        self._memory.remember(result)
        return msgspec.structs.replace(result, blocks=None)

    def whole(self, raw: bytes) -> bytes:
        """Return the chat completion; an error as it came."""
        reply = self._remembered(read_response(raw, {}))
        if isinstance(reply, Failure):
            return raw
        return msgspec.json.encode(completion(reply, self._model))

    def feed(self, chunk: bytes) -> bytes:
        """Return the chunks of the events' text."""
        self._reader.feed(chunk)
        chunks, self._new = self._new, []
        return b"".join(chunks)

    def end(self) -> bytes:
        """Return the chunks from the end of the text."""
        result = self._remembered(self._reader.result())
        chunks = last_chunks(self._stream, result, streamed=self._streamed, usage=self._usage)
        return b"".join([*self._new, *chunks])


class TranslatingTransport:
    """Sends requests in the form that each endpoint serves; answers have the client's form.

    A missing route is found by its first refusal, and the same request is sent once more. What has
    no form in the other API is refused with status 400.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory = TurnMemory()
        self._no_responses: set[str] = set()
        self._only_responses: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def post(
        self, endpoint: Endpoint, path: str, body: bytes, timeouts: Timeouts
    ) -> AsyncIterator[Response]:
        """Send a request as :meth:`Transport.post` does."""
        if not self._is_translated(endpoint, path, body):
            async with self._transport.post(endpoint, path, body, timeouts) as response:
                if path not in (CHAT, RESPONSES) or response.status not in _NO_ROUTE:
                    yield response
                    return
                raw = await read_body(response)
                text = raw.decode("utf-8", "replace")
                failure = failure_from_status(response.status, text, response.headers)
                if not self._learn(endpoint, path, body, failure):
                    yield TranslatedResponse(response.status, response.headers, _once(raw))
                    return
        try:
            translation = self._translation(path, body)
        except ValueError as error:
            served = "no /v1/responses" if path == RESPONSES else "it by /v1/responses only"
            message = f"{endpoint.name} serves {served}: {error}"
            refusal = {"error": {"message": message, "type": "invalid_request_error"}}
            yield TranslatedResponse(400, _JSON_HEADERS, _once(encode_payload(refusal)))
            return
        async with self._transport.post(
            endpoint, translation.path, translation.body, timeouts
        ) as response:
            content = _translated(response, translation)
            yield TranslatedResponse(response.status, response.headers, content)

    def _is_translated(self, endpoint: Endpoint, path: str, body: bytes) -> bool:
        if path == RESPONSES:
            return endpoint.name in self._no_responses
        return path == CHAT and self._needs_responses(endpoint, body)

    def _translation(self, path: str, body: bytes) -> Translation:
        if path == RESPONSES:
            return ResponseByChat(_object(body))
        return ChatByResponse(_object(body), self._memory)

    def _needs_responses(self, endpoint: Endpoint, raw: bytes) -> bool:
        """Return whether the model of a chat is served by ``/responses`` only."""
        if endpoint.own and not self._only_responses:
            return False
        model = model_of(raw) or ""
        only = (endpoint.name, model) in self._only_responses
        return only or (not endpoint.own and needs_responses(model))

    def _learn(self, endpoint: Endpoint, path: str, raw: bytes, failure: Failure) -> bool:
        """Learn from a refusal; return whether the request may be sent again, translated."""
        if path == RESPONSES and not _names_model(failure):
            self._no_responses.add(endpoint.name)
            return True
        if path == CHAT and WANTS_RESPONSES.search(failure.message):
            self._only_responses.add((endpoint.name, model_of(raw) or ""))
            return True
        return False


class TranslatedResponse:
    """An answer in the client's form, as far as the proxy reads it."""

    def __init__(
        self, status: int, headers: Mapping[str, str], content: AsyncIterator[bytes]
    ) -> None:
        self.status = status
        self.headers = headers
        self.content_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self.content = self
        self._content = content

    def iter_any(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        return self._content


async def _once(raw: bytes) -> AsyncIterator[bytes]:
    yield raw


async def _translated(response: Response, translation: Translation) -> AsyncIterator[bytes]:
    """Yield the client's form of an endpoint's answer; errors as they came."""
    if response.content_type != SSE:
        raw = await read_body(response)
        yield translation.whole(raw) if response.status == 200 else raw
        return
    async for chunk in body_chunks(response):
        yield translation.feed(chunk)
    yield translation.end()


def _names_model(failure: Failure) -> bool:
    """Return whether a 404 is about a model, which chat completions lack as well."""
    return "model" in failure.message.lower()


class _Model(msgspec.Struct):
    model: str | None = None


_decode_model = msgspec.json.Decoder(_Model).decode


def model_of(raw: bytes) -> str | None:
    """Return the model that a body names, None if it names none or cannot be read."""
    try:
        return _decode_model(raw).model
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _object(raw: bytes) -> dict[str, Any]:
    body = decode_json(raw)
    if not isinstance(body, dict):
        raise ValueError("the body is no object")
    return body
