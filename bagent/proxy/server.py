"""The proxy's web server, and its routes about the engines: models, version, metrics and counts.

Those routes cost no tokens and are not metered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.engines.probe import CompletionProbe
from bagent.backends.http.client import NETWORK_ERRORS, Transport
from bagent.backends.http.proxies import is_loopback
from bagent.backends.http.request import read_body
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.openai.models import fetch_model_entries
from bagent.errors import StoppedEarly, UsageError
from bagent.fleet.endpoint_state import DEFAULT_RETRY_AFTER_MAX, EndpointState
from bagent.fleet.leases import EndpointLeaser
from bagent.fleet.limits.account import Account
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.state import FleetConfig, FleetState
from bagent.proxy.auth import address_guard, refusal, token_guard
from bagent.proxy.forward import Forwarder
from bagent.proxy.metering import UsageMeter
from bagent.text.json import json_or_none
from bagent.types import Json, Usage

UNIX_BASE_URL = "http://localhost/v1"
"""Base address for clients of a Unix socket, which ignore the host."""

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux (unix(7))."""


def listen_unix(path: Path) -> socket.socket:
    """Return a listening socket at ``path`` with mode 0600; replace a stale one.

    Raises:
        UsageError: the path is too long, taken, or cannot be written.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UsageError(
            f"--unix {path} is longer than {MAX_PATH_BYTES} bytes", hint="choose a shorter path"
        )
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Nobody can connect between bind and listen, so the mode always applies.
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(128)
    except OSError as error:
        listening.close()
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot listen on {path}: {reason}") from None
    return listening


def remove_socket(path: Path | None) -> None:
    """Remove the socket at ``path``, where there is one."""
    with suppress(OSError):
        if path is not None and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} is there and is no socket", hint="choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise UsageError(f"another process serves {path}", hint="end it, or choose another path")


MAX_BODY_BYTES = 256 << 20

HEALTH = "/health"

FORWARDED = (
    "/chat/completions",
    "/chat/completions/batch",
    "/completions",
    "/responses",
    "/messages",
    "/messages/count_tokens",
    "/embeddings",
    "/rerank",
    "/score",
    "/moderations",
    "/images/generations",
    "/audio/speech",
)
"""Forwarded routes below ``/v1``: inference with a JSON body, but nothing that changes an engine
(adapters, weights, sleep) or an account (files, batches, fine-tuning)."""

_PREAMBLE_IN_TEXT = re.compile(rb'(?<=")(?:x-(?:anthropic|amz)-[A-Za-z0-9-]+:[^"\\]*\\n)+', re.I)


def proxy_app(
    guards: Sequence[Any],
    forwarder: Forwarder,
    engines: EngineRoutes,
    lessor: EndpointLeaser,
    *,
    strip_preamble: bool,
) -> web.Application:
    """Return the application.

    Args:
        guards: middlewares for all requests.
        forwarder: handles the routes of :data:`FORWARDED`.
        engines: handles the routes about engines.
        lessor: the endpoints.
        strip_preamble: apply :func:`without_preamble` to bodies.
    """

    async def post(path: str, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        return await forwarder.forward(
            request, path, without_preamble(body) if strip_preamble else body
        )

    async def health(request: web.Request) -> web.Response:
        stay = [state for state in lessor.states if not state.leaving]
        up = sum(1 for state in stay if serves(state))
        return web.json_response({"endpoints": len(stay), "up": up}, status=200 if up else 503)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[*guards, _unknown_route])
    app.router.add_get(HEALTH, health)
    engines.add_to(app)
    for path in FORWARDED:
        app.router.add_post(f"/v1{path}", partial(post, path))
    return app


@web.middleware
async def _unknown_route(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        answer: web.StreamResponse = await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        return refusal(error.status, "not_found", "the proxy does not serve this route")
    return answer


def without_preamble(body: bytes) -> bytes:
    """Return a request body without header-like lines at the beginning of its texts.

    Some CLI agents put lines such as ``x-anthropic-...:`` there that differ in every session, so
    that no prefix is shared.
    """
    return _PREAMBLE_IN_TEXT.sub(b"", body)


QUIET = logging.getLogger("bagent.proxy")
"""Drops aiohttp's messages about malformed requests, which clients get as answers."""

QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False

TICK_SECONDS = 1.0

ABANDON_SECONDS = 0.5
"""Time for cancelled requests to end."""


