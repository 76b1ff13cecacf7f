"""HTTP/1.1 connections (RFC 9112) and their responses, parsed by llhttp."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import httptools
from multidict import CIMultiDict

from bagent.backends.http.errors import (
    MAX_BODY,
    EndlessBody,
    HttpError,
    PayloadError,
    ServerClosed,
    SwitchedProtocol,
)

MAX_HEAD = 1 << 20
"""Bytes of the headers of a response, and of its trailers."""


class Connection(asyncio.Protocol):
    """A kept-open connection with at most one request at a time.

    The names of the ``on_`` methods are httptools's.
    """

    __slots__ = (
        "_chunks",
        "_head",
        "_inflate",
        "_seen",
        "_size",
        "complete",
        "error",
        "extra",
        "fields",
        "headed",
        "idle_since",
        "kept",
        "loop",
        "on_end",
        "parser",
        "status",
        "transport",
        "waiter",
        "whole",
    )

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.on_end: Callable[[], None] | None = None
        """Called once the response is complete or has failed; set only with ``whole``."""
        self.error: BaseException | None = None
        self.idle_since = 0.0
        self.parser: Any = None
        self.reset()

    def reset(self) -> None:
        """Clear the state of the last response."""
        self.fields: list[tuple[str, str]] = []
        self.headed = False
        self.complete = False
        self.whole = False
        self.extra = False
        self.kept = False
        self.status = 0
        self._chunks: deque[bytes] = deque()
        self._inflate: Any = None
        self._seen = 0
        self._size = 0
        self._head = 0

    def send(self, head: bytes, body: bytes | None) -> None:
        """Start a request, whose head ends where the length of its body belongs, if it has one."""
        self.reset()
        if self.parser is None:
            self.parser = httptools.HttpResponseParser(self)
        assert self.transport is not None
        if body is None:
            self.transport.write(head + b"\r\n")
        elif len(body) < 65536:
            self.transport.write(b"%b%d\r\n\r\n%b" % (head, len(body), body))
        else:
            self.transport.writelines((b"%b%d\r\n\r\n" % (head, len(body)), body))

    # --- from the loop ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle the established connection."""
        self.loop = asyncio.get_running_loop()
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and wake the request if they complete something."""
        if self.parser is None or self.complete:
            self.fail(HttpError("bytes that belong to no request"))
            return
        self._seen += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__ or error
            self.fail(cause if isinstance(cause, HttpError) else PayloadError(str(cause)))
        except httptools.HttpParserUpgrade:
            self.fail(SwitchedProtocol())
        except httptools.HttpParserError as error:
            self.fail(
                self.error or PayloadError(str(error)) if self.headed else HttpError(str(error))
            )
        if not self.headed and self._seen > MAX_HEAD:
            self.fail(HttpError("a head without an end"))
        if self._size > MAX_BODY and not self.complete:
            self.fail(EndlessBody())
        if self.complete or not self.whole:
            self.wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection: a complete response, or an error."""
        self.transport = None
        if self.complete:
            return
        if self.error is not None:
            pass
        elif not self._seen:
            self.error = error or ServerClosed()
        elif not self.headed:
            self.error = PayloadError(f"the head broke off: {error or 'closed'}")
        elif error is None and self._until_closed():
            self.complete = True
        else:
            self.error = PayloadError(str(error or "closed before the end"))
        self.wake()

    def _until_closed(self) -> bool:
        """Return whether the end of the connection is the end of the body (RFC 9112, 6.3)."""
        codings = [value for name, value in self.fields if name.lower() == "transfer-encoding"]
        if codings:
            return codings[-1].rpartition(",")[2].strip().lower() != "chunked"
        return not any(name.lower() == "content-length" for name, _ in self.fields)

    # --- from the parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Handle the start of a response; a second one is unsolicited."""
        self.extra = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle one header."""
        if self.complete:
            return
        self._head += len(name) + len(value)
        if self._head > MAX_HEAD:
            raise HttpError("headers without an end")
        if not self.headed:  # else it is a trailer, which may come after the headers were read
            self.fields.append((name.decode("latin-1"), value.decode("utf-8", "surrogateescape")))

    def on_headers_complete(self) -> None:
        """Handle the end of the headers."""
        if self.complete:
            return
        self.status = self.parser.get_status_code()
        if self.status < 200:  # an interim answer; the real one follows
            self.fields.clear()
            return
        self.headed = True
        for name, value in self.fields:
            if name.lower() == "content-encoding":
                self._inflate = _inflater(value.strip().lower())

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body, decompressing it."""
        if self.complete:
            return
        if self._inflate is not None:
            body = self._inflate(body, MAX_BODY - self._size)
        self._size += len(body)
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        """Handle the end of a response."""
        if self.headed and not self.complete:
            self.complete = True
            self.kept = self.parser.should_keep_alive()  # known only here

    # --- for the request ----------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the waiting request."""
        waiter, self.waiter = self.waiter, None
        on_end, self.on_end = self.on_end, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if on_end is not None:
            on_end()

    def fail(self, error: BaseException) -> None:
        """Abort the connection with an error."""
        if self.error is None and not self.complete:
            self.error = error
        if self.transport is not None:
            self.transport.abort()
        self.wake()

    def take(self) -> bytes:
        """Return the buffered bytes of the body."""
        chunks = self._chunks
        if len(chunks) == 1:
            return chunks.popleft()
        data = b"".join(chunks)
        chunks.clear()
        return data


