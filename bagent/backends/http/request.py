"""One HTTP request of a call: sent, read whole or streamed, its failures classified."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import failure_from_status
from bagent.backends.http.client import (
    NETWORK_ERRORS,
    NOT_CONNECTED,
    StreamTimeout,
    Transport,
    connection_idle,
    is_stale,
    network_failure,
    proxy_note,
)
from bagent.backends.http.connection import PlainResponse, limit_body
from bagent.backends.http.errors import PayloadError
from bagent.backends.http.pool import PooledRequest
from bagent.backends.http.rate_limit_headers import read_rate_limits
from bagent.backends.profile import EndpointProfiles
from bagent.types import Failure, Reply

if TYPE_CHECKING:
    import aiohttp

STALE_SECONDS = 1.0
"""A reused connection that closes within this time was closed before the request arrived."""

LONG_IDLE = 1.0
"""Seconds of idleness after which a reused connection may have been closed before the request
arrived, even if a busy server shows that late."""

AFTER_FINISH = 5.0
"""Seconds to wait for the token counts of a complete streamed answer."""

AFTER_DONE = 0.5
"""Seconds to wait for the end of a stream after its last event, to keep the connection."""

MAX_PARTIAL_TEXT = 1 << 20
"""Characters kept of a truncated answer."""

SSE = "text/event-stream"

EVENTS = re.compile(rb"\s*((data|event):|:)")

WholeReader = Callable[[bytes, str, Mapping[str, str]], Reply | Failure]
"""Parses a body, given its content type and headers."""


class EventReader(Protocol):
    """Assembles a streamed answer; see :class:`bagent.backends.openai.stream.StreamReader`."""

    first_token: float | None
    pieces: int
    done: bool
    error: Failure | None

    @property
    def whole(self) -> bool:
        """Whether the answer is complete."""
        ...

    @property
    def text(self) -> str:
        """The text received so far."""
        ...

    def feed(self, data: bytes) -> None:
        """Parse the next bytes."""
        ...

    def result(self) -> Reply | Failure:
        """Return the reply once the stream has ended, or the failure."""
        ...


class HttpRequest(msgspec.Struct):
    """A JSON body for a path below the endpoint's address."""

    endpoint: Endpoint
    path: str
    body: bytes
    timeouts: Timeouts
    began: Callable[[], None] | None = None
    """Called at the first token of a stream."""


