"""A running fleet of simulated endpoints."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from aiohttp import web

from bagent.errors import UsageError
from bagent.sim.config import SimConfig
from bagent.sim.server import Replica

_BACKLOG = 4096
"""Connections that may wait to be accepted; a load test opens thousands at once."""

_GRACE = 0.1
"""Seconds that requests in flight get when the fleet is closed."""


class _Listener:
    """One replica, its HTTP server and its socket."""

    def __init__(self, config: SimConfig, number: int) -> None:
        self.replica = Replica(config, number, self.die)
        self._http = web.Server(
            self.replica.handle,
            handler_cancellation=True,
            keepalive_timeout=config.keep_alive,
            access_log=None,
        )
        self._socket: asyncio.Server | None = None
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._socket = await loop.create_server(self._http, host, port, backlog=_BACKLOG)
        self.port = self._socket.sockets[0].getsockname()[1]

    def die(self) -> None:
        """Close the socket and cut every connection, at once."""
        if self._socket is not None:
            self._socket.close()
        self.replica.driver.close()
        for connection in list(self._http.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def close(self) -> None:
        self.replica.driver.close()
        if self._socket is not None:
            self._socket.close()
        self._http.pre_shutdown()
        await self._http.shutdown(_GRACE)
        if self._socket is not None:
            await self._socket.wait_closed()


class RunningSim:
    """A fleet of simulated endpoints on this event loop; use it with ``async with``.

    Attributes:
        config: what it was told.
        urls: base addresses (``http://host:port``), one for each replica, once started.
        replicas: the endpoints, with their ``engine`` and ``faults``, once started.
    """

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.urls: tuple[str, ...] = ()
        self.replicas: tuple[Replica, ...] = ()
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> RunningSim:
        """Open the sockets.

        Raises:
            UsageError: an address or a port cannot be had.
        """
        listeners: list[_Listener] = []
        try:
            for number in range(self.config.replicas):
                listener = _Listener(self.config, number)
                self._exits.push_async_callback(listener.close)
                port = self.config.port + number if self.config.port else 0
                await listener.open(self.config.host, port)
                listeners.append(listener)
        except OSError as error:
            await self._exits.aclose()
            where = f"{self.config.host}:{port}"
            raise UsageError(
                f"cannot listen on {where}: {error.strerror or error}",
                hint="choose another --port, or 0 for a free one",
            ) from None
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        self.urls = tuple(f"http://{host}:{listener.port}" for listener in listeners)
        self.replicas = tuple(listener.replica for listener in listeners)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the sockets and all connections."""
        await self._exits.aclose()


def start_sim(config: SimConfig) -> RunningSim:
    """Simulated endpoints for the time of an ``async with``.

    ::

        async with start_sim(parse_sim_url("sim://?replicas=2")) as sim:
            print(sim.urls)
    """
    return RunningSim(config)