class ProxyConfig(msgspec.Struct, frozen=True):
    """Where the proxy listens, and who may use it."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0: a free one
    unix: Path | None = None  # a socket in place of host and port, for this user only
    token: str | None = None  # required if the host is not loopback
    patience: float = 600.0  # seconds for which a request may wait for an endpoint with room
    timeouts: Timeouts = Timeouts()
    strip_preamble: bool = False  # see :func:`without_preamble`
    drain: float = 30.0  # seconds for requests in flight at the end


class Proxy(msgspec.Struct, frozen=True):
    """A running proxy."""

    url: str  # base address, with ``/v1``
    run: Path  # run directory
    lessor: EndpointLeaser
    fault: asyncio.Future[BaseException]  # gets the reason why it can no longer serve or meter
    busy: Callable[[], int]  # how many requests are in progress


@asynccontextmanager
async def start_proxy(
    states: Sequence[EndpointState],
    config: ProxyConfig,
    run: Path,
    notice: Callable[[str], None],
    on_usage: Callable[[str, Usage], None] = lambda name, usage: None,
    hurried: asyncio.Event | None = None,
) -> AsyncIterator[Proxy]:
    """Serve in front of ``states`` until the context is left.

    ``on_usage`` receives the usage of each request and the name of its client. ``hurried``, when
    set, ends the wait for requests in flight at the end.

    Raises:
        UsageError: the address is not available, or open to others without a token.
        OwnedError: another process writes to the run directory.
        WriteError: the run directory cannot be written.
    """
    listening = _listen(config)
    transport = Transport()
    backend = OpenAIBackend(transport, notice=notice)
    lessor = EndpointLeaser(
        FleetState(states, FleetConfig(concurrency=1 << 20), asyncio.get_running_loop().time),
        backend,
        CompletionProbe(backend).check,
        on_sample=lambda sample: meter.sample(sample),
        notice=notice,
    )
    fault: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def fail(reason: BaseException) -> None:
        if not fault.done() and not isinstance(reason, StoppedEarly):  # it waits for endpoints
            fault.set_result(reason)

    lessor.stopped.add_done_callback(lambda stopped: fail(stopped.result()))
    meter = UsageMeter(run, [state.name for state in states], notice, on_usage, fail)
    forwarder = Forwarder(transport, lessor, meter, config.timeouts, config.patience)
    lessor.sample("begin")
    guards = [
        address_guard(None if config.unix else config.host),
        token_guard(config.token, (HEALTH,)),
    ]
    engines = EngineRoutes(transport, lessor, config.timeouts)
    app = proxy_app(guards, forwarder, engines, lessor, strip_preamble=config.strip_preamble)
    runner = _runner(app)
    ticking = lessor.spawn(_tick(meter, lessor))
    try:
        await runner.setup()
        await web.SockSite(runner, listening).start()
        yield Proxy(_base_url(config, listening), run, lessor, fault, lambda: forwarder.busy)
    finally:
        reported = fault.done()
        await _drain(runner, lessor, forwarder, hurried or asyncio.Event(), config.drain)
        ticking.cancel()
        await asyncio.gather(ticking, lessor.wait_closed(), return_exceptions=True)
        await backend.close()
        remove_socket(config.unix)
        meter.close(0)
    if fault.done() and not reported:
        raise fault.result()


def _runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=ABANDON_SECONDS,
        logger=QUIET,
    )


async def _drain(
    runner: web.AppRunner,
    lessor: EndpointLeaser,
    forwarder: Forwarder,
    hurried: asyncio.Event,
    seconds: float,
) -> None:
    """Stop listening, wait for requests in flight, then cancel the others."""
    for site in list(runner.sites):
        await site.stop()
    lessor.close()
    waits = [asyncio.ensure_future(hurried.wait()), asyncio.ensure_future(forwarder.wait_idle())]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await runner.cleanup()


def _listen(config: ProxyConfig) -> socket.socket:
    """Return the listening socket."""
    if config.unix is not None:
        return listen_unix(config.unix)
    if config.token is None and not is_loopback(config.host):
        raise UsageError(
            f"--host {config.host} is open to others", hint="give a --token-env, or 127.0.0.1"
        )
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot listen on {config.host}:{config.port}: {reason.lower()}",
            hint="choose another --port; 0 takes a free one",
        ) from None


def _base_url(config: ProxyConfig, listening: socket.socket) -> str:
    if config.unix is not None:
        return UNIX_BASE_URL
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listening.getsockname()[1]}/v1"


async def _tick(meter: UsageMeter, lessor: EndpointLeaser) -> None:
    while True:
        await asyncio.sleep(TICK_SECONDS)
        lessor.tick()
        meter.tick()


def plain_states(endpoints: Sequence[Endpoint], limit: int) -> list[EndpointState]:
    """Return the states of endpoints with ``limit`` requests in flight, or a tag's lower limit."""
    return [_state(endpoint, limit) for endpoint in endpoints]


def _state(endpoint: Endpoint, limit: int) -> EndpointState:
    tags = endpoint.tags
    limit = min(limit, int(tags.get("max_concurrency") or limit))
    return EndpointState(
        endpoint,
        InFlightLimit(limit, limit),
        Account(None, None, DEFAULT_RETRY_AFTER_MAX, hosted=not endpoint.own),
        weight=endpoint.weight,
    )


PROBE_SECONDS = 5.0
COUNTED = ("/tokenize", "/detokenize")
_ABSENT = (404, 405, 501)
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?(\s.*)")
_SUFFIX = re.compile(r"_(?:bucket|sum|count|total|created)$")


