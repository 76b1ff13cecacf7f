"""One client's request on its way to an endpoint, and its answer on the way back."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import NETWORK_ERRORS, StreamTimeout, Transport, network_failure
from bagent.backends.http.rate_limit_headers import read_rate_limits
from bagent.backends.http.request import read_body
from bagent.backends.openai.errors import failure_from_status, find_error
from bagent.backends.request import CallSettings, Request
from bagent.clocks import unix
from bagent.fleet.leases import Closed, EndpointLease, EndpointLeaser
from bagent.proxy.auth import CLIENT_NAME
from bagent.proxy.metering import ProxyRecord, UsageMeter
from bagent.text.json import decode_json
from bagent.types import Failure

if TYPE_CHECKING:
    import aiohttp

    from bagent.backends.http.connection import PlainResponse

OWN_KEY = "bagent-"
"""A key that begins so is no secret: what follows is the name of who asks."""

SESSION_HEADERS = ("X-Session-Id", "X-Claude-Code-Session-Id", "X-Dynamo-Session-Id")
"""By these headers programs name the conversation that a request goes on with: OpenCode and vLLM's
clients by the first, then Claude Code, then NVIDIA Dynamo's clients."""

MOST_SESSIONS = 65_536


def client_name(headers: Mapping[str, str]) -> str | None:
    """What a client calls its request: by a header, or by the key that it was given."""
    return _own_name(headers) or headers.get("X-Request-Id")


def session_name(headers: Mapping[str, str]) -> str | None:
    """The name that all requests of one conversation have in common, None where there is none."""
    told = (headers[name] for name in SESSION_HEADERS if headers.get(name))
    return _own_name(headers) or next(told, None)


def _own_name(headers: Mapping[str, str]) -> str | None:
    name = headers.get("X-Bagent-Row")
    if name is None:
        key = headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = key or headers.get("x-api-key", "")
        name = key.removeprefix(OWN_KEY) if key.startswith(OWN_KEY) else None
    return name or None


def client_closed_response(request: web.Request) -> web.Response:
    """The end of a request whose client hung up: nobody reads it, and nothing is to be logged."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=499)


class SessionAffinity:
    """Which endpoint served a conversation last: its cache holds what comes before.

    Only the conversations heard of last are remembered.
    """

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._homes: OrderedDict[str, str] = OrderedDict()

    def of(self, session: str | None) -> str | None:
        """The endpoint's name, None where nothing is known."""
        return None if session is None else self._homes.get(session)

    def served(self, session: str | None, endpoint: str) -> None:
        """The endpoint answered a request of the conversation well."""
        if session is None:
            return
        self._homes[session] = endpoint
        self._homes.move_to_end(session)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)


MOST_TRIES = 4
ANSWER_HEADERS = ("Content-Type", "X-Request-Id", "Cache-Control", "Retry-After")
"""Headers of an answer that are passed on; the others speak of the connection behind."""

SSE = "text/event-stream"

ELSEWHERE = frozenset({401, 403, 404, 429})
"""Answers, beside 5xx, that say more of the endpoint than of the request: another one is asked."""


ABSENT = frozenset({404, 501})
"""Answers that speak of a route or a model, which another endpoint may have."""

REFUSED = ABSENT | {401, 403}
"""Answers that speak of the endpoint only if another one serves the same request."""

ALIKE = 2
"""So many endpoints may refuse the key of a request before that is the request's own failure."""

CORE_ROUTES = frozenset({"/chat/completions", "/completions"})
"""Routes that every engine has. One that lacks another route is none the worse for it."""

PASSED_ON = ("anthropic-beta", "anthropic-version")
"""Headers of a client that a hosted API needs to understand its request."""


CLIENT_CLOSED = Failure("client_closed", "the client hung up")


class _Model(msgspec.Struct):
    model: str | None = None


