"""Forwarding of client requests to endpoints."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Mapping

import msgspec
from aiohttp import web

from bagent.backend_kinds import FORWARDED_HEADERS
from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import failure_from_status, find_error
from bagent.backends.http.client import NETWORK_ERRORS, StreamTimeout, Transport, network_failure
from bagent.backends.http.rate_limit_headers import read_rate_limits
from bagent.backends.http.request import read_body
from bagent.backends.request import CallSettings, Request
from bagent.clocks import unix
from bagent.fleet.leases import Closed, EndpointLease, EndpointLeaser
from bagent.proxy.auth import CLIENT_NAME
from bagent.proxy.metering import ProxyRecord, UsageMeter
from bagent.proxy.translate import Response, TranslatingTransport, model_of
from bagent.text.json import decode_json
from bagent.types import Failure

OWN_KEY = "bagent-"
"""Prefix of a key that is no secret but the name of the client."""

SESSION_HEADERS = ("X-Session-Id", "X-Claude-Code-Session-Id", "X-Dynamo-Session-Id")
"""Headers that identify a conversation: of OpenCode and vLLM's clients, of Claude Code, and of
NVIDIA Dynamo's clients."""

MAX_SESSIONS = 65_536


def client_name(headers: Mapping[str, str]) -> str | None:
    """Return the client's name for its request, from a header or its key."""
    return _own_name(headers) or headers.get("X-Request-Id")


def session_name(headers: Mapping[str, str]) -> str | None:
    """Return the name that all requests of a conversation share, if there is one."""
    names = (headers[name] for name in SESSION_HEADERS if headers.get(name))
    return _own_name(headers) or next(names, None)


def _own_name(headers: Mapping[str, str]) -> str | None:
    name = headers.get("X-Bagent-Row")
    if name is None:
        key = headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = key or headers.get("x-api-key", "")
        name = key.removeprefix(OWN_KEY) if key.startswith(OWN_KEY) else None
    return name or None


def client_closed_response(request: web.Request) -> web.Response:
    """Abort the connection of a client that hung up, so that nothing is logged."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=499)


class SessionAffinity:
    """The endpoint that served each conversation last and has it cached; the oldest are dropped."""

    def __init__(self, size: int = MAX_SESSIONS) -> None:
        self._size = size
        self._endpoints: OrderedDict[str, str] = OrderedDict()

    def get(self, session: str | None) -> str | None:
        """Return the endpoint's name, if known."""
        return None if session is None else self._endpoints.get(session)

    def set(self, session: str | None, endpoint: str) -> None:
        """Record that the endpoint answered a request of the conversation."""
        if session is None:
            return
        self._endpoints[session] = endpoint
        self._endpoints.move_to_end(session)
        if len(self._endpoints) > self._size:
            self._endpoints.popitem(last=False)


MAX_ATTEMPTS = 4
ANSWER_HEADERS = ("Content-Type", "X-Request-Id", "Cache-Control", "Retry-After")
"""Headers of an answer that are forwarded; the others concern the connection to the endpoint."""

SSE = "text/event-stream"

RETRY_STATUS = frozenset({401, 403, 404, 429})
"""Statuses besides 5xx that are retried at another endpoint."""

ABSENT = frozenset({404, 501})
"""Statuses for a missing route or model, which another endpoint may have."""

REFUSED = ABSENT | {401, 403}
"""Statuses that count as the endpoint's failure only if another one serves the request."""

MAX_REFUSED_KEYS = 2
"""How many endpoints may refuse the key before it counts as the request's own failure."""

CORE_ROUTES = frozenset({"/chat/completions", "/completions"})
"""Routes that every engine has. To lack another route is no fault."""

CLIENT_CLOSED = Failure("client_closed", "the client hung up")
WEB_PAGE = Failure("bad_response", "a web page instead of an answer", passing=True)


_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ClientLeft(Exception):
    """The client hung up."""


