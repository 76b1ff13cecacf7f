"""Connections: lost ones, kept-open ones, proxies; and looking up names without waiting."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from types import SimpleNamespace

import aiohttp
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.aiohttp_client import translate_error
from bagent.backends.http.client import (
    NETWORK_ERRORS,
    StreamStalled,
    StreamTimeout,
    Transport,
    network_failure,
)
from bagent.backends.http.errors import NotConnected
from bagent.backends.http.resolver import ResolverLoop
from support.backend_calls import ask, backend, endpoint, failure, raw_server, reply, request, send
from support.jumping_loop import run_shifted, skip, stop_clock
from support.replies import close

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
    assert (exchange.stale_connection, exchange.status) == (False, None)


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
            for idle, streamed in ((3.9, True), (4.1, False), (0.0, False)):
                reply(await found.send(to, [request(stream=streamed)], NO_LIMITS))
                skip(idle)

    run_shifted(main())
    assert fs.connections == 2


def test_a_refused_connection_says_where(unused_port):
    exchange = ask(f"http://127.0.0.1:{unused_port}/v1")
    found = failure(exchange)
    assert (found.kind, found.passing, found.busy) == ("connect", True, False)
    assert found.message.startswith("cannot connect to here: ")
    assert "Connection refused" in found.message
    assert (exchange.stale_connection, exchange.status) == (False, None)


@pytest.mark.parametrize(
    ("to", "words"),
    [
        (endpoint("http://user:secret@:80"), "address"),
        (endpoint("nonsense"), "address"),
        (endpoint("http://127.0.0.1:1", headers={"Authorization": "Bearer secret\n"}),
         "no request to here can be made"),
    ],
    ids=["no host", "no address", "a key with a line break"],
)  # fmt: skip
def test_what_nothing_can_be_sent_to_is_a_lasting_failure(to, words):
    found = failure(ask(to))
    assert (found.kind, found.passing) == ("rejected", False)
    assert words in found.message
    assert "secret" not in found.message


async def test_an_http_proxy_sees_the_whole_address():
    heads = []

    async def proxy(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        body = b'{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with raw_server(proxy) as port:
        to = endpoint("http://outside.test/v1", proxy=f"http://u:s3cret@127.0.0.1:{port}")
        assert reply(await send(to)).text == "yes"
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


async def test_a_get_over_a_connection_that_was_just_closed_is_sent_again() -> None:
    heads: list[bytes] = []

    async def serve(reader, writer):
        """Answer the first request of each connection, and close at the second."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Kind: a\r\n\r\nok")
            heads.append(await reader.readuntil(b"\r\n\r\n"))

    transport = Transport()
    async with raw_server(serve) as port:
        here = f"http://127.0.0.1:{port}"
        headers = {"Authorization": "Bearer k"}
        to = endpoint(f"{here}/v1", headers=headers, query={"version": "1"})
        for _ in range(2):
            status, body, headers = await transport.get(to, f"{here}/metrics", 10)
            assert (status, body, headers["x-kind"]) == (200, b"ok", "a")
        await transport.close()
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


async def look_up(host: str) -> set[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, 80, type=socket.SOCK_STREAM)
    return {entry[4][0] for entry in found if isinstance(entry[4][0], str)}


def run_lookup(host: str) -> set[str]:
    with asyncio.Runner(loop_factory=ResolverLoop) as runner:
        return runner.run(look_up(host))


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "\udc80"])
def test_what_can_be_no_name_is_an_unknown_one(host: str) -> None:
    with pytest.raises(socket.gaierror):
        run_lookup(host)


def test_giving_up_is_at_once_and_leaves_the_loop_whole() -> None:
    async def give_up() -> set[str]:
        task = asyncio.ensure_future(look_up("localhost"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await look_up("localhost")

    with asyncio.Runner(loop_factory=ResolverLoop) as runner:
        assert runner.run(give_up())


REACHED = Endpoint("here", "http://user:s3cret@127.0.0.1:1/v1", query={"key": "s3cret"})
KEY = SimpleNamespace(host="127.0.0.1", port=1, ssl=True)


def connector_error(number, words=None):
    return aiohttp.ClientConnectorError(KEY, OSError(number, words or "why"))


def response_error(kind=aiohttp.ClientResponseError, status=400, message="Bad status line"):
    url = URL("http://user:s3cret@127.0.0.1:1/v1?key=s3cret")
    headers = CIMultiDictProxy(CIMultiDict())
    info = aiohttp.RequestInfo(url, "POST", headers, url)
    return kind(info, (), status=status, message=message)


def own(error):
    """The error as it comes out of the transport."""
    return translate_error(error) if isinstance(error, aiohttp.ClientError) else error


UNANSWERED = "here closed the connection without an answer"
NO_ADDRESS = "not an address to send to: http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (aiohttp.ConnectionTimeoutError(), "connect", "no connection to here within 3 s"),
        (StreamStalled("sent no first token within 5 s"), "timeout",
         "here sent no first token within 5 s"),
        (TimeoutError(), "timeout", "no whole answer from here within 9 s"),
        (aiohttp.ServerTimeoutError(), "timeout", "no whole answer from here within 9 s"),
        (connector_error(errno.EHOSTUNREACH, "no route"), "connect",
         "cannot connect to here: no route"),
        (aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(-2, "unknown name")), "connect",
         "cannot connect to here: unknown name"),
        (aiohttp.ServerDisconnectedError(), "connect", UNANSWERED),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "connect", UNANSWERED),
        (aiohttp.ClientOSError(errno.EPIPE, "pipe"), "connect", UNANSWERED),
        (aiohttp.ClientOSError(errno.ETIMEDOUT, "timed out"), "connect",
         "the connection to here broke: timed out"),
        (aiohttp.ClientPayloadError("not complete"), "bad_response",
         "the answer of here broke off: not complete"),
        (response_error(), "bad_response", "no HTTP from here: Bad status line"),
        (response_error(aiohttp.ClientHttpProxyError, 502), "connect",
         "the proxy refused to reach here: HTTP 502"),
        (response_error(aiohttp.ClientHttpProxyError, 407), "auth",
         "the proxy refused to reach here: HTTP 407"),
        (aiohttp.InvalidURL("http://user:s3cret@"), "rejected", NO_ADDRESS),
        (aiohttp.NonHttpUrlClientError("x"), "rejected", NO_ADDRESS),
        (ValueError("line break in header"), "rejected",
         "no request to here can be made: line break in header"),
    ],
)  # fmt: skip
def test_every_network_error_has_a_kind_and_words(error, kind, words):
    assert isinstance(own(error), NETWORK_ERRORS)
    found = network_failure(own(error), REACHED, Timeouts(connect=3, total=9))
    assert (found.kind, found.message) == (kind, words)
    assert found.passing == (kind not in ("auth", "rejected"))
    assert (found.status, found.busy) == (None, False)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL, errno.ENOMEM])
def test_a_full_machine_is_waited_for_and_costs_no_try(number):
    for error in (connector_error(number), aiohttp.ClientOSError(number, "why")):
        found = network_failure(own(error), REACHED, Timeouts())
        assert (found.kind, found.passing, found.busy) == ("overloaded", True, True)
        assert "this machine" in found.message


def test_patience_ends_with_its_own_words():
    async def main(lifted):
        async with StreamTimeout(0.01, 0.02) as patience:
            if lifted:
                patience.disable()
                await asyncio.sleep(0.05)
            patience.on_chunk()
            await asyncio.sleep(60)

    for lifted in (False, True):
        with pytest.raises(StreamStalled, match=r"sent nothing more for 0\.02 s"):
            asyncio.run(main(lifted))