_decode_model = msgspec.json.Decoder(_Model).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


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
        lessor: EndpointLeaser,
        meter: UsageMeter,
        timeouts: Timeouts,
        patience: float,
    ) -> None:
        self._transport = transport
        self._lessor = lessor
        self._meter = meter
        self._timeouts = timeouts
        self._patience = patience
        self._homes = SessionAffinity()
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> int:
        """Requests that clients wait for now."""
        return self._busy

    async def idle(self) -> None:
        """Wait until no client waits for anything."""
        await self._idle.wait()

    async def forward(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """Answer ``request`` with what an endpoint says to ``body`` at ``path``."""
        given = request.get(CLIENT_NAME)
        name = given or client_name(request.headers) or path
        session = given or session_name(request.headers)
        record = ProxyRecord(name, path, unix())
        self._meter.arrived(record)
        self._busy += 1
        self._idle.clear()
        failure = Failure("overloaded", "no endpoint has room", passing=True, status=503)
        avoid: frozenset[str] = frozenset()
        refused: list[tuple[EndpointLease, Failure]] = []
        moved = False  # once: what takes its time everywhere would else end nowhere
        try:
            while record.tries < MOST_TRIES:
                try:
                    async with asyncio.timeout(self._patience):
                        lease = await self._lessor.acquire(avoid, self._homes.of(session))
                except TimeoutError:
                    break
                except Closed:
                    failure = Failure("overloaded", "the proxy ends", passing=True, status=503)
                    break
                lease.uncancellable = moved
                record.begin(lease.state.name)
                result = await self._try(request, path, body, lease, record)
                if not isinstance(result, Failure):
                    if record.failure is None:
                        self._homes.served(session, record.endpoint)
                        for old, told in refused if path in CORE_ROUTES else ():
                            self._lessor.judge(old, told, _as_request(path, body))
                    return result
                failure, avoid = result, avoid | {lease.state.name}
                moved |= bool(lease.cancel_reason)
                if result.status in REFUSED:
                    refused.append((lease, result))
                    alike = sum(1 for _, told in refused if told.status == result.status)
                    own = result.status not in ABSENT and alike >= ALIKE
                    if own or not self._lessor.has_alternative(avoid):
                        break
            record.failure = failure
            return _refusal(failure, path, record.refusal)
        except (ClientLeft, asyncio.CancelledError) as error:
            self._left(record, session, error)
            if isinstance(error, ClientLeft):
                return client_closed_response(request)
            raise
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()
            self._meter.request(record)

    def _left(self, record: ProxyRecord, session: str | None, error: BaseException) -> None:
        """Note that the client, or this proxy, ended a request before its handler did."""
        if record.whole:  # clients may close once they have read the end
            self._homes.served(session, record.endpoint)
        elif self._lessor.closed and not isinstance(error, ClientLeft):
            words = "the proxy ended before the answer"
            record.failure = Failure("overloaded", words, passing=True)
        else:
            record.failure = CLIENT_CLOSED

    def _note_limits(self, lease: EndpointLease, headers: Mapping[str, str], *, good: bool) -> None:
        """A provider's answer may tell the limits of the account."""
        if not lease.state.endpoint.own:
            limits = read_rate_limits(headers, time.time())
            if limits is not None:
                self._lessor.update_limits(lease, limits, accepted=good)

    async def _try(
        self,
        request: web.Request,
        path: str,
        body: bytes,
        lease: EndpointLease,
        record: ProxyRecord,
    ) -> web.StreamResponse | Failure:
        """One try; a failure may be tried elsewhere: no byte of it has gone to the client."""
        endpoint = _as_asked(lease.state.endpoint, request.headers)
        lease.task = asyncio.current_task()
        sent, told, lent = unix(), None, True
        try:
            async with self._transport.post(endpoint, path, body, self._timeouts) as found:
                record.status = found.status
                self._note_limits(lease, found.headers, good=found.status == 200)
                if found.status in ELSEWHERE or found.status >= 500:
                    raw = await read_body(found)
                    told = _refused(found.status, raw, found.headers, endpoint)
                    record.refusal = endpoint.without_secrets(
                        raw.decode("utf-8", "replace")
                    ).encode()
                    return told
                if found.content_type == "text/html":
                    told = Failure("bad_response", "a web page instead of an answer", passing=True)
                    return told
                answer = web.StreamResponse(status=found.status, headers=_passed_on(found.headers))
                whole = None
                if found.content_type != SSE:
                    whole = await _whole(found, endpoint, record)
                    told = _malformed(path, found, whole)
                    if told is not None:
                        record.tail = b""
                        return told
                else:
                    await self._pass_on(request, found, answer, lease, record)
            self._lessor.on_success(lease)
            lent = False
            record.read_usage()
        except (*NETWORK_ERRORS, asyncio.CancelledError) as error:
            told = _why(error, lease, self._timeouts)
            if told is None:
                raise
            if lease.streaming:
                # The answer has begun; an honest end is a broken one.
                record.failure = told
                if request.transport is not None:
                    request.transport.abort()
                return answer
            return msgspec.structs.replace(told, status=None)
        finally:
            if lent and record.whole:  # only the end of the connection was waited for
                self._lessor.on_success(lease)
                record.read_usage()
            elif lent:  # whatever it was, the slot is free again
                blamed = None if lease.cancel_reason or (told and told.status in REFUSED) else told
                self._lessor.on_failure(lease, blamed, _as_request(path, body))
                told = told or CLIENT_CLOSED
            self._meter.attempt(record, sent, told or record.failure)
        return await _finished(request, answer, whole, record)

    async def _pass_on(
        self,
        request: web.Request,
        found: aiohttp.ClientResponse | PlainResponse,
        answer: web.StreamResponse,
        lease: EndpointLease,
        record: ProxyRecord,
    ) -> None:
        """Send a stream to the client as it comes; while the client takes its time, no limit of
        the endpoint's runs."""
        async with StreamTimeout(self._timeouts.first_token, self._timeouts.idle) as patience:
            async for piece in found.content.iter_any():
                patience.disable()
                record.take(piece)
                begins = not lease.streaming
                self._lessor.on_chunk(lease)
                if begins:
                    await _send(answer.prepare(request))
                await _send(answer.write(piece))
                patience.on_chunk()


async def _send(work: object) -> None:
    """Send to the client; its hanging up must not look like a fault of the endpoint."""
    try:
        await work  # type: ignore[misc]
    except (ConnectionError, OSError) as error:
        raise ClientLeft from error


async def _finished(
    request: web.Request, answer: web.StreamResponse, whole: bytes | None, record: ProxyRecord
) -> web.StreamResponse:
    """The rest of an answer for the client: all of it, where it was no stream."""
    if whole is not None:
        answer.content_length = len(whole)
    if not answer.prepared:
        await _send(answer.prepare(request))
    if whole is not None:
        await _send(answer.write(whole))
    record.whole = True
    await _send(answer.write_eof())
    return answer


def _why(error: BaseException, lease: EndpointLease, timeouts: Timeouts) -> Failure | None:
    """Why a try failed; None where it was cancelled because nobody waits for it any more."""
    if not isinstance(error, asyncio.CancelledError):
        return network_failure(error, lease.state.endpoint, timeouts)
    task = lease.task
    if not lease.cancel_reason or task is None or task.uncancel() > 0:
        return None
    return Failure("connect", lease.cancel_reason, passing=True)


async def _whole(
    found: aiohttp.ClientResponse | PlainResponse, endpoint: Endpoint, record: ProxyRecord
) -> bytes:
    """The body of an answer that is no stream, noted, and without the endpoint's keys."""
    raw = await read_body(found)
    if found.status >= 400:
        record.failure = _refused(found.status, raw, found.headers, endpoint)
        raw = endpoint.without_secrets(raw.decode("utf-8", "replace")).encode()
    record.tail = raw
    return raw


def _malformed(
    path: str, found: aiohttp.ClientResponse | PlainResponse, raw: bytes
) -> Failure | None:
    """Why the body behind HTTP 200 is no answer of the route; None where it may be one."""
    core = path in CORE_ROUTES
    if found.status != 200 or not (core or found.content_type == "application/json"):
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


def _refused(status: int, raw: bytes, headers: Mapping[str, str], endpoint: Endpoint) -> Failure:
    """What a refusal says of its request, without the keys of the endpoint."""
    found = failure_from_status(status, raw.decode("utf-8", "replace"), headers)
    return msgspec.structs.replace(found, message=endpoint.without_secrets(found.message))


def _as_request(path: str, body: bytes) -> Request:
    """Return a client's request as far as a proof needs it: its route and its model."""
    try:
        model = _decode_model(body).model
    except msgspec.DecodeError:
        model = None
    return Request(CallSettings(model=model, sampling={}, extra={}), b"", path=path)


def _as_asked(endpoint: Endpoint, headers: Mapping[str, str]) -> Endpoint:
    """A hosted endpoint with what the client's headers say of its request."""
    told = {name: headers[name] for name in PASSED_ON if name in headers}
    if endpoint.own or not told:
        return endpoint
    return msgspec.structs.replace(endpoint, headers={**endpoint.headers, **told})


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in ANSWER_HEADERS if name in headers}


def _explains(refusal: bytes) -> bool:
    """Whether the body of a refusal is an error with words of its own."""
    try:
        error = find_error(decode_json(refusal))
    except ValueError:
        return False
    return error is not None and error[0].strip().lower() not in ("", "not found")


def _refusal(failure: Failure, path: str, refusal: bytes) -> web.Response:
    """The failure in OpenAI's form; that a route or model is missing, in the engine's own words.

    Args:
        failure: of the last try.
        path: the route.
        refusal: the body that the last engine refused with, if it did.
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
