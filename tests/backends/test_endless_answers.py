"""Answers that never end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.openai_http import OpenAIBackend
from bagent.backends.transport import Transport
from bagent.types import Failure
from support.backend_calls import request
from support.tls import site_authority

ENOUGH = 1 << 28


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


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_an_end_is_given_up_before_it_fills_the_memory(
    tmp_path: Path, kind: bytes, tls: bool, stream: bool
) -> None:
    site = site_authority(tmp_path) if tls else None

    async def work() -> tuple[Failure, int]:
        told = Endless(kind)
        server = await asyncio.start_server(
            told.serve, "127.0.0.1", 0, ssl=site.context if site else None
        )
        host, port = server.sockets[0].getsockname()
        scheme = "https" if tls else "http"
        endpoint = Endpoint(
            "e", f"{scheme}://{host}:{port}/v1", ca_file=str(site.ca_file) if site else None
        )
        transport = Transport()
        backend = OpenAIBackend(transport)
        call = request(stream=stream)
        async with server:
            exchange = await backend.send(endpoint, [call], Timeouts())
            await transport.close()
        (failure,) = exchange.results
        assert isinstance(failure, Failure)
        return failure, told.sent

    failure, sent = asyncio.run(work())
    assert failure.passing
    assert "more than 128 MiB" in failure.message
    assert len(failure.text or "") <= 1 << 20
    assert sent < ENOUGH
