"""Answers that never end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from bagent.backends import aiohttp_client, http_connection, http_errors
from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.types import Failure
from support.backend_calls import backend, request
from support.tls import site_authority

ENOUGH = 1 << 25


class Endless:
    """Answers and never ends: over HTTP, or over TLS by the other client."""

    def __init__(self, kind: bytes) -> None:
        self.kind = kind
        self.sent = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        piece = b"data: " + b" " * (1 << 20)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: " + self.kind + b"\r\n\r\n")
            while self.sent < ENOUGH and not writer.is_closing():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)  # a drain alone lets nobody else work
                self.sent += len(piece)
        writer.close()


@pytest.mark.parametrize(
    ("kind", "tls", "stream"),
    [
        (b"application/json", False, False),
        (b"text/event-stream", False, True),
        (b"application/json", True, True),
        (b"text/event-stream", True, False),
    ],
)
def test_an_answer_without_an_end_is_given_up_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes, tls: bool, stream: bool
) -> None:
    for module in (http_connection, http_errors, aiohttp_client):
        monkeypatch.setattr(module, "LONGEST_BODY", 1 << 23, raising=False)
    site = site_authority(tmp_path) if tls else None

    async def work() -> tuple[Failure, int]:
        endless = Endless(kind)
        context = site.context if site else None
        server = await asyncio.start_server(endless.serve, "127.0.0.1", 0, ssl=context)
        host, port = server.sockets[0].getsockname()
        to = Endpoint(
            "e", f"http{'s' if tls else ''}://{host}:{port}/v1",
            ca_file=str(site.ca_file) if site else None,
        )  # fmt: skip
        async with server, backend() as client:
            exchange = await client.send(to, [request(stream=stream)], Timeouts())
        (failure,) = exchange.results
        assert isinstance(failure, Failure)
        return failure, endless.sent

    failure, sent = asyncio.run(work())
    assert failure.passing
    assert "more than 8 MiB" in failure.message
    assert len(failure.text or "") <= 1 << 20
    assert sent < ENOUGH
