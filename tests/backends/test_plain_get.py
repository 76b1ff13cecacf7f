from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.backends.http_errors import BadAddress, ConnectTimeout, HttpError, NotConnected
from bagent.backends.transport import NETWORK_ERRORS, NOT_CONNECTED, Transport


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


def test_a_get_over_a_connection_that_was_just_closed_is_sent_again() -> None:
    async def work() -> list[bytes]:
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
        return told.heads

    heads = asyncio.run(work())
    assert len(heads) == 3
    for head in heads:
        assert head.startswith(b"GET /metrics?version=1 HTTP/1.1\r\n")
        assert b"\r\nAuthorization: Bearer k\r\n" in head
        assert b"Content-" not in head


def test_a_get_where_nobody_listens_is_not_connected() -> None:
    async def work() -> None:
        transport = Transport()
        try:
            await transport.get(Endpoint("e", "http://127.0.0.1:1"), "http://127.0.0.1:1/x", 10)
        finally:
            await transport.close()

    with pytest.raises(NotConnected):
        asyncio.run(work())


def test_errors_are_caught_as_what_they_are() -> None:
    assert isinstance(BadAddress("x"), ValueError)
    assert isinstance(ConnectTimeout(), TimeoutError)
    assert isinstance(ConnectTimeout(), NOT_CONNECTED)
    assert NotConnected(OSError(5, "why")).errno == 5
    assert isinstance(HttpError("x"), NETWORK_ERRORS)


def test_a_name_with_several_addresses_says_once_why_none_was_reached() -> None:
    told = "[Errno 111] Connect call failed ('::1', 1, 0, 0), [Errno 111] Connect call failed ()"
    several = OSError(f"Multiple exceptions: {told}")
    assert str(NotConnected(several)).endswith(os.strerror(111))
    assert NotConnected(OSError(111, f"Multiple exceptions: {told}")).strerror == os.strerror(111)


def test_plain_http_needs_no_aiohttp() -> None:
    code = (
        "import sys, bagent.backends.choose, bagent.backends.engine_metrics, bagent.runs.start;"
        "print('aiohttp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
