"""HTTP client with connection pools, timeouts and failures."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.connection import PlainResponse
from bagent.backends.http.errors import (
    BadAddress,
    CertificateRefused,
    ConnectTimeout,
    EndlessBody,
    HttpError,
    NotConnected,
    NoTls,
    PayloadError,
    ProxyRefused,
    ServerClosed,
    SwitchedProtocol,
    os_error_text,
)
from bagent.backends.http.pool import CONNECTION_IDLE, Connect, PlainPool
from bagent.backends.http.proxies import without_userinfo
from bagent.types import Failure

if TYPE_CHECKING:
    import aiohttp

    from bagent.backends.http.aiohttp_client import AiohttpClient

IDLE_SECONDS = 4.0
"""Longer idle connections are not reused: uvicorn, and so vLLM, closes them after 5.0 s."""

_FULL = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
_CUT = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


def connection_idle() -> float | None:
    """Return how long the connection of this task's last request had been idle, None if new."""
    return CONNECTION_IDLE.get()


class Transport:
    """The connection pools of a run; for one event loop.

    Args:
        connect: opens the connections to plain HTTP endpoints; None: over TCP.
    """

    def __init__(self, connect: Connect | None = None) -> None:
        self._plain = PlainPool(IDLE_SECONDS, connect)
        self.reserve = self._plain.reserve
        """Returns a POST that needs no task: :meth:`bagent.backends.http.pool.PlainPool.reserve`.
        """
        self._other: AiohttpClient | None = None
        self._contexts: dict[str, ssl.SSLContext] = {}

    def _open(self) -> AiohttpClient:
        if self._other is None:
            from bagent.backends.http.aiohttp_client import AiohttpClient

            self._other = AiohttpClient(IDLE_SECONDS)
        return self._other

    def _trusted(self, ca_file: str | None) -> ssl.SSLContext | bool:
        if ca_file is None:
            return True
        if ca_file not in self._contexts:
            self._contexts[ca_file] = trusting_context(ca_file)
        return self._contexts[ca_file]

    def post(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        timeouts: Timeouts,
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse | PlainResponse]:
        """POST ``body`` (JSON) to ``path`` below the endpoint's base address.

        Use with ``async with``, which sends it and returns the connection to the pool.
        """
        if PlainPool.serves(endpoint, endpoint.url):
            return self._plain.post(endpoint, path, body, timeouts)
        trusted = self._trusted(endpoint.ca_file)
        CONNECTION_IDLE.set(0.0)
        return self._open().post(endpoint, path, body, timeouts, trusted=trusted)

    async def get(
        self, endpoint: Endpoint, url: str, seconds: float, connect: float | None = None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """GET an absolute ``url``; return status, body and headers.

        ``seconds`` bounds the whole request, ``connect`` the connection.
        """
        timeouts = Timeouts(connect=connect, total=seconds)
        if not PlainPool.serves(endpoint, url):
            trusted = self._trusted(endpoint.ca_file)
            CONNECTION_IDLE.set(0.0)
            return await self._open().get(endpoint, url, timeouts, trusted=trusted)
        try:
            return await self._plain_get(endpoint, url, timeouts)
        except NETWORK_ERRORS as error:
            if connection_idle() is None or not is_stale(error):
                raise
        return await self._plain_get(endpoint, url, timeouts)

    async def _plain_get(
        self, endpoint: Endpoint, url: str, timeouts: Timeouts
    ) -> tuple[int, bytes, Mapping[str, str]]:
        async with self._plain.get(endpoint, url, timeouts) as response:
            return response.status, await response.read(), response.headers

    async def close(self) -> None:
        """Close all connections."""
        await self._plain.close()
        if self._other is not None:
            await self._other.close()
            self._other = None


class BadCertificateFile(OSError):
    """The file of trusted certificates cannot be read."""


def trusting_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates of a file; None: the system's.

    Raises:
        BadCertificateFile: it cannot be read, or holds no certificates.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        why = "no certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise BadCertificateFile(f"ca_file {ca_file}: {why}") from None


class StreamStalled(TimeoutError):
    """A streamed answer did not begin or continue within its limit."""


class StreamTimeout:
    """Limits of a streamed answer: until its first token, then between two chunks.

    An asynchronous context around the request. A chunk only moves the deadline: the timer is not
    reset for each one, it checks the deadline when it fires.

    Raises:
        StreamStalled: one of the limits was exceeded; its message says which.
    """

    def __init__(self, first_token: float | None, idle: float | None) -> None:
        self._first = first_token
        self._idle = idle
        self._words = f"sent no first token within {first_token or 0:g} s"
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._over = False

    def on_chunk(self) -> None:
        """A piece of the answer came."""
        self._words = f"sent nothing more for {self._idle or 0:g} s"
        self._wait(self._idle)

    def finish_within(self, seconds: float) -> None:
        """The answer is whole; only its end is waited for."""
        self._wait(seconds if self._idle is None else min(seconds, self._idle))

    def disable(self) -> None:
        """The answer is not streamed: no limit."""
        self._wait(None)

    def _wait(self, seconds: float | None) -> None:
        if seconds is None:
            self._due = None
            return
        self._due = due = self._loop.time() + seconds
        if self._timer is None or due < self._timer_due:
            self._set_timer(due)

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_at(due, self._check_due)

    def _check_due(self) -> None:
        """Check the deadline, which may have moved since the timer was set."""
        self._timer = None
        due = self._due
        if due is None:
            return
        if self._loop.time() < due:
            self._set_timer(due)
            return
        self._over = True
        self._task.cancel()

    async def __aenter__(self) -> StreamTimeout:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._wait(self._first)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
        # As in asyncio.timeout: a cancellation from elsewhere propagates.
        own = self._over and self._task.uncancel() <= self._cancelling
        if own and kind is asyncio.CancelledError:
            raise StreamStalled(self._words) from None


NETWORK_ERRORS = (HttpError, asyncio.TimeoutError, OSError, ValueError)
"""What a request may raise because of network or server. ValueError: it cannot be written, such as
a key with a line break."""

NOT_CONNECTED = (NotConnected, ConnectTimeout, ProxyRefused)
"""Those after which the server cannot have seen the request."""


def is_stale(error: BaseException) -> bool:
    """Return whether the server closed the connection before it sent a byte."""
    return isinstance(error, ServerClosed | ConnectionError) or (
        isinstance(error, OSError) and error.errno in _CUT
    )


def network_failure(error: BaseException, endpoint: Endpoint, timeouts: Timeouts) -> Failure:
    """Convert an exception of :data:`NETWORK_ERRORS`."""
    where = endpoint.name + proxy_note(endpoint)
    if isinstance(error, ConnectTimeout):
        limit = f" within {timeouts.connect:g} s" if timeouts.connect else ""
        return Failure("connect", f"no connection to {where}{limit}", True)
    if isinstance(error, StreamStalled):
        return Failure("timeout", f"{where} {error}", True)
    if isinstance(error, asyncio.TimeoutError):
        limit = f" within {timeouts.total:g} s" if timeouts.total else ""
        return Failure("timeout", f"no whole answer from {where}{limit}", True)
    if isinstance(error, ProxyRefused):
        message = f"the proxy refused to reach {where}: HTTP {error.status}"
        lasting = error.status in (401, 403, 407)
        return Failure("auth" if lasting else "connect", message, not lasting)
    if isinstance(error, OSError) and (failure := _system_failure(error, where)):
        return failure
    if isinstance(error, EndlessBody):
        return Failure("bad_response", f"{where} sent {error}", True)
    if isinstance(error, SwitchedProtocol):
        message = f"{where} answered HTTP 101 (Switching Protocols), which was not asked for"
        return Failure("bad_response", message, True)
    if isinstance(error, PayloadError):
        return Failure("bad_response", f"the answer of {where} broke off: {_cause(error)}", True)
    if isinstance(error, BadAddress):
        return Failure("rejected", f"not an address to send to: {without_userinfo(endpoint.url)}")
    if is_stale(error):
        return Failure("connect", f"{where} closed the connection without an answer", True)
    if isinstance(error, ValueError):
        return Failure("rejected", f"no request to {where} can be made: {_cause(error)}")
    return Failure("bad_response", f"no HTTP from {where}: {_cause(error)}", True)


def proxy_note(endpoint: Endpoint) -> str:
    """Return a phrase that names the endpoint's proxy, empty if it has none."""
    return f" through the proxy {without_userinfo(endpoint.proxy)}" if endpoint.proxy else ""


def _system_failure(error: OSError, where: str) -> Failure | None:
    """Convert an error below HTTP; None if it says nothing specific."""
    if isinstance(error, BadCertificateFile):
        return Failure("connect", f"cannot reach {where}: {error}")
    if isinstance(error, CertificateRefused):
        hint = "give the site's certificates as backend: {ca_file: ...} or SSL_CERT_FILE"
        return Failure("connect", f"{where}: certificate not trusted: {_cause(error)} ({hint})")
    if error.errno in _FULL:
        message = f"this machine is out of file handles, ports or memory: {_cause(error)}"
        return Failure("overloaded", message, True, busy=True)
    if isinstance(error, NoTls):
        hint = "if it speaks plain http, write http:// or, for a provider, openai+http://"
        return Failure("connect", f"no TLS with {where}: {_cause(error)} ({hint})")
    if isinstance(error, NotConnected):
        return Failure("connect", f"cannot connect to {where}: {_cause(error)}", True)
    if is_stale(error):
        return None
    return Failure("connect", f"the connection to {where} broke: {_cause(error)}", True)


def _cause(error: BaseException) -> str:
    """Return the message of an error's cause, without addresses, which may hold secrets."""
    if isinstance(error, CertificateRefused):
        return error.message
    inner: BaseException = getattr(error, "os_error", None) or error.__cause__ or error
    if isinstance(inner, OSError):
        return os_error_text(inner) or type(inner).__name__
    return str(inner) or type(inner).__name__