class PlainResponse:
    """A response whose headers were received; a subset of aiohttp's response."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers: CIMultiDict[str] = CIMultiDict(connection.fields)

    @property
    def content_type(self) -> str:
        """The media type in lower case, without parameters."""
        value: str = self.headers.get("Content-Type", "")
        return value.partition(";")[0].strip().lower()

    @property
    def content(self) -> PlainResponse:
        """The body as a stream."""
        return self

    async def read(self) -> bytes:
        """Return the whole body."""
        connection = self._connection
        connection.whole = True
        while not connection.complete:
            await wait_for_data(connection)
        return connection.take()

    def body(self) -> bytes:
        """Return the whole body of a response that has ended; raise what broke it off."""
        connection = self._connection
        if not connection.complete and connection.error is not None:
            raise connection.error
        return connection.take()

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Yield the body in chunks as they arrive."""
        connection = self._connection
        while True:
            if piece := connection.take():
                yield piece
            elif connection.complete:
                return
            else:
                await wait_for_data(connection)


async def limit_body(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield ``pieces`` while the body is within :data:`~bagent.backends.http.errors.MAX_BODY`.

    Raises:
        EndlessBody: there are more than any answer has.
    """
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > MAX_BODY:
            raise EndlessBody
        yield piece


async def wait_for_data(connection: Connection) -> None:
    """Wait until the connection received something; raise its error."""
    if connection.error is not None:
        raise connection.error
    connection.waiter = waiter = connection.loop.create_future()
    try:
        await waiter
    finally:
        connection.waiter = None
    if connection.error is not None and not connection._chunks:
        raise connection.error


def _inflater(encoding: str) -> Any:
    """Return the decompressor of a content encoding, None if there is none."""
    if encoding in ("gzip", "x-gzip"):
        return _Gzip().decompress
    return _Deflate().decompress if encoding == "deflate" else None


def _bounded(decompressor: Any, data: bytes, room: int) -> bytes:
    """Decompress ``data`` to at most ``room`` bytes.

    Raises:
        EndlessBody: that is more than ``room`` bytes: a few packed ones may be a thousand times as
            many.
    """
    piece: bytes = decompressor.decompress(data, max(room, 0) + 1)
    if len(piece) > room:
        raise EndlessBody
    return piece


class _Gzip:
    """Decompresses ``gzip``, with any number of members (RFC 1952, 2.2)."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(16 + zlib.MAX_WBITS)

    def decompress(self, data: bytes, room: int) -> bytes:
        pieces = []
        while data:
            if self._member.eof:
                data = data.lstrip(b"\0")  # padding
                if not data.startswith(b"\x1f"):
                    break  # trailing garbage, which gzip(1) ignores too
                self._member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            pieces.append(_bounded(self._member, data, room))
            room -= len(pieces[-1])
            data = self._member.unused_data
        return b"".join(pieces)


class _Deflate:
    """Decompresses ``deflate``: with a zlib header by the standard, without it by some servers."""

    def __init__(self) -> None:
        self._inner: Any = None

    def decompress(self, data: bytes, room: int) -> bytes:
        if self._inner is None:
            zlib_header = data[:1] and data[0] & 15 == 8
            self._inner = zlib.decompressobj(zlib.MAX_WBITS if zlib_header else -zlib.MAX_WBITS)
        return _bounded(self._inner, data, room)
