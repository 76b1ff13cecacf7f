"""HTTP/1.1 connection pool for plain ``http://`` endpoints, which serve nearly all calls of a
fleet.

aiohttp's redirects, cookies, traces and sessions cost more than all other work for a row. It is
used for TLS, proxies and addresses with a password.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from aiohappyeyeballs import start_connection
from multidict import CIMultiDict
from yarl import URL

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.connection import Connection, PlainResponse, wait_for_data
from bagent.backends.http.errors import BadAddress, ConnectTimeout, HttpError, NotConnected
from bagent.backends.http.resolver import Resolver

NAME_SECONDS = 300.0
"""Lifetime of a resolved name."""

_EYEBALLS = 0.25
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""A dead host is noticed within two minutes, however long an answer takes."""

_MOST_LIMITS = 64
"""Unused timeout groups that are kept."""

_BAD_IN_HEAD = ("\r", "\n", "\0")

CONNECTION_IDLE: ContextVar[float | None] = ContextVar("bagent_idle", default=0.0)
"""Seconds for which the connection of this task's last request had been idle; None if it was new.
"""


Connect = Callable[[str, int], Awaitable[Connection]]
"""Opens a connection to a host and port; raises :class:`OSError`."""


class _Target:
    """The address and the fixed part of the headers of an endpoint's URL."""

    __slots__ = ("address", "head", "host", "port")

    def __init__(self, endpoint: Endpoint, url_text: str, *, has_body: bool) -> None:
        try:
            url = URL(url_text)
        except ValueError as error:
            raise BadAddress(str(error)) from None
        if endpoint.query:
            url = url.update_query(dict(endpoint.query))
        if not url.raw_host:
            raise BadAddress(str(url))
        self.host = url.raw_host
        self.port = url.port or 80
        self.address = (self.host, self.port)
        fields: CIMultiDict[str] = CIMultiDict(
            {
                "Host": url.host_port_subcomponent or self.host,
                "User-Agent": "bagent",
                "Accept": "*/*",
            }
        )
        if has_body:
            fields["Content-Type"] = "application/json"
        fields.update(endpoint.headers)
        fields.popall("Content-Length", None)
        lines = [f"{'POST' if has_body else 'GET'} {url.raw_path_qs} HTTP/1.1"]
        for name, value in fields.items():
            if any(bad in name or bad in value for bad in _BAD_IN_HEAD):
                raise ValueError(f"a line break or zero byte in the header {name!r}")
            lines.append(f"{name}: {value}")
        self.head = "\r\n".join(lines).encode() + b"\r\n"
        if has_body:
            self.head += b"Content-Length: "  # the connection adds it


