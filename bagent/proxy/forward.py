"""One client's request on its way to an endpoint, and its answer on the way back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import from_status
from bagent.backends.rate_headers import read_rate_limits
from bagent.backends.transport import NETWORK_ERRORS, Transport, network_failure
from bagent.clocks import unix
from bagent.fleet.leasing import Lease, Lessor
from bagent.proxy.clients import Homes, client_name, session_name
from bagent.proxy.meter import Meter, Record
from bagent.types import Failure

if TYPE_CHECKING:
    import aiohttp

    from bagent.backends.http_connection import PlainResponse

MOST_TRIES = 4
ANSWER_HEADERS = ("Content-Type", "X-Request-Id", "Cache-Control", "Retry-After")
"""Headers of an answer that are passed on; the others speak of the connection behind."""

SSE = "text/event-stream"

ELSEWHERE = frozenset({401, 403, 404, 429})
"""Answers, beside 5xx, that say more of the endpoint than of the request: another one is asked."""


ABSENT = frozenset({404, 501})
"""Answers that speak of a route or a model: of the endpoint only if another one has it."""

CORE_ROUTES = frozenset({"/chat/completions", "/completions"})
"""Routes that every engine has. One that lacks another route is none the worse for it."""

PASSED_ON = ("anthropic-beta", "anthropic-version")
"""Headers of a client that a hosted API needs to understand its request."""


class ClientLeft(Exception):
    """Whoever asked has hung up."""


class Forwarder:
    """Sends requests on; endpoints that are dead or full are passed over.

    A conversation goes on at the endpoint that served it last, unless that is much busier.

    Args:
        timeouts: limits of one try.
        patience: seconds that a request may wait for an endpoint with room.
    """

    def __init__(
        self,
        transport: Transport,
        lessor: Lessor,
        meter: Meter,
        timeouts: Timeouts,
        patience: float,
    ) -> None:
        self._transport = transport
        self._lessor = lessor
        self._meter = meter
        self._timeouts = timeouts
        self._patience = patience
        self._homes = Homes()

    async def forward(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """Answer ``request`` with what an endpoint says to ``body`` at ``path``."""
        name = client_name(request.headers) or path
        session = session_name(request.headers)
        record = Record(name, path, unix())
        self._meter.arrived(record)
        failure = Failure("overloaded", "no endpoint has room", passing=True, status=503)
        avoid: frozenset[str] = frozenset()
        without: list[tuple[Lease, Failure]] = []
        try:
            while record.tries < MOST_TRIES:
                try:
                    async with asyncio.timeout(self._patience):
                        lease = await self._lessor.take(avoid, self._homes.of(session))
                except TimeoutError:
                    break
                record.tries += 1
                record.endpoint = lease.state.name
                result = await self._try(request, path, body, lease, record)
                if not isinstance(result, Failure):
                    if record.failure is None:
                        self._homes.served(session, record.endpoint)
                        for old, told in without if path in CORE_ROUTES else ():
                            self._lessor.judge(old, told)
                    return result
                failure, avoid = result, avoid | {lease.state.name}
                if result.status in ABSENT:
                    without.append((lease, result))
                    if not self._lessor.another(avoid):
                        break
            record.failure = failure
            return _refusal(failure)
        except (ClientLeft, asyncio.CancelledError):
            record.failure = Failure("internal", "the client hung up")
            raise
        finally:
            self._meter.request(record)

    def _note_limits(self, lease: Lease, headers: Mapping[str, str]) -> None:
        """A provider's answer may tell the limits of the account."""
        if not lease.state.endpoint.own:
            limits = read_rate_limits(headers, time.time())
            if limits is not None:
                self._lessor.told(lease, limits)

    async def _try(
        self, request: web.Request, path: str, body: bytes, lease: Lease, record: Record
    ) -> web.StreamResponse | Failure:
        """One try; a failure may be tried elsewhere: no byte of it has gone to the client."""
        endpoint = _as_asked(lease.state.endpoint, request.headers)
        sent = unix()
        answer: web.StreamResponse | None = None
        told: Failure | None = None
        try:
            async with self._transport.post(endpoint, path, body, self._timeouts) as found:
                record.status = found.status
                self._note_limits(lease, found.headers)
                if found.status in ELSEWHERE or found.status >= 500:
                    raw = await found.read()
                    told = _refused(found.status, raw, found.headers, endpoint)
                    return told
                if found.content_type == "text/html":
                    told = Failure("bad_response", "a web page instead of an answer", passing=True)
                    return told
                answer = web.StreamResponse(status=found.status, headers=_passed_on(found.headers))
                if found.content_type != SSE:
                    raw = await _whole(found, endpoint, record)
                    answer.content_length = len(raw)
                    await _send(answer.prepare(request))
                    await _send(answer.write(raw))
                else:
                    await _send(answer.prepare(request))
                    async for piece in found.content.iter_any():
                        record.take(piece)
                        await _send(answer.write(piece))
                await _send(answer.write_eof())
        except NETWORK_ERRORS as error:
            told = network_failure(error, endpoint, self._timeouts)
            if answer is not None and answer.prepared:
                # The answer has begun; an honest end is a broken one.
                record.failure = told
                if request.transport is not None:
                    request.transport.abort()
                return answer
            return msgspec.structs.replace(told, status=None)
        except BaseException:
            if told is None:  # whatever it was, the slot is free again
                self._lessor.failed(lease, None)
            raise
        else:
            self._lessor.served(lease)
            return answer
        finally:
            if told is not None:
                self._lessor.failed(lease, None if told.status in ABSENT else told)
            self._meter.attempt(record, sent, record.status, told.message if told else None)


async def _send(work: object) -> None:
    """Send to the client; its hanging up must not look like a fault of the endpoint."""
    try:
        await work  # type: ignore[misc]
    except (ConnectionError, OSError) as error:
        raise ClientLeft from error


async def _whole(
    found: aiohttp.ClientResponse | PlainResponse, endpoint: Endpoint, record: Record
) -> bytes:
    """The body of an answer that is no stream, noted, and without the endpoint's keys."""
    raw = await found.read()
    if found.status >= 400:
        record.failure = _refused(found.status, raw, found.headers, endpoint)
        raw = endpoint.without_secrets(raw.decode("utf-8", "replace")).encode()
    record.tail = raw
    return raw


def _refused(status: int, raw: bytes, headers: Mapping[str, str], endpoint: Endpoint) -> Failure:
    """What a refusal says of its request, without the keys of the endpoint."""
    found = from_status(status, raw.decode("utf-8", "replace"), headers)
    return msgspec.structs.replace(found, message=endpoint.without_secrets(found.message))


def _as_asked(endpoint: Endpoint, headers: Mapping[str, str]) -> Endpoint:
    """A hosted endpoint with what the client's headers say of its request."""
    told = {name: headers[name] for name in PASSED_ON if name in headers}
    if endpoint.own or not told:
        return endpoint
    return msgspec.structs.replace(endpoint, headers={**endpoint.headers, **told})


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in ANSWER_HEADERS if name in headers}


def _refusal(failure: Failure) -> web.Response:
    """The failure in OpenAI's form."""
    status = failure.status or 502
    headers = {}
    if failure.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(failure.retry_after)))
    error = {"message": failure.message, "type": failure.kind, "code": status, "param": None}
    body = msgspec.json.encode({"error": error})
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")
