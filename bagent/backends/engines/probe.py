"""A completion of one token, which shows that an endpoint works."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from bagent.backends.base import Backend
from bagent.backends.endpoint import Endpoint
from bagent.backends.openai.models import timeouts_within
from bagent.backends.request import CallSettings, Request, encode_payload, requested_model
from bagent.types import Failure, Reply

Route = Literal["chat", "completions", "embeddings"]

ROUTES: tuple[Route, ...] = ("chat", "completions", "embeddings")
"""In the order of trying: models without a chat template accept only texts, some generate none."""

_ROUTE_OF: dict[str, Route] = {"/completions": "completions", "/embeddings": "embeddings"}

CHECK_SECONDS = 30.0
"""Limit of the test request to an endpoint that failed calls."""

_TEXT = "Hi"
_NOT_HERE = (400, 404, 405, 415, 422, 501)
_TRIES = 4
"""Attempts per route: a stale connection, or a refused parameter, is worth another."""


class ProbeResult(msgspec.Struct, frozen=True):
    """The answer to a test request."""

    route: Route
    ms: float
    """Milliseconds until the answer."""
    cached_tokens: bool = False
    """Its usage included cached tokens."""
    blank: bool = False
    """The answer had no text."""


class CompletionProbe:
    """Sends test requests to endpoints over one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._requests: dict[tuple[Route, str | None], Request] = {}

    async def check(self, endpoint: Endpoint, request: Request | None) -> Failure | None:
        """Request one token from the model and route of ``request``; return the failure, if any."""
        model, routes = None, ROUTES
        if request is not None:
            model = requested_model(request)
            routes = (_ROUTE_OF.get(request.path, "chat"),)
        result = await self.prove(endpoint, model, CHECK_SECONDS, routes)
        if isinstance(result, ProbeResult):
            message = f"{endpoint.name} ends its answers without a word"
            return Failure("empty", message, passing=True, status=200) if result.blank else None
        return result

    async def prove(
        self,
        endpoint: Endpoint,
        model: str | None,
        seconds: float,
        routes: Sequence[Route] = ROUTES,
    ) -> ProbeResult | Failure:
        """Request one token from ``model`` (None: the server's own) within ``seconds``.

        Routes are tried in order while the server refuses them. The failure is that of the first.
        """
        end = time.monotonic() + seconds
        first: Failure | None = None
        for route in routes:
            result = await self._ask(endpoint, model, route, end)
            if isinstance(result, ProbeResult):
                return result
            first = first or result
            if result.status not in _NOT_HERE:
                break
        assert first is not None
        return first

    async def _ask(
        self, endpoint: Endpoint, model: str | None, route: Route, end: float
    ) -> ProbeResult | Failure:
        request = self._requests.get((route, model))
        if request is None:
            request = self._requests[route, model] = _request(route, model)
        failure = Failure("timeout", "no time was left to ask it", True)
        for _ in range(_TRIES):
            sent_at = time.monotonic()
            remaining = end - sent_at
            if remaining <= 0:
                break
            exchange = await self._backend.send(endpoint, [request], timeouts_within(remaining))
            result = exchange.results[0]
            ms = 1000 * (time.monotonic() - sent_at)
            if isinstance(result, Reply):
                blank = result.finish_reason == "stop" and result.vectors is None
                blank = blank and not (result.text or result.reasoning or result.tool_calls)
                return ProbeResult(route, ms, result.usage.cached is not None, blank)
            failure = result
            if not exchange.repeatable:
                break
        return failure


def _request(route: Route, model: str | None) -> Request:
    settings = CallSettings(model=model, sampling={}, extra={})
    if route == "chat":
        messages = [{"role": "user", "content": _TEXT}]
        return Request(settings, encode_payload(messages), messages=messages, max_tokens=1)
    if route == "completions":
        return Request(
            settings, encode_payload(_TEXT), prompt=_TEXT, path="/completions", max_tokens=1
        )
    body = {"model": model, "input": _TEXT} if model else {"input": _TEXT}
    return Request(settings, encode_payload(body), body=body, path="/embeddings")