class TimeoutGroup:
    """Requests with the same time limit, which share one timer.

    A timer for each request would cost more than the rare timeout.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._seconds = seconds
        self._loop = loop
        self._due: dict[Connection, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, connection: Connection, now: float) -> None:
        """Start the limit of a request."""
        self._due[connection] = due = now + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._check_due)

    def end(self, connection: Connection) -> None:
        """Lift the limit of a request."""
        self._due.pop(connection, None)

    @property
    def used(self) -> bool:
        """Whether a request has this limit, or had it recently."""
        return self._timer is not None

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _check_due(self) -> None:
        self._timer = None
        now = self._loop.time()
        for connection, due in list(self._due.items()):
            if due > now:
                self._timer = self._loop.call_at(due, self._check_due)
                return
            del self._due[connection]
            connection.fail(TimeoutError())


class PlainPool:
    """Connections to plain HTTP endpoints, kept open for ``idle_seconds``; for one event loop.

    Args:
        connect: opens the connections; None: over TCP.
    """

    def __init__(self, idle_seconds: float, connect: Connect | None = None) -> None:
        self._idle_seconds = idle_seconds
        self._connect = connect or self._connect_tcp
        self._idle: dict[tuple[str, int], deque[Connection]] = {}
        self._busy: set[Connection] = set()
        self._targets: dict[tuple[Endpoint, str], _Target] = {}
        self._names: dict[tuple[str, int], tuple[float, list[Any]]] = {}
        self._resolver: Resolver | None = None
        self._reaper: asyncio.TimerHandle | None = None
        self._limits: dict[float, TimeoutGroup] = {}

    @staticmethod
    def serves(endpoint: Endpoint, url: str) -> bool:
        """Return whether the pool can reach ``url``: no TLS, no proxy, no password."""
        return endpoint.proxy is None and url.startswith("http://") and "@" not in url

    def post(self, endpoint: Endpoint, path: str, body: bytes, timeouts: Timeouts) -> PooledRequest:
        """POST ``body`` (JSON); use with ``async with``.

        Raises:
            ValueError: the address or a header cannot be sent.
        """
        target = self._targets.get((endpoint, path))
        if target is None:
            if len(self._targets) >= 32768:
                self._targets.clear()
            target = _Target(endpoint, endpoint.url + path, has_body=True)
            self._targets[endpoint, path] = target
        return PooledRequest(self, target, body, timeouts)

    def reserve(self, endpoint: Endpoint, path: str, timeouts: Timeouts) -> PooledRequest | None:
        """Return a POST over an idle connection, not sent yet; None if no connection is idle."""
        target = self._targets.get((endpoint, path))
        if target is None:
            return None
        request = PooledRequest(self, target, None, timeouts)
        return request if request.take_idle() is not None else None

    def get(self, endpoint: Endpoint, url: str, timeouts: Timeouts) -> PooledRequest:
        """GET an absolute URL; use with ``async with``.

        Raises:
            ValueError: the address or a header cannot be sent.
        """
        return PooledRequest(self, _Target(endpoint, url, has_body=False), None, timeouts)

    def take(self, target: _Target, now: float) -> Connection | None:
        """Return an idle connection that may still be open, None if there is none."""
        idle = self._idle.get(target.address)
        while idle:
            connection = idle.pop()
            transport = connection.transport
            if transport is None or transport.is_closing():
                continue
            if now - connection.idle_since >= self._idle_seconds:
                transport.close()
                continue
            self._busy.add(connection)
            return connection
        return None

    def give_back(self, target: _Target, connection: Connection, now: float) -> None:
        """Return a connection to the pool; close it if it cannot be reused."""
        self._busy.discard(connection)
        transport = connection.transport
        if transport is None:
            return
        if connection.extra or not connection.kept or transport.is_closing():
            transport.abort()
            return
        connection.idle_since = now
        idle = self._idle.get(target.address)
        if idle is None:
            idle = self._idle[target.address] = deque()
        idle.append(connection)
        if self._reaper is None:
            loop = asyncio.get_running_loop()
            self._reaper = loop.call_later(self._idle_seconds, self._reap, loop)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections that were idle too long, before the server does."""
        oldest = loop.time() - self._idle_seconds
        for address, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since <= oldest or idle[0].transport is None):
                connection = idle.popleft()
                if connection.transport is not None:
                    connection.transport.close()
            if not idle:
                del self._idle[address]
        self._reaper = loop.call_later(1.0, self._reap, loop) if self._idle else None

    def limit(self, seconds: float) -> TimeoutGroup:
        """Return the group of requests that time out after ``seconds``."""
        group = self._limits.get(seconds)
        if group is None:
            if len(self._limits) >= _MOST_LIMITS:
                self._limits = {s: limit for s, limit in self._limits.items() if limit.used}
            group = self._limits[seconds] = TimeoutGroup(seconds, asyncio.get_running_loop())
        return group

    async def connect(self, target: _Target) -> Connection:
        """Open a connection.

        Raises:
            NotConnected: nobody listens, the name is unknown, or this machine is out of something.
        """
        try:
            connection = await self._connect(*target.address)
        except OSError as error:
            self._names.pop(target.address, None)
            raise NotConnected(error) from error
        self._busy.add(connection)
        return connection

    async def _connect_tcp(self, host: str, port: int) -> Connection:
        loop = asyncio.get_running_loop()
        sock = await start_connection(
            await self._addresses(host, port, loop), happy_eyeballs_delay=_EYEBALLS, loop=loop
        )
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        try:
            _, connection = await loop.create_connection(Connection, sock=sock)
        except BaseException:
            sock.close()
            raise
        return connection

    async def _addresses(self, host: str, port: int, loop: asyncio.AbstractEventLoop) -> list[Any]:
        cached = self._names.get((host, port))
        if cached is not None and cached[0] > loop.time():
            return cached[1]
        if self._resolver is None:
            self._resolver = Resolver(loop)
        addresses = await self._resolver.look_up(
            host, port, 0, socket.SOCK_STREAM, socket.IPPROTO_TCP, 0
        )
        self._names[host, port] = (loop.time() + NAME_SECONDS, addresses)
        return addresses

    async def close(self) -> None:
        """Close all connections."""
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        if self._resolver is not None:
            self._resolver.close()
            self._resolver = None
        for limit in self._limits.values():
            limit.close()
        self._limits.clear()
        for connection in (*self._busy, *(c for idle in self._idle.values() for c in idle)):
            if connection.transport is not None:
                connection.transport.abort()
        self._idle.clear()
        self._busy.clear()
        await asyncio.sleep(0)