class HttpExchange:
    """Sends calls over one transport; ``clock`` is Unix seconds."""

    def __init__(
        self, transport: Transport, profiles: EndpointProfiles, clock: Callable[[], float]
    ) -> None:
        self._transport = transport
        self._profile = profiles.of
        self._clock = clock

    async def send(
        self,
        request: HttpRequest,
        exchange: Exchange,
        read: WholeReader,
        reader: EventReader | None,
    ) -> Reply | Failure:
        """Send ``request`` and record status and times in ``exchange``.

        Pass ``reader`` for a streamed call. A failure's message holds no secrets and names the
        proxy.
        """
        if reader is not None:
            result = await self._streamed(request, exchange, read, reader)
        else:
            response = await self.post(request, exchange)
            if isinstance(response, Failure):
                result = response
            else:
                raw, headers = response
                result = read(raw, headers.get("Content-Type", ""), headers)
        if isinstance(result, Failure):
            return redact_failure(result, request.endpoint, exchange)
        return result

    async def post(
        self, request: HttpRequest, exchange: Exchange
    ) -> tuple[bytes, Mapping[str, str]] | Failure:
        """Return the body and the headers of a 2xx response with a body, else the failure."""
        try:
            async with self._transport.post(
                request.endpoint, request.path, request.body, request.timeouts
            ) as response:
                self._note(exchange, response, request.endpoint)
                raw = _to_utf8(await read_body(response), response.headers)
        except NETWORK_ERRORS as error:
            return self._broken(error, request, exchange, connection_idle())
        return self._received(response, raw, exchange)

    def finish(
        self, pooled: PooledRequest, request: HttpRequest, exchange: Exchange
    ) -> tuple[bytes, Mapping[str, str]] | Failure:
        """Return what :meth:`post` returns for a request that has ended."""
        try:
            response = pooled.response()
            self._note(exchange, response, request.endpoint)
            raw = _to_utf8(response.body(), response.headers)
        except NETWORK_ERRORS as error:
            return self._broken(error, request, exchange, pooled.idle)
        finally:
            pooled.end()
        return self._received(response, raw, exchange)

    def _received(
        self, response: aiohttp.ClientResponse | PlainResponse, raw: bytes, exchange: Exchange
    ) -> tuple[bytes, Mapping[str, str]] | Failure:
        exchange.first_byte = self._clock()
        if not 200 <= response.status < 300:
            return failure_from_status(
                response.status, raw.decode("utf-8", "replace"), response.headers
            )
        if not raw:
            message = f"HTTP {response.status} without a body"
            return Failure("bad_response", message, passing=True, status=response.status)
        return raw, response.headers

    async def _streamed(
        self, request: HttpRequest, exchange: Exchange, read: WholeReader, reader: EventReader
    ) -> Reply | Failure:
        limits = request.timeouts
        try:
            async with (
                StreamTimeout(limits.first_token, limits.idle) as stream_timeout,
                self._transport.post(
                    request.endpoint, request.path, request.body, limits
                ) as response,
            ):
                self._note(exchange, response, request.endpoint)
                if 200 <= response.status < 300 and response.content_type == SSE:
                    return await self._read_events(
                        response, reader, stream_timeout, request, exchange
                    )
                stream_timeout.disable()
                raw = _to_utf8(await read_body(response), response.headers)
        except NETWORK_ERRORS as error:
            if reader.whole:  # cut after the stop reason: the answer is complete
                return reader.result()
            failure = self._broken(error, request, exchange, connection_idle())
            text = reader.text[:MAX_PARTIAL_TEXT]
            return msgspec.structs.replace(failure, text=text) if text else failure
        finally:
            exchange.first_token = reader.first_token
        answer = self._received(response, raw, exchange)
        if isinstance(answer, Failure):
            return answer
        if EVENTS.match(raw):  # a stream with another content type
            reader.feed(raw)
            return reader.result()
        return read(raw, response.headers.get("Content-Type", ""), response.headers)

    async def _read_events(
        self,
        response: aiohttp.ClientResponse | PlainResponse,
        reader: EventReader,
        stream_timeout: StreamTimeout,
        request: HttpRequest,
        exchange: Exchange,
    ) -> Reply | Failure:
        pieces = 0
        began = request.began
        async for data in body_chunks(response):
            if exchange.first_byte is None:
                exchange.first_byte = self._clock()
            reader.feed(data)
            if began is not None and reader.first_token is not None:
                began()
                began = None
            if reader.error is not None or (reader.done and not reader.whole):
                break
            if reader.whole:
                stream_timeout.finish_within(AFTER_DONE if reader.done else AFTER_FINISH)
            elif reader.first_token is not None and reader.pieces > pieces:
                stream_timeout.on_chunk()
            pieces = reader.pieces
        return reader.result()

    def _broken(
        self, error: BaseException, request: HttpRequest, exchange: Exchange, idle: float | None
    ) -> Failure:
        """Convert a network error, and decide whether the request may be resent at no cost.

        ``idle`` is for how many seconds its connection had been idle, None if it was new.
        """
        quick = self._clock() - exchange.sent < STALE_SECONDS
        exchange.stale_connection = (
            idle is not None and (quick or idle >= LONG_IDLE) and is_stale(error)
        )
        exchange.connected = not isinstance(error, NOT_CONNECTED)
        exchange.cut = isinstance(error, PayloadError)
        return network_failure(error, request.endpoint, request.timeouts)

    def _note(
        self,
        exchange: Exchange,
        response: aiohttp.ClientResponse | PlainResponse,
        endpoint: Endpoint,
    ) -> None:
        """Record status, request id and rate limits of a response.

        Limits are parsed for providers, and for own engines that once sent them with a 429.
        """
        exchange.status = response.status
        headers = response.headers
        name = headers.get("request-id") or headers.get("X-Request-Id")
        exchange.request_id = endpoint.without_secrets(name) if name else None
        if endpoint.own and response.status != 429 and not self._profile(endpoint).sends_limits:
            return
        limits = read_rate_limits(headers, time.time())  # resets may be dates
        if limits is None:
            return
        exchange.limits = msgspec.structs.replace(limits, at=self._clock())
        if endpoint.own:
            self._profile(endpoint).sends_limits = True


class Chunked(Protocol):
    """Content that arrives in chunks."""

    def iter_any(self) -> AsyncIterator[bytes]:
        """Yield the chunks."""
        ...


class HasContent(Protocol):
    """A response whose body arrives in chunks."""

    @property
    def content(self) -> Chunked:
        """The body."""
        ...


async def read_body(response: HasContent) -> bytes:
    """Return the body of a response."""
    if isinstance(response, PlainResponse):
        return await response.read()
    return b"".join([piece async for piece in body_chunks(response)])


_CHARSET = re.compile(r";\s*charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE)
_ENCODINGS = re.compile(
    r"(iso[-_]?8859-|latin-?|windows-|cp|gb|big|koi8-|euc-)[\da-z]+|utf-?(16|32)([bl]e)?|shift_jis",
    re.IGNORECASE,
)
"""Character sets of text that are decoded; Python has others, whose decoding is slow."""


def _to_utf8(raw: bytes, headers: Mapping[str, str]) -> bytes:
    """Return the body of a response, converted to UTF-8 from the charset that it names."""
    if raw.isascii() and b"\0" not in raw[:4]:  # zeros: UTF-16 or UTF-32
        return raw
    charset = _CHARSET.search(headers.get("Content-Type", ""))
    if charset is None or not _ENCODINGS.fullmatch(charset[1]):
        return raw
    try:
        return raw.decode(charset[1]).encode()
    except (LookupError, UnicodeError):
        return raw


def body_chunks(response: HasContent) -> AsyncIterator[bytes]:
    """Yield the body of a response as it arrives, up to its limit."""
    pieces = response.content.iter_any()
    # The pool's connections enforce the limit themselves.
    return pieces if isinstance(response, PlainResponse) else limit_body(pieces)


def redact_failure(failure: Failure, endpoint: Endpoint, exchange: Exchange) -> Failure:
    """Remove the endpoint's secrets from ``failure`` and name its proxy."""
    if exchange.status is None:
        return failure
    message = endpoint.without_secrets(failure.message)
    if endpoint.proxy and exchange.first_token is None:
        message += proxy_note(endpoint)
    return msgspec.structs.replace(failure, message=message)
