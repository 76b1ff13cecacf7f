"""Probes of an endpoint: its engine, its routes, and a completion of one token.

Sources: vLLM 0.19 to 0.33 (``/version``, ``owned_by: vllm``, ``/load``), SGLang 0.5
(``/server_info``, ``/get_server_info``), NVIDIA Dynamo 1.6 (``owned_by: nvidia``, its frontend's
``/openapi.json``), llama.cpp's server (``/props``). All routes are optional: one that is missing,
broken or slow leaves a field unknown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from bagent.backends.base import Backend
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.engines.metrics import EngineLoad, parse_load
from bagent.backends.http.client import NETWORK_ERRORS, Transport
from bagent.backends.openai.models import timeouts_within
from bagent.backends.request import CallSettings, Request, encode_payload, requested_model
from bagent.clocks import unix
from bagent.text.json import decode_json
from bagent.types import Failure, Reply

ROUTE_SECONDS = 5.0
"""Limit of one optional route."""

_T = TypeVar("_T")

_OWNERS = {"vllm": "vllm", "sglang": "sglang", "nvidia": "dynamo", "llamacpp": "llama.cpp"}
_FROM_METRICS = {"llamacpp": "llama.cpp"}
_VERSION_ROUTES = (
    ("vllm", "/version", "version"),
    ("sglang", "/server_info", "version"),
    ("sglang", "/get_server_info", "version"),
    ("llama.cpp", "/props", "build_info"),
)
_TOKENIZE, _LOAD = "/tokenize", "/load"
_COMPLETIONS, _BATCH = "/v1/completions", "/v1/chat/completions/batch"
_LISTS = frozenset({"vllm", "sglang", "dynamo", "llama.cpp"})
"""Engines whose /completions accepts lists of prompts."""

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


class DetectedCapabilities(msgspec.Struct, frozen=True):
    """The capabilities of an endpoint, and its load if it reports one."""

    capabilities: Capabilities
    load: EngineLoad | None = None


async def detect_capabilities(
    transport: Transport, endpoint: Endpoint, capabilities: Capabilities, seconds: float
) -> DetectedCapabilities:
    """Query the endpoint's routes one after the other and add the results to ``capabilities``.

    What was not answered within ``seconds`` stays unknown.
    """
    probe = _RouteProbe(transport, endpoint, time.monotonic() + seconds)
    raw = await probe.get("/metrics")
    load = parse_load(raw, unix()) if raw else None
    engine = _OWNERS.get(capabilities.engine or "")
    if engine is None and load is not None and load.engine is not None:
        engine = _FROM_METRICS.get(load.engine, load.engine)
    version, version_engine = await probe.version(engine)
    engine = engine or version_engine
    metrics = load is not None if raw is not None or probe.missing("/metrics") else None
    routes = await probe.routes(engine)
    if engine == "dynamo":
        version = routes.version
    serves = routes.serves
    lists = True if engine in _LISTS else None
    if routes.described is not None and not serves(_COMPLETIONS, engine):
        lists = False
    detected = msgspec.structs.replace(
        capabilities,
        engine=engine or "unknown",
        version=version,
        metrics=metrics,
        # llama.cpp's route of that name takes other fields.
        tokenize=False if engine == "llama.cpp" else serves(_TOKENIZE, engine),
        chat_batch=serves(_BATCH, engine),
        lists=lists,
        load=serves(_LOAD, engine),
    )
    return DetectedCapabilities(detected, load)


class _Routes(msgspec.Struct):
    """The routes of a server, from its description or from the status of a GET."""

    described: frozenset[str] | None = None
    version: str | None = None
    statuses: dict[str, int] = {}

    def serves(self, path: str, engine: str | None) -> bool | None:
        if self.described is not None:
            return path in self.described
        status = self.statuses.get(path)
        if status in (200, 405):
            return True
        # Other servers may answer the GET of a POST route with 404.
        return False if status == 404 and engine in ("vllm", "sglang", "dynamo") else None


class _Info(msgspec.Struct):
    version: str | None = None


class _Description(msgspec.Struct):
    """The part of ``/openapi.json`` that is used."""

    paths: dict[str, msgspec.Raw]
    info: _Info = msgspec.field(default_factory=_Info)


class _RouteProbe:
    """A series of GETs to one endpoint that ends at ``end`` (seconds of the monotonic clock)."""

    def __init__(self, transport: Transport, endpoint: Endpoint, end: float) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._end = end
        self.statuses: dict[str, int] = {}

    async def get(self, path: str) -> bytes | None:
        """Return the body of a 200 response; None for any other, or when time is over."""
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            return None
        url = self._endpoint.root + path
        try:
            async with asyncio.timeout(remaining):
                status, raw, _ = await self._transport.get(
                    self._endpoint, url, min(remaining, ROUTE_SECONDS)
                )
        except NETWORK_ERRORS:
            return None
        self.statuses[path] = status
        return raw if status == 200 else None

    def missing(self, path: str) -> bool:
        """Return whether the server has no such route."""
        return self.statuses.get(path) in (404, 405, 501)

    async def version(self, engine: str | None) -> tuple[str | None, str | None]:
        """Return the server's version, and the engine that its route identifies."""
        for engine_name, path, name in _VERSION_ROUTES:
            if engine not in (None, engine_name):
                continue
            body = _decoded(await self.get(path), decode_json)
            version = body.get(name) if isinstance(body, dict) else None
            if isinstance(version, str) and version:
                return version, None if path == "/version" else engine_name
        return None, None

    async def routes(self, engine: str | None) -> _Routes:
        """Return the routes that the server serves.

        A known vLLM or SGLang is asked by GET, which a POST route answers with 405: building its
        large description would hold a busy server up.
        """
        if engine in (None, "dynamo"):
            raw = await self.get("/openapi.json")
            described = _decoded(raw, msgspec.json.Decoder(_Description).decode)
            if described is not None:
                return _Routes(frozenset(described.paths), described.info.version)
        for path in (_TOKENIZE, _BATCH, _LOAD):
            await self.get(path)
        return _Routes(statuses=self.statuses)


def _decoded(raw: bytes | None, decode: Callable[[bytes], _T]) -> _T | None:
    try:
        return decode(raw) if raw else None
    except ValueError:
        return None


def choose_model(
    capabilities: Capabilities, endpoint: Endpoint, requested: str | None = None
) -> str | None:
    """Return ``requested``, else the endpoint's tag ``model``, else its first model."""
    return (
        requested
        or endpoint.tags.get("model")
        or (capabilities.models[0] if capabilities.models else None)
    )


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
