"""The OpenAI-compatible backend: OpenAI, vLLM, SGLang, NVIDIA Dynamo, llama.cpp, gateways."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.chat_stream import StreamReader
from bagent.backends.chat_wire import BodyWriter, read_reply
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.failures import from_status
from bagent.backends.http_connection import PlainResponse
from bagent.backends.json_text import decode_json
from bagent.backends.request import Request
from bagent.backends.transport import (
    NETWORK_ERRORS,
    Patience,
    Transport,
    is_stale,
    network_failure,
    reused,
    through,
)
from bagent.types import Failure, Json, Reply

STALE_SECONDS = 1.0
"""A kept-open connection that closes within this time was closed before the request came."""

AFTER_FINISH = 5.0
"""Seconds for which the token counts are waited for once a streamed answer is whole."""

AFTER_DONE = 0.5
"""Seconds for which the end of a stream is waited for after ``[DONE]``, to keep the connection."""

_EVENTS = re.compile(rb"\s*((data|event):|:)")
_NO_SCHEMA = re.compile(
    r"response[_ ]format|json[_ ]schema|structured[_ ]output|guided[_ ](json|decoding)|grammar",
    re.IGNORECASE,
)
_NEW_LIMIT = re.compile(r"max_tokens\b.*\bmax_completion_tokens", re.IGNORECASE | re.DOTALL)
_NO_STREAM = re.compile(r"\bstream(_options|ing|ed)?\b", re.IGNORECASE)


class _Form(msgspec.Struct, frozen=True):
    """How one endpoint wants its requests, found out from its refusals."""

    native_schema: bool = True
    completion_limit: str = "max_tokens"
    stream: bool = True


_FIRST_FORM = _Form()


class OpenAIBackend:
    """Speaks ``/chat/completions`` (and ``/completions`` for raw text) over one transport.

    Where the settings name no model, the endpoint's own is sent: its tag ``model``, else what a
    probe found there, else none.

    Args:
        enforce: ``auto`` asks for the schema by ``response_format`` until the endpoint refuses
            it, ``native`` asks always, ``prompt`` never.
        clock: Unix seconds.
        notice: called with a line for people when something is learned of an endpoint.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        enforce: str = "auto",
        clock: Callable[[], float] = time.time,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._transport = transport
        self._enforce = enforce
        self._clock = clock
        self._notice = notice
        self._forms: dict[tuple[str, str | None, bytes | None], _Form] = {}
        self._writers: dict[tuple[str, bool, str], BodyWriter] = {}
        self._served: dict[str, str] = {}

    def group_limit(self, endpoint: Endpoint) -> int:
        """One: each call is a request of its own."""
        return 1

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send one call and wait for its end; see :class:`bagent.backends.base.Backend`."""
        request = group[0]
        form = self._forms.get(_lesson_key(endpoint, request), _FIRST_FORM)
        stream = request.stream and form.stream
        body = self._writer(endpoint, request, form).body(
            request, key="prompt" if request.prompt is not None else None, stream=stream
        )
        exchange = Exchange(results=[], sent=self._clock())
        send = self._send_streamed if stream else self._send_whole
        result = await send(endpoint, request, body, timeouts, exchange)
        exchange.done = self._clock()
        if isinstance(result, Failure) and exchange.status is not None:
            exchange.learned = self._learn(endpoint, request, result, form)
            words = endpoint.without_secrets(result.message)
            if endpoint.proxy and exchange.first_token is None:
                words += through(endpoint)
            result = msgspec.structs.replace(result, message=words)
        exchange.results.append(result)
        return exchange

    async def _send_whole(
        self,
        endpoint: Endpoint,
        request: Request,
        body: bytes,
        timeouts: Timeouts,
        exchange: Exchange,
    ) -> Reply | Failure:
        try:
            async with self._transport.post(endpoint, request.path, body, timeouts) as response:
                exchange.status = response.status
                exchange.request_id = response.headers.get("X-Request-Id")
                raw = await response.read()
        except NETWORK_ERRORS as error:
            return self._broken(error, endpoint, timeouts, exchange)
        exchange.first_byte = self._clock()
        if not 200 <= response.status < 300:
            return from_status(response.status, raw.decode("utf-8", "replace"), response.headers)
        content_type = response.headers.get("Content-Type", "")
        if content_type.startswith("text/event-stream") or (raw[:1] != b"{" and _EVENTS.match(raw)):
            reader = StreamReader(exchange.sent, self._clock)
            reader.feed(raw)
            return reader.result()
        return read_reply(raw, content_type, response.headers)

    async def _send_streamed(
        self,
        endpoint: Endpoint,
        request: Request,
        body: bytes,
        timeouts: Timeouts,
        exchange: Exchange,
    ) -> Reply | Failure:
        reader = StreamReader(exchange.sent, self._clock)
        try:
            async with (
                Patience(timeouts.first_token, timeouts.idle) as patience,
                self._transport.post(endpoint, request.path, body, timeouts) as response,
            ):
                exchange.status = response.status
                exchange.request_id = response.headers.get("X-Request-Id")
                return await self._read(response, reader, patience, exchange)
        except NETWORK_ERRORS as error:
            if reader.whole:  # a cut after the finish reason has taken nothing from the answer
                return reader.result()
            result = self._broken(error, endpoint, timeouts, exchange)
            return msgspec.structs.replace(result, text=reader.text) if reader.text else result
        finally:
            exchange.first_token = reader.first_token

    def _broken(
        self,
        error: BaseException,
        endpoint: Endpoint,
        timeouts: Timeouts,
        exchange: Exchange,
    ) -> Failure:
        """The failure of a request that the network ended, and whether to send it again free."""
        quick = self._clock() - exchange.sent < STALE_SECONDS
        exchange.again = reused() and quick and is_stale(error)
        return network_failure(error, endpoint, timeouts)

    def _writer(self, endpoint: Endpoint, request: Request, form: _Form) -> BodyWriter:
        model = request.settings.model or ""
        if not model and not (request.body and request.body.get("model")):
            model = endpoint.tags.get("model") or self._served.get(endpoint.name, "")
        native = form.native_schema and self._enforce != "prompt"
        key = (model, native, form.completion_limit)
        writer = self._writers.get(key)
        if writer is None:
            writer = BodyWriter(model, native_schema=native, completion_limit=form.completion_limit)
            self._writers[key] = writer
        return writer

    async def _read(
        self,
        response: aiohttp.ClientResponse | PlainResponse,
        reader: StreamReader,
        patience: Patience,
        exchange: Exchange,
    ) -> Reply | Failure:
        if not 200 <= response.status < 300:
            patience.lift()
            text = (await response.read()).decode("utf-8", "replace")
            return from_status(response.status, text, response.headers)
        if response.content_type == "text/event-stream":
            return await self._read_stream(response, reader, patience, exchange)
        patience.lift()
        exchange.first_byte = self._clock()
        raw = await response.read()
        if _EVENTS.match(raw):  # a stream under another name
            reader.feed(raw)
            return reader.result()
        return read_reply(raw, response.headers.get("Content-Type", ""), response.headers)

    async def _read_stream(
        self,
        response: aiohttp.ClientResponse | PlainResponse,
        reader: StreamReader,
        patience: Patience,
        exchange: Exchange,
    ) -> Reply | Failure:
        pieces = 0
        async for data in response.content.iter_any():
            if exchange.first_byte is None:
                exchange.first_byte = self._clock()
            reader.feed(data)
            if reader.error is not None or (reader.done and not reader.whole):
                break
            if reader.whole:
                patience.ends_soon(AFTER_DONE if reader.done else AFTER_FINISH)
            elif reader.first_token is not None and reader.pieces > pieces:
                patience.went_on()
            pieces = reader.pieces
        return reader.result()

    def _learn(self, endpoint: Endpoint, request: Request, failure: Failure, used: _Form) -> bool:
        """Whether the refusal taught how to ask better; then the next request does."""
        if failure.kind != "rejected" or failure.status not in (400, 415, 422, 501):
            return False
        words = failure.message
        change: dict[str, object]
        if (
            request.settings.output is not None
            and request.body is None
            and self._enforce == "auto"
            and used.native_schema
            and _NO_SCHEMA.search(words)
        ):
            change = {"native_schema": False}
            told = "refuses response_format; the schema is asked for in the prompt only"
        elif used.completion_limit == "max_tokens" and _NEW_LIMIT.search(words):
            change = {"completion_limit": "max_completion_tokens"}
            told = ""
        elif request.stream and used.stream and _NO_STREAM.search(words):
            change = {"stream": False}
            told = "refuses to stream; it is asked for whole answers"
        else:
            return False
        key = _lesson_key(endpoint, request)
        before = self._forms.get(key, _FIRST_FORM)
        self._forms[key] = after = msgspec.structs.replace(before, **change)
        if told and after != before:
            self._notice(f"{endpoint.name} {told} ({words})")
        return True

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """GET ``/models``: what the endpoint serves. A missing route is no failure."""
        try:
            status, raw, headers = await self._transport.get(
                endpoint, f"{endpoint.url}/models", seconds
            )
        except NETWORK_ERRORS as error:
            return network_failure(error, endpoint, Timeouts(connect=seconds, total=seconds))
        if status in (404, 405, 501):
            return Capabilities()
        if status != 200:
            return from_status(status, raw.decode("utf-8", "replace"), headers)
        try:
            found = read_models(decode_json(raw))
        except ValueError:
            return Capabilities()
        if found.models:
            self._served[endpoint.name] = found.models[0]
        return found

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()


def read_models(body: Json) -> Capabilities:
    """What a ``/v1/models`` body tells; ``max_model_len`` is vLLM's, ``meta.n_ctx`` llama.cpp's."""
    entries = body.get("data") if isinstance(body, dict) else None
    names: list[str] = []
    context: int | None = None
    engine: str | None = None
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not entry.get("id"):
            continue
        names.append(str(entry["id"]))
        meta = entry.get("meta")
        length = entry.get("max_model_len") or entry.get("context_window")
        if length is None and isinstance(meta, dict):
            length = meta.get("n_ctx")
        if context is None and isinstance(length, int) and length > 0:
            context = length
        engine = engine or (str(entry["owned_by"]) if entry.get("owned_by") else None)
    return Capabilities(models=tuple(names), context=context, engine=engine)


def _lesson_key(endpoint: Endpoint, request: Request) -> tuple[str, str | None, bytes | None]:
    """What a lesson holds for: an endpoint may refuse one schema, or one model's parameter."""
    output = request.settings.output
    return endpoint.name, request.settings.model, output.document if output else None
