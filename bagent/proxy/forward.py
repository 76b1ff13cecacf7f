"""One client's request on its way to an endpoint, and its answer on the way back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec
from aiohttp import web

from bagent.backends.base import Timeouts
from bagent.backends.failures import from_status
from bagent.backends.transport import NETWORK_ERRORS, Transport, network_failure
from bagent.fleet.leasing import Lease, Lessor
from bagent.proxy.meter import TAIL_BYTES, Meter, Record
from bagent.types import Failure

MOST_TRIES = 4
ANSWER_HEADERS = ("Content-Type", "X-Request-Id", "Cache-Control", "Retry-After")
"""Headers of an answer that are passed on; the others speak of the connection behind."""

SSE = "text/event-stream"

ELSEWHERE = frozenset({401, 403, 404, 429})
"""Answers, beside 5xx, that say more of the endpoint than of the request: another one is asked."""


OWN_KEY = "bagent-"
"""A key that begins so is no secret: what follows is the name of who asks."""


def client_name(headers: Mapping[str, str]) -> str | None:
    """What a client calls its request: by a header, or by the key that it was given."""
    name = headers.get("X-Bagent-Row")
    if name is None:
        key = headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = key or headers.get("x-api-key", "")
        name = key.removeprefix(OWN_KEY) if key.startswith(OWN_KEY) else None
    return name or headers.get("X-Request-Id")


class ClientLeft(Exception):
    """Whoever asked has hung up."""


class Forwarder:
    """Sends requests on; endpoints that are dead or full are passed over.

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

    async def forward(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """Answer ``request`` with what an endpoint says to ``body`` at ``path``."""
        name = client_name(request.headers) or path
        record = Record(name, path, time.time())
        failure = Failure("overloaded", "no endpoint has room", passing=True, status=503)
        avoid: frozenset[str] = frozenset()
        try:
            while record.tries < MOST_TRIES:
                try:
                    async with asyncio.timeout(self._patience):
                        lease = await self._lessor.take(avoid)
                except TimeoutError:
                    break
                record.tries += 1
                record.endpoint = lease.state.name
                result = await self._try(request, path, body, lease, record)
                if not isinstance(result, Failure):
                    return result
                failure, avoid = result, avoid | {lease.state.name}
            record.failure = failure
            return _refusal(failure)
        except (ClientLeft, asyncio.CancelledError):
            record.failure = Failure("internal", "the client hung up")
            raise
        finally:
            self._meter.request(record)

    async def _try(
        self, request: web.Request, path: str, body: bytes, lease: Lease, record: Record
    ) -> web.StreamResponse | Failure:
        """One try; a failure may be tried elsewhere: no byte of it has gone to the client."""
        endpoint = lease.state.endpoint
        sent = time.time()
        answer: web.StreamResponse | None = None
        told: Failure | None = None
        try:
            async with self._transport.post(endpoint, path, body, self._timeouts) as found:
                record.status = found.status
                if found.status in ELSEWHERE or found.status >= 500:
                    raw = await found.read()
                    told = from_status(found.status, raw.decode("utf-8", "replace"), found.headers)
                    return told
                if found.content_type == "text/html":
                    told = Failure("bad_response", "a web page instead of an answer", passing=True)
                    return told
                if found.status >= 400:
                    record.failure = Failure("rejected", f"HTTP {found.status}")
                answer = web.StreamResponse(status=found.status, headers=_passed_on(found.headers))
                if found.content_type != SSE:
                    raw = await found.read()
                    record.tail = raw
                    answer.content_length = len(raw)
                    await _send(answer.prepare(request))
                    await _send(answer.write(raw))
                else:
                    await _send(answer.prepare(request))
                    async for piece in found.content.iter_any():
                        if record.first_byte is None:
                            record.first_byte = time.time()
                        record.tail = (record.tail + piece)[-TAIL_BYTES:]
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
        except (ClientLeft, asyncio.CancelledError):
            self._lessor.failed(lease, None)
            raise
        finally:
            if told is not None:
                self._lessor.failed(lease, told)
            self._meter.attempt(record, sent, record.status, told.message if told else None)
        self._lessor.served(lease)
        return answer


async def _send(work: object) -> None:
    """Send to the client; its hanging up must not look like a fault of the endpoint."""
    try:
        await work  # type: ignore[misc]
    except (ConnectionError, OSError) as error:
        raise ClientLeft from error


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in ANSWER_HEADERS if name in headers}


def _refusal(failure: Failure) -> web.Response:
    """The failure in OpenAI's form."""
    status = failure.status or 502
    headers = {}
    if failure.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(failure.retry_after)))
    error = {"message": failure.message, "type": failure.kind, "code": status, "param": None}
    body = msgspec.json.encode({"error": error})
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")
