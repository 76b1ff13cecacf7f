"""The routes that a proxy serves. Nothing else of a client's path reaches an endpoint."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from bagent.backends.endpoint import Capabilities
from bagent.backends.openai_http import OpenAIBackend
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.leasing import Lessor
from bagent.proxy.forward import Forwarder
from bagent.proxy.guarding import refusal

MAX_BODY_BYTES = 256 << 20
PROBE_SECONDS = 5.0

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
"""The routes below ``/v1`` that are passed on: inference with a JSON body. Routes that change an
engine (adapters, weights, sleep) or an account (files, batches, fine-tuning) are not among them."""

_PREAMBLE_IN_TEXT = re.compile(rb'(?<=")(?:x-(?:anthropic|amz)-[A-Za-z0-9-]+:[^"\\]*\\n)+', re.I)


def proxy_app(
    guards: Sequence[Any],
    forwarder: Forwarder,
    backend: OpenAIBackend,
    lessor: Lessor,
    *,
    strip_preamble: bool,
) -> web.Application:
    """Return the application: what it forwards, the list of models and its health.

    Args:
        guards: middlewares that every request has to pass.
        forwarder: takes the requests of :data:`FORWARDED`.
        backend: asks the endpoints which models they serve.
        lessor: the endpoints.
        strip_preamble: remove session lines that begin texts, see :func:`without_preamble`.
    """

    async def post(path: str, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        return await forwarder.forward(
            request, path, without_preamble(body) if strip_preamble else body
        )

    async def names() -> list[str]:
        probes = (backend.probe(s.endpoint, PROBE_SECONDS) for s in lessor.states if _serves(s))
        results = await asyncio.gather(*probes)
        served = (result.models for result in results if isinstance(result, Capabilities))
        return list(dict.fromkeys(itertools.chain.from_iterable(served)))

    async def models(request: web.Request) -> web.Response:
        data = [_model(name) for name in await names()]
        return web.json_response({"object": "list", "data": data})

    async def model(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name in await names():
            return web.json_response(_model(name))
        return refusal(404, "not_found", f"no endpoint serves {name}")

    async def health(request: web.Request) -> web.Response:
        stay = [state for state in lessor.states if not state.leaving]
        up = sum(1 for state in stay if _serves(state))
        return web.json_response({"endpoints": len(stay), "up": up}, status=200 if up else 503)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[*guards, _unknown_route])
    app.router.add_get(HEALTH, health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
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


def _serves(state: EndpointState) -> bool:
    """Whether an endpoint is one of the fleet, and answers."""
    return state.up and not (state.stalled or state.leaving)


def _model(name: str) -> dict[str, str]:
    """A model as OpenAI's API lists it."""
    return {"id": name, "object": "model", "owned_by": "bagent"}


def without_preamble(body: bytes) -> bytes:
    """Return a request body whose texts do not begin with header-like lines of a session."""
    return _PREAMBLE_IN_TEXT.sub(b"", body)