class EngineRoutes:
    """Answers clients with what the endpoints of a fleet report.

    Args:
        transport: connects to the endpoints.
        lessor: knows the endpoints.
        timeouts: limits of one token count.
    """

    def __init__(self, transport: Transport, lessor: EndpointLeaser, timeouts: Timeouts) -> None:
        self._transport = transport
        self._lessor = lessor
        self._timeouts = timeouts

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        for path in COUNTED:
            app.router.add_post(path, self._count)

    async def _models(self, request: web.Request) -> web.Response:
        data = list((await self._list_models()).values())
        return web.json_response({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        entry = (await self._list_models()).get(name)
        if entry is None:
            return refusal(404, "not_found", f"no endpoint serves {name}")
        return web.json_response(entry)

    async def _list_models(self) -> dict[str, dict[str, Json]]:
        """Return each model as its engines list it, by name."""
        requests = [
            fetch_model_entries(self._transport, endpoint, PROBE_SECONDS)
            for endpoint in self._serving()
        ]
        return merged_models(
            [entry for entries in await asyncio.gather(*requests) for entry in entries]
        )

    async def _version(self, request: web.Request) -> web.Response:
        versions = []
        for _, raw in await self._get_all("/version"):
            body = json_or_none(raw)
            if isinstance(body, dict) and isinstance(body.get("version"), str):
                versions.append(body["version"])
        if not versions:
            return refusal(404, "not_found", "no endpoint of this fleet tells its version")
        return web.json_response({"version": ", ".join(dict.fromkeys(versions))})

    async def _metrics(self, request: web.Request) -> web.Response:
        answers = await self._get_all("/metrics")
        if not answers:
            return refusal(404, "not_found", "no endpoint of this fleet has metrics")
        texts = [(endpoint.name, raw.decode("utf-8", "replace")) for endpoint, raw in answers]
        return web.Response(
            body=merged_metrics(texts).encode(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _get_all(self, path: str) -> list[tuple[Endpoint, bytes]]:
        """Return the good answers of all own endpoints to a GET of ``path``."""
        own = self._own()
        requests = (
            self._transport.get(endpoint, endpoint.root + path, PROBE_SECONDS) for endpoint in own
        )
        answers = await asyncio.gather(*requests, return_exceptions=True)
        good = []
        for endpoint, answer in zip(own, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, NETWORK_ERRORS):
                    raise answer
            elif answer[0] == 200:
                good.append((endpoint, answer[1]))
        return good

    async def _count(self, request: web.Request) -> web.Response:
        """Forward a text to the first endpoint that has the route and the model."""
        body = await request.read()
        last = refusal(404, "not_found", f"no endpoint of this fleet serves {request.path}")
        for endpoint in self._own():
            root = msgspec.structs.replace(endpoint, url=endpoint.root)
            try:
                async with self._transport.post(root, request.path, body, self._timeouts) as answer:
                    raw = await read_body(answer)
            except NETWORK_ERRORS:
                last = refusal(502, "connect", f"{endpoint.name} did not answer")
                continue
            if answer.status < 500 and answer.status not in (401, 403, *_ABSENT):
                text = endpoint.without_secrets(raw.decode("utf-8", "replace"))
                return web.Response(
                    status=answer.status, text=text, content_type="application/json"
                )
        return last

    def _serving(self) -> list[Endpoint]:
        return [state.endpoint for state in self._lessor.states if serves(state)]

    def _own(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._serving() if endpoint.own]


def serves(state: EndpointState) -> bool:
    """Return whether an endpoint answers and is not leaving."""
    return state.up and not (state.unresponsive or state.leaving)


def merged_models(entries: Sequence[dict[str, Json]]) -> dict[str, dict[str, Json]]:
    """Return one entry for each model by name, as its first engine reports it.

    The context length is the shortest of all engines: a request may go to any of them. If different
    engines serve a model its owner is the proxy, since clients infer features from the owner.
    """
    models: dict[str, dict[str, Json]] = {}
    for entry in entries:
        name = str(entry["id"])
        own = {"object": "model", "owned_by": "bagent", **entry}
        model = models.setdefault(name, own)
        if model["owned_by"] != own["owned_by"]:
            model["owned_by"] = "bagent"
        lengths = [entry.get("max_model_len") for entry in (model, own)]
        reported = [length for length in lengths if isinstance(length, int)]
        if reported:
            model["max_model_len"] = min(reported)
    return models


def merged_metrics(texts: Sequence[tuple[str, str]]) -> str:
    """Merge Prometheus expositions; each series gets a label ``endpoint``.

    Args:
        texts: the name and exposition of each endpoint.
    """
    heads: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for name, text in texts:
        label = 'endpoint="' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for line in text.splitlines():
            if line.startswith("#"):
                fields = line.split(maxsplit=3)
                if len(fields) > 2 and line not in heads.setdefault(fields[2], []):
                    heads[fields[2]].append(line)
                continue
            sample = _SAMPLE.fullmatch(line)
            if sample is not None:
                labels = f"{label},{sample[2]}" if sample[2] else label
                family = sample[1] if sample[1] in heads else _SUFFIX.sub("", sample[1])
                series.setdefault(family, []).append(f"{sample[1]}{{{labels}}}{sample[3]}")
    lines = [line for family, own in series.items() for line in (*heads.get(family, ()), *own)]
    return "\n".join([*lines, ""])
