"""A forward proxy on 127.0.0.1 that records what it is asked and knows where names lead."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class ForwardProxy:
    """An HTTP proxy: absolute-URI requests and CONNECT.

    Args:
        routes: ``host:port`` as the client names it -> ``host:port`` to connect to; a name that
            is not here gets 502. Nothing outside ``routes`` is ever connected to.
        authorization: the ``Proxy-Authorization`` value to insist on, else 407.

    Attributes:
        seen: ``"POST http://outside.test/v1/..."`` and ``"CONNECT outside.test:443"``, one
            entry per request line.
    """

    def __init__(
        self, routes: Mapping[str, str] | None = None, authorization: str | None = None
    ) -> None:
        self.routes = dict(routes or {})
        self.seen: list[str] = []
        self.port = 0
        self._authorization = authorization
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    @property
    def url(self) -> str:
        """The value for ``HTTP_PROXY`` and its like."""
        return f"http://127.0.0.1:{self.port}"

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._stop.wait()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await self._serve(head, reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _serve(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        line, _, rest = head.partition(b"\r\n")
        method, target, version = line.decode("latin-1").split(" ", 2)
        self.seen.append(f"{method} {target}")
        if self._authorization is not None:
            wanted = f"proxy-authorization: {self._authorization}".lower()
            if wanted not in rest.decode("latin-1").lower():
                writer.write(
                    b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
                )
                return
        parts = urlsplit(target if "//" in target else f"//{target}")
        route = self.routes.get(f"{parts.hostname}:{parts.port or 80}")
        if route is None:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = route.rpartition(":")
        upstream, out = await asyncio.open_connection(host, int(port))
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            first = f"{method} {path or '/'} {version}\r\n".encode("latin-1")
            # one request per connection: the next one may name another host
            out.write(first + b"Connection: close\r\n" + rest)
        await asyncio.gather(_copy(reader, out), _copy(upstream, writer))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
