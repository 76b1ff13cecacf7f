"""Connections: lost ones, kept-open ones, proxies."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.http.errors import NotConnected
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
from support.jumping_loop import run_shifted, skip, stop_clock
from support.replies import close, ok

NO_LIMITS = Timeouts(connect=None, first_token=None, idle=None, total=None)


@pytest.mark.parametrize(("reset", "streamed"), [(False, True), (True, False)])
def test_a_new_connection_that_is_closed_without_an_answer_is_a_connect_failure(
    fs, reset, streamed
):
    fs.set_script({"r1": [close(reset=reset)]})
    exchange = ask(fs.url, request(stream=streamed))
    found = failure(exchange)
    assert (found.kind, found.passing, found.status) == ("connect", True, None)
    assert found.message == "here closed the connection without an answer"
    assert not exchange.stale_connection
    assert exchange.status is None


@pytest.mark.parametrize("reset", [False, True])
async def test_a_kept_open_connection_that_was_closed_is_worth_another_try_for_free(fs, reset):
    fs.set_script({"r1": [ok()], "r2": [close(reset=reset), ok("good")]})

    async with backend(clock=lambda: 1000.0) as found:
        to = endpoint(fs.url)
        first, stale, last = [
            await found.send(to, [request(row)], QUICK) for row in ("r1", "r2", "r2")
        ]
    assert not first.stale_connection
    assert failure(stale).kind == "connect"
    assert stale.stale_connection
    assert (reply(last).text, last.stale_connection) == ("good", False)


@pytest.mark.parametrize(
    ("idle", "again", "streamed"), [(0.5, False, True), (1.1, True, False), (3.8, True, True)]
)
def test_a_connection_that_was_idle_long_may_have_been_closed_however_late_it_shows(
    idle, again, streamed
):
    """uvicorn's limit for idle connections falls due while its loop is busy: it closes them, and
    with them the request, once it gets to it."""
    came, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"id=r1")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.readuntil(b"id=r2")
        came.set()
        await closed.wait()

    async def main():
        stop_clock()
        now = [1000.0]
        async with raw_server(serve) as port, backend(clock=lambda: now[0]) as found:
            to = endpoint(f"http://127.0.0.1:{port}")
            await found.send(to, [request("r1")], NO_LIMITS)
            skip(idle)
            call = request("r2", stream=streamed)
            sending = asyncio.ensure_future(found.send(to, [call], NO_LIMITS))
            await came.wait()
            now[0] += 30.0
            closed.set()
            return await sending

    exchange = run_shifted(main())
    assert failure(exchange).kind == "connect"
    assert exchange.stale_connection is again


def test_a_connection_is_never_used_once_it_was_idle_for_as_long_as_servers_keep_one(fs):
    async def main():
        stop_clock()
        async with backend() as found:
            to = endpoint(fs.url)
            for seconds in (3.9, 4.1, 0.0):
                reply(await found.send(to, [request()], NO_LIMITS))
                skip(seconds)

    run_shifted(main())
    assert fs.connections == 2


def test_a_refused_connection_says_where(unused_port):
    exchange = ask(f"http://127.0.0.1:{unused_port}/v1")
    found = failure(exchange)
    assert (found.kind, found.passing, found.busy) == ("connect", True, False)
    assert found.message.startswith("cannot connect to here: ")
    assert "Connection refused" in found.message
    assert (exchange.stale_connection, exchange.status) == (False, None)


@pytest.mark.parametrize("url", ["http://", "http://user:secret@:80", "ftp://host/v1", "nonsense"])
def test_what_is_no_address_is_a_lasting_failure(url):
    found = failure(ask(url))
    assert (found.kind, found.passing) == ("rejected", False)
    assert "address" in found.message
    assert "secret" not in found.message


def test_a_key_with_a_line_break_is_a_lasting_failure(fs):
    found = failure(ask(endpoint(fs.url, headers={"Authorization": "Bearer k\n"})))
    assert (found.kind, found.passing) == ("rejected", False)
    assert "no request to here can be made" in found.message
    assert fs.requests == []


# --- proxies ----------------------------------------------------------------------------------


def test_an_http_proxy_sees_the_whole_address(fs):
    heads = []

    async def proxy(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        body = b'{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async def main():
        async with raw_server(proxy) as port:
            to = endpoint("http://outside.test/v1", proxy=f"http://u:s3cret@127.0.0.1:{port}")
            return await send(to)

    assert reply(asyncio.run(main())).text == "yes"
    (head,) = heads
    assert head.startswith(b"POST http://outside.test/v1/chat/completions HTTP/1.1\r\n")
    assert b"Host: outside.test\r\n" in head
    assert b"Proxy-Authorization: Basic " in head


def test_a_dead_proxy_is_named(unused_port):
    proxy = f"http://u:s3cret@127.0.0.1:{unused_port}"
    for url in ("http://outside.test/v1", "https://outside.test/v1"):
        found = failure(ask(endpoint(url, proxy=proxy)))
        assert (found.kind, found.passing) == ("connect", True)
        assert f"here through the proxy http://127.0.0.1:{unused_port}" in found.message
        assert "s3cret" not in found.message


def test_the_environments_proxies_are_not_looked_at(fs, monkeypatch, unused_port):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_port}")
    assert reply(ask(fs.url))


class Server:
    """Answers the first request of each connection, and closes at the second."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.ended = asyncio.Semaphore(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Kind: a\r\n\r\nok")
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.ended.release()


async def test_a_get_over_a_connection_that_was_just_closed_is_sent_again() -> None:
    told = Server()
    server = await asyncio.start_server(told.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    here = f"http://{host}:{port}"
    endpoint = Endpoint(
        "e", f"{here}/v1", headers={"Authorization": "Bearer k"}, query={"version": "1"}
    )
    transport = Transport()
    async with server:
        for _ in range(2):
            status, body, headers = await transport.get(endpoint, f"{here}/metrics", 10)
            assert (status, body, headers["x-kind"]) == (200, b"ok", "a")
        await transport.close()
        for _ in range(2):  # connections
            await asyncio.wait_for(told.ended.acquire(), 10)
    heads = told.heads
    assert len(heads) == 3
    for head in heads:
        assert head.startswith(b"GET /metrics?version=1 HTTP/1.1\r\n")
        assert b"\r\nAuthorization: Bearer k\r\n" in head
        assert b"Content-" not in head


def test_a_name_with_several_addresses_says_once_why_none_was_reached() -> None:
    told = "[Errno 111] Connect call failed ('::1', 1, 0, 0), [Errno 111] Connect call failed ()"
    several = OSError(f"Multiple exceptions: {told}")
    assert str(NotConnected(several)).endswith(os.strerror(111))
    assert NotConnected(OSError(111, f"Multiple exceptions: {told}")).strerror == os.strerror(111)
