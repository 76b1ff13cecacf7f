"""The time limits of one call, against servers that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from bagent.backends.base import Timeouts
from bagent.backends.http import aiohttp_client
from bagent.backends.http import connection as http_connection
from bagent.backends.http import errors as http_errors
from bagent.backends.http.client import StreamTimeout
from support.backend_calls import (
    QUICK,
    ask,
    backend,
    endpoint,
    failure,
    raw_server,
    reply,
    request,
    send,
)
from support.jumping_loop import run_shifted, skip
from support.replies import delta, hang, ok, stream
from support.response_bodies import sse
from support.tls import site_authority

LIMIT = 0.3
PING = ": ping\n\n"


def late(exchange, words):
    """The exchange failed for its time limit, not before it, in these words."""
    found = failure(exchange)
    assert (found.kind, found.passing, found.message) == ("timeout", True, words)
    assert exchange.done - exchange.sent >= LIMIT
    return found


async def test_total_bounds_each_request_of_a_kept_open_connection(fs):
    fs.set_script({"r1": [ok()], "r2": [hang()], "r3": [hang()]})
    limits = Timeouts(total=LIMIT)
    async with backend() as found:
        to = endpoint(fs.url)
        await asyncio.gather(*(found.send(to, [request("r1")], limits) for _ in range(2)))
        first = asyncio.create_task(found.send(to, [request("r2")], limits))
        await asyncio.sleep(LIMIT / 2)
        exchanges = [await found.send(to, [request("r3")], limits), await first]
    for exchange in exchanges:
        late(exchange, "no whole answer from here within 0.3 s")


def test_comments_do_not_keep_a_stream_alive(fs):
    fs.set_script({"r1": [stream([delta("half"), *[PING] * 100], gap=0.1)]})
    limits = Timeouts(idle=LIMIT)
    words = "here sent nothing more for 0.3 s"
    assert late(ask(fs.url, request(stream=True), limits), words).text == "half"


def test_pieces_that_keep_coming_have_all_the_time_they_need(monkeypatch):
    chunks = [delta("a"), delta(""), delta("b"), delta(""), delta("")]
    received = asyncio.Semaphore(0)
    on_chunk = StreamTimeout.on_chunk

    def note_chunk(timeout):
        on_chunk(timeout)
        received.release()

    monkeypatch.setattr(StreamTimeout, "on_chunk", note_chunk)

    async def serve(reader, writer):
        await reader.readuntil(b"id=r1")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for chunk in chunks:
            skip(40)
            writer.write(sse(chunk))
            await received.acquire()
        writer.write(sse(delta(finish_reason="stop")) + b"data: [DONE]\n\n")

    async def main():
        async with raw_server(serve) as port:
            limits = Timeouts(first_token=60, idle=60)
            return await send(endpoint(f"http://127.0.0.1:{port}/v1"), request(stream=True), limits)

    exchange = run_shifted(main())
    assert reply(exchange).text == "ab"


def test_a_connection_is_waited_for_no_longer_than_connect():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        address = deaf.getsockname()
        with socket.create_connection(address):  # fills the backlog: further ones hang
            exchange = ask(f"http://{address[0]}:{address[1]}/v1", timeouts=Timeouts(connect=LIMIT))
    found = failure(exchange)
    assert (found.kind, found.passing) == ("connect", True)
    assert found.message == "no connection to here within 0.3 s"


async def test_a_cancelled_call_frees_the_server(fs):
    fs.set_script({"*": [hang()]})

    async with backend() as found:
        calls = [
            asyncio.create_task(found.send(endpoint(fs.url), [request(stream=streamed)], QUICK))
            for streamed in (False, True)
        ]
        await asyncio.to_thread(fs.wait_for, 2, "in_flight")
        for call in calls:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await asyncio.to_thread(fs.wait_for, 2, "finished")
    assert [seen.cancelled for seen in fs.requests] == [True, True]


ENOUGH = 1 << 25


@pytest.mark.parametrize(
    ("kind", "tls", "stream"),
    [(b"application/json", False, False), (b"text/event-stream", True, True)],
)
async def test_an_answer_without_an_end_is_given_up_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes, tls: bool, stream: bool
) -> None:
    """Over HTTP by the one client, over TLS by the other."""
    for module in (http_connection, http_errors, aiohttp_client):
        monkeypatch.setattr(module, "MAX_BODY", 1 << 23, raising=False)
    site = site_authority(tmp_path) if tls else None
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        piece = b"data: " + b" " * (1 << 20)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n\r\n")
            while sent < ENOUGH and not writer.is_closing():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)  # a drain alone lets nobody else work
                sent += len(piece)

    async with raw_server(serve, site and site.context) as port:
        to = endpoint(f"http{'s' * tls}://127.0.0.1:{port}/v1", ca_file=site and str(site.ca_file))
        found = failure(await send(to, request(stream=stream), Timeouts()))
    assert found.passing
    assert "more than 8 MiB" in found.message
    assert len(found.text or "") <= 1 << 20
    assert sent < ENOUGH


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ZEROS = 1 << 25
SMALL: dict[str, tuple[bytes, Callable[[], bytes]]] = {
    "gzip": (b"Content-Encoding: gzip", lambda: gzip.compress(bytes(ZEROS))),
    "gzip members": (b"Content-Encoding: gzip", lambda: gzip.compress(bytes(ZEROS // 8)) * 8),
    "deflate": (b"Content-Encoding: deflate", lambda: zlib.compress(bytes(ZEROS))),
    # packed as some servers do it
    "bare deflate": (b"Content-Encoding: deflate", lambda: zlib.compress(bytes(ZEROS))[2:-4]),
    "trailers": (b"Transfer-Encoding: chunked", lambda: b"0\r\n" + b"A: b\r\n" * (1 << 21)),
}
"""A header and what makes the body, which is large for some."""


@pytest.mark.parametrize("kind", SMALL)
async def test_a_small_answer_that_becomes_a_large_one_is_given_up(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for module in (http_connection, http_errors):
        monkeypatch.setattr(module, "MAX_BODY", 1 << 23)
    header, make_body = SMALL[kind]
    body = make_body()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + header + b"\r\n\r\n" + body)
            await writer.drain()

    async with raw_server(serve) as port:
        found = failure(await send(endpoint(f"http://127.0.0.1:{port}/v1"), timeouts=Timeouts()))
    assert ("without an end" if kind == "trailers" else "more than 8 MiB") in found.message