class PooledRequest:
    """One request, from sending to returning its connection.

    Use ``async with``, or what needs no task: :meth:`PlainPool.reserve`, :meth:`start`,
    :meth:`response` and :meth:`end`.

    Raises:
        HttpError: the connection or the answer was bad.
        TimeoutError: ``timeouts.total`` was over; ConnectTimeout for ``connect``.
    """

    __slots__ = (
        "_body",
        "_connection",
        "_expiry",
        "_limit",
        "_loop",
        "_pool",
        "_target",
        "_timeouts",
        "idle",
    )

    def __init__(
        self, pool: PlainPool, target: _Target, body: bytes | None, timeouts: Timeouts
    ) -> None:
        self._pool = pool
        self._target = target
        self._body = body
        self._timeouts = timeouts
        self._connection: Connection | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._limit: TimeoutGroup | None = None
        self._loop = asyncio.get_running_loop()
        self.idle: float | None = None
        """Seconds for which its connection had been idle; None if it is new."""

    def start(self, body: bytes, on_end: Callable[[], None]) -> None:
        """Send it over its idle connection; ``on_end`` is called once it has ended."""
        connection = self._connection
        assert connection is not None
        connection.send(self._target.head, body)
        connection.whole, connection.on_end = True, on_end

    def cancel(self) -> None:
        """Abandon it; it ends in the next turn of the event loop."""
        self._loop.call_soon(self._abandon)

    def response(self) -> PlainResponse:
        """Return the response to a request that has ended; raise its error if it got none."""
        connection = self._connection
        assert connection is not None
        if not connection.headed and connection.error is not None:
            raise connection.error
        return PlainResponse(connection)

    async def __aenter__(self) -> PlainResponse:
        loop, total = self._loop, self._timeouts.total
        began = loop.time()
        connection = self.take_idle()
        CONNECTION_IDLE.set(self.idle)
        if connection is None:
            connection = await self._connected()
            if total is not None:  # it began earlier, so it is not the last of its group
                self._expiry = loop.call_at(began + total, connection.fail, TimeoutError())
            self._connection = connection
        try:
            connection.send(self._target.head, self._body)
            while not connection.headed:
                await wait_for_data(connection)
        except BaseException:
            self.end()
            raise
        return PlainResponse(connection)

    def take_idle(self) -> Connection | None:
        """Take an idle connection, if there is one; its time limit begins."""
        began = self._loop.time()
        self._connection = connection = self._pool.take(self._target, began)
        if connection is not None:
            self.idle = began - connection.idle_since
            if self._timeouts.total is not None:
                self._limit = self._pool.limit(self._timeouts.total)
                self._limit.begin(connection, began)
        return connection

    def _abandon(self) -> None:
        if self._connection is not None:
            self._connection.fail(HttpError("abandoned"))

    async def _connected(self) -> Connection:
        limits = self._timeouts
        bounds = [limit for limit in (limits.connect, limits.total) if limit is not None]
        try:
            async with asyncio.timeout(min(bounds) if bounds else None):
                return await self._pool.connect(self._target)
        except TimeoutError:
            if limits.connect is not None and limits.connect == min(bounds):
                raise ConnectTimeout from None
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Return the connection to the pool."""
        if self._limit is not None and self._connection is not None:
            self._limit.end(self._connection)
        if self._expiry is not None:
            self._expiry.cancel()
        if self._connection is not None:
            self._pool.give_back(self._target, self._connection, self._loop.time())
            self._connection = None