class Forwarder:
    """Forwards requests to endpoints with room, and retries them at others.

    A conversation stays at the endpoint that served it last, unless that is much busier.

    Args:
        transport: connects to the endpoints.
        lessor: leases them.
        meter: records requests and attempts.
        timeouts: limits of one attempt.
        patience: seconds for which a request may wait for an endpoint with room.
    """

    def __init__(
        self,
        transport: Transport,
        lessor: EndpointLeaser,
        meter: UsageMeter,
        timeouts: Timeouts,
        patience: float,
    ) -> None:
        self._transport = TranslatingTransport(transport)
        self._lessor = lessor
        self._meter = meter
        self._timeouts = timeouts
        self._patience = patience
        self._affinity = SessionAffinity()
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> int:
        """How many requests are in progress."""
        return self._busy

    async def wait_idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()

    async def forward(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """Return an endpoint's answer to ``body`` at ``path``."""
        from_token = request.get(CLIENT_NAME)
        name = from_token or client_name(request.headers) or path
        session = from_token or session_name(request.headers)
        record = ProxyRecord(name, path, unix())
        self._meter.assign_row(record)
        self._busy += 1
        self._idle.clear()
        failure = Failure("overloaded", "no endpoint has room", passing=True, status=503)
        avoid: frozenset[str] = frozenset()
        refused: list[tuple[EndpointLease, Failure]] = []
        moved = False  # only once: a request that is slow everywhere must end somewhere
        try:
            while record.attempts < MAX_ATTEMPTS:
                try:
                    async with asyncio.timeout(self._patience):
                        lease = await self._lessor.acquire(avoid, self._affinity.get(session))
                except TimeoutError:
                    break
                except Closed:
                    failure = Failure("overloaded", "the proxy ends", passing=True, status=503)
                    break
                lease.uncancellable = moved
                record.start_attempt(lease.state.name)
                result = await self._send(request, path, body, lease, record)
                if not isinstance(result, Failure):
                    if record.failure is None:
                        self._affinity.set(session, record.endpoint)
                        for earlier, refusal in refused if path in CORE_ROUTES else ():
                            self._lessor.judge(earlier, refusal, _as_request(path, body))
                    return result
                failure, avoid = result, avoid | {lease.state.name}
                moved |= bool(lease.cancel_reason)
                if result.status in REFUSED:
                    refused.append((lease, result))
                    alike = sum(1 for _, refusal in refused if refusal.status == result.status)
                    own = result.status not in ABSENT and alike >= MAX_REFUSED_KEYS
                    if own or not self._lessor.has_alternative(avoid):
                        break
            record.failure = failure
            return _refusal(failure, path, record.refusal)
        except (ClientLeft, asyncio.CancelledError) as error:
            self._on_abort(record, session, error)
            if isinstance(error, ClientLeft):
                return client_closed_response(request)
            raise
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()
            self._meter.request(record)

    def _on_abort(self, record: ProxyRecord, session: str | None, error: BaseException) -> None:
        """Record that the client or the proxy ended a request before its handler did."""
        if record.complete:  # clients may close once they have read the end
            self._affinity.set(session, record.endpoint)
        elif self._lessor.closed and not isinstance(error, ClientLeft):
            message = "the proxy ended before the answer"
            record.failure = Failure("overloaded", message, passing=True)
        else:
            record.failure = CLIENT_CLOSED

    def _update_limits(self, lease: EndpointLease, headers: Mapping[str, str], status: int) -> None:
        """Update the account's limits from the headers of a hosted endpoint."""
        if not lease.state.endpoint.own:
            limits = read_rate_limits(headers, time.time())
            if limits is not None:
                self._lessor.update_limits(lease, limits, accepted=status == 200)

    async def _send(
        self,
        request: web.Request,
        path: str,
        body: bytes,
        lease: EndpointLease,
        record: ProxyRecord,
    ) -> web.StreamResponse | Failure:
        """Send one attempt; a returned failure may be retried, as nothing reached the client."""
        endpoint = _with_client_headers(lease.state.endpoint, request.headers)
        lease.task = asyncio.current_task()
        sent, leased = unix(), True
        failure: Failure | None = None
        try:
            async with self._transport.post(endpoint, path, body, self._timeouts) as response:
                record.status = response.status
                self._update_limits(lease, response.headers, response.status)
                if response.status in RETRY_STATUS or response.status >= 500:
                    failure, record.refusal = await _read_error(response, endpoint)
                    return failure
                if response.content_type == "text/html":
                    failure = WEB_PAGE
                    return failure
                headers = _answer_headers(response.headers)
                answer = web.StreamResponse(status=response.status, headers=headers)
                content = None
                if response.content_type != SSE:
                    content = await _read_answer(response, endpoint, record)
                    failure = _malformed(path, response, content)
                    if failure is not None:
                        record.tail = b""
                        return failure
                else:
                    await self._stream(request, response, answer, lease, record)
            self._lessor.on_success(lease)
            leased = False
            record.read_usage()
        except (*NETWORK_ERRORS, asyncio.CancelledError) as error:
            failure = _network_failure(error, lease, self._timeouts)
            if failure is None:
                raise
            if lease.streaming:
                # The client has a part of the answer, so break its connection off too.
                record.failure = failure
                if request.transport is not None:
                    request.transport.abort()
                return answer
            return msgspec.structs.replace(failure, status=None)
        finally:
            if leased and record.complete:  # only the end of the connection was waited for
                self._lessor.on_success(lease)
                record.read_usage()
            elif leased:
                excused = lease.cancel_reason or (failure and failure.status in REFUSED)
                self._lessor.on_failure(
                    lease, None if excused else failure, _as_request(path, body)
                )
                failure = failure or CLIENT_CLOSED
            self._meter.attempt(record, sent, failure or record.failure)
        return await _finish(request, answer, content, record)

    async def _stream(
        self,
        request: web.Request,
        response: Response,
        answer: web.StreamResponse,
        lease: EndpointLease,
        record: ProxyRecord,
    ) -> None:
        """Forward a stream; the endpoint's timeouts pause while the client reads."""
        async with StreamTimeout(self._timeouts.first_token, self._timeouts.idle) as timeout:
            async for chunk in response.content.iter_any():
                timeout.disable()
                record.add_chunk(chunk)
                first = not lease.streaming
                self._lessor.on_chunk(lease)
                if first:
                    await _write(answer.prepare(request))
                await _write(answer.write(chunk))
                timeout.on_chunk()


async def _write(work: Awaitable[object]) -> None:
    """Await a write to the client; raise `ClientLeft` if it fails."""
    try:
        await work
    except (ConnectionError, OSError) as error:
        raise ClientLeft from error


async def _finish(
    request: web.Request, answer: web.StreamResponse, content: bytes | None, record: ProxyRecord
) -> web.StreamResponse:
    """Send the end of an answer, or all of its ``content`` where it was no stream."""
    if content is not None:
        answer.content_length = len(content)
    if not answer.prepared:
        await _write(answer.prepare(request))
    if content is not None:
        await _write(answer.write(content))
    record.complete = True
    await _write(answer.write_eof())
    return answer


def _network_failure(
    error: BaseException, lease: EndpointLease, timeouts: Timeouts
) -> Failure | None:
    """Return why an attempt failed; None if it was cancelled because its client left."""
    if not isinstance(error, asyncio.CancelledError):
        return network_failure(error, lease.state.endpoint, timeouts)
    task = lease.task
    if not lease.cancel_reason or task is None or task.uncancel() > 0:
        return None
    return Failure("connect", lease.cancel_reason, passing=True)


async def _read_answer(response: Response, endpoint: Endpoint, record: ProxyRecord) -> bytes:
    """Return the body of an answer that is no stream, without the endpoint's keys."""
    if response.status >= 400:
        record.failure, raw = await _read_error(response, endpoint)
    else:
        raw = await read_body(response)
    record.tail = raw
    return raw


async def _read_error(response: Response, endpoint: Endpoint) -> tuple[Failure, bytes]:
    """Return the failure and body of an error response, without the endpoint's keys."""
    text = (await read_body(response)).decode("utf-8", "replace")
    failure = failure_from_status(response.status, text, response.headers)
    failure = msgspec.structs.replace(failure, message=endpoint.without_secrets(failure.message))
    return failure, endpoint.without_secrets(text).encode()


def _malformed(path: str, response: Response, raw: bytes) -> Failure | None:
    """Return the failure if the body of an HTTP 200 cannot be an answer of the route."""
    core = path in CORE_ROUTES
    if response.status != 200 or not (core or response.content_type == "application/json"):
        return None
    try:
        body = _decode_object(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        try:
            body = decode_json(raw)
        except ValueError:
            return Failure("bad_response", "HTTP 200 with a body that is no JSON", passing=True)
    if not isinstance(body, dict) or (core and not ({"choices", "error"} & body.keys())):
        return Failure("bad_response", "HTTP 200 with JSON that is no answer", passing=True)
    return None


def _as_request(path: str, body: bytes) -> Request:
    """Return the route and model of a client's request, for checks to imitate."""
    settings = CallSettings(model=model_of(body), sampling={}, extra={})
    return Request(settings, b"", path=path)


def _with_client_headers(endpoint: Endpoint, headers: Mapping[str, str]) -> Endpoint:
    """Return a hosted endpoint with the client's headers that its API needs."""
    extra = {name: headers[name] for name in FORWARDED_HEADERS if name in headers}
    if endpoint.own or not extra:
        return endpoint
    return msgspec.structs.replace(endpoint, headers={**endpoint.headers, **extra})


def _answer_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in ANSWER_HEADERS if name in headers}


def _explains(refusal: bytes) -> bool:
    """Return whether the body of a refusal contains an error message of its own."""
    try:
        error = find_error(decode_json(refusal))
    except ValueError:
        return False
    return error is not None and error[0].strip().lower() not in ("", "not found")


def _refusal(failure: Failure, path: str, refusal: bytes) -> web.Response:
    """Return the failure in OpenAI's form; a missing route or model as the engine reported it.

    Args:
        failure: of the last attempt.
        path: the route.
        refusal: the body of the last refusal, if any.
    """
    status = failure.status or 502
    headers = {}
    message = failure.message
    if status in ABSENT:
        if _explains(refusal):
            return web.Response(status=status, body=refusal, content_type="application/json")
        message = f"no endpoint of this fleet serves /v1{path} ({message})"
    if failure.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(failure.retry_after)))
    error = {"message": message, "type": failure.kind, "code": status, "param": None}
    body = msgspec.json.encode({"error": error})
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")
