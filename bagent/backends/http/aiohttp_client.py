"""aiohttp client for TLS, proxies and addresses with a password.

The pool is unbounded, because the fleet bounds what is in flight. Idle connections are closed
before servers close them: vLLM does after 5.0 s.
"""

from __future__ import annotations

import io
import itertools
import math
import ssl
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import aiohttp

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http import errors
from bagent.backends.http.connection import limit_body
from bagent.backends.http.pool import CONNECTION_IDLE

READ_BUFFER = 1 << 20
_LOOKED_AT = 8
"""Idle connections whose age is known."""

LARGE_BODY = 1 << 20
"""Bytes from which aiohttp wants a file instead of bytes."""


class _Connector(aiohttp.TCPConnector):
    """Records in :data:`CONNECTION_IDLE` whether a request reused a connection.

    A request that failed on a reused connection may be resent at no cost. aiohttp's trace hooks
    would report it too, but cost a tenth of a request.
    """

    async def _create_connection(self, req: Any, traces: Any, limits: aiohttp.ClientTimeout) -> Any:
        CONNECTION_IDLE.set(None)
        return await super()._create_connection(req, traces, limits)

    async def _get(self, key: Any, traces: Any) -> Any:
        waiting = self._conns.get(key, ())
        before, first = len(waiting), list(itertools.islice(waiting, _LOOKED_AT))
        connection = await super()._get(key, traces)
        taken = before - len(self._conns.get(key, ()))  # the last one was usable
        if connection is not None and 0 < taken <= len(first):
            CONNECTION_IDLE.set(time.monotonic() - first[taken - 1][1])
        return connection


class AiohttpClient:
    """A pool of aiohttp connections that are kept for ``idle_seconds``."""

    def __init__(self, idle_seconds: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=idle_seconds, ttl_dns_cache=300),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BUFFER,
            auto_decompress=True,
            headers={"User-Agent": "bagent"},
        )
        self._timeouts: dict[Timeouts, aiohttp.ClientTimeout] = {}

    def _limits(self, timeouts: Timeouts) -> aiohttp.ClientTimeout:
        timeout = self._timeouts.get(timeouts)
        if timeout is None:
            if len(self._timeouts) >= 64:
                self._timeouts.clear()
            timeout = aiohttp.ClientTimeout(total=timeouts.total, connect=timeouts.connect)
            self._timeouts[timeouts] = timeout
        return timeout

    def post(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        timeouts: Timeouts,
        *,
        trusted: ssl.SSLContext | bool,
    ) -> TranslatedRequest:
        """POST ``body`` (JSON) below the endpoint's address; use with ``async with``."""
        data: aiohttp.Payload
        if len(body) <= LARGE_BODY:
            data = aiohttp.BytesPayload(body, content_type="application/json")
        else:
            data = aiohttp.BytesIOPayload(io.BytesIO(body), content_type="application/json")
        return TranslatedRequest(
            self._session.post(
                endpoint.url + path,
                data=data,
                headers=endpoint.headers,
                params=endpoint.query or None,
                proxy=endpoint.proxy,
                ssl=trusted,
                timeout=self._limits(timeouts),
                allow_redirects=False,
            )
        )

    async def get(
        self, endpoint: Endpoint, url: str, timeouts: Timeouts, *, trusted: ssl.SSLContext | bool
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """GET an absolute ``url``; return status, body and headers."""
        request = self._session.get(
            url,
            headers=endpoint.headers,
            params=endpoint.query or None,
            proxy=endpoint.proxy,
            ssl=trusted,
            timeout=aiohttp.ClientTimeout(
                # aiohttp rounds limits above 5 s up, which would make the two equal.
                total=timeouts.total,
                connect=timeouts.connect,
                ceil_threshold=math.inf,
            ),
            allow_redirects=False,
        )
        async with TranslatedRequest(request) as response:
            pieces = [piece async for piece in limit_body(response.content.iter_any())]
            return response.status, b"".join(pieces), response.headers

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


class TranslatedRequest:
    """An aiohttp request that raises the errors of :mod:`bagent.backends.http.errors`."""

    __slots__ = ("_request",)

    def __init__(self, request: Any) -> None:
        self._request = request

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._request.__aenter__()
        except aiohttp.ClientError as error:
            raise translate_error(error) from error.__cause__
        return response

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._request.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError):
            raise translate_error(error) from error.__cause__


def translate_error(error: aiohttp.ClientError) -> Exception:
    """Return the error that stands for one of aiohttp's."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return errors.ConnectTimeout()
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        refused = error.certificate_error
        return errors.CertificateRefused(str(getattr(refused, "verify_message", "") or refused))
    if isinstance(error, aiohttp.ClientConnectorError):
        kind = errors.NotConnected
        if isinstance(error, aiohttp.ClientConnectorSSLError):
            kind = errors.NoTls
        return kind(error.os_error)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return errors.ServerClosed()
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return errors.ProxyRefused(error.status)
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return errors.BadAddress(str(error))
    if isinstance(error, OSError):  # an error below HTTP, with its own message
        return error
    if isinstance(error, aiohttp.ClientResponseError):
        return errors.HttpError(" ".join(error.message.split()))
    inner = error.__cause__ or error
    message = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    if isinstance(error, aiohttp.ClientPayloadError):
        return errors.PayloadError(message)
    return errors.HttpError(message)
