"""The routes that a proxy serves. Nothing else of a client's path reaches an endpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from bagent.fleet.leasing import Lessor
from bagent.proxy.engine_routes import EngineRoutes, serves
from bagent.proxy.forward import Forwarder
from bagent.proxy.guarding import refusal

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
"""The routes below ``/v1`` that are passed on: inference with a JSON body. Routes that change an
engine (adapters, weights, sleep) or an account (files, batches, fine-tuning) are not among them."""

_PREAMBLE_IN_TEXT = re.compile(rb'(?<=")(?:x-(?:anthropic|amz)-[A-Za-z0-9-]+:[^"\\]*\\n)+', re.I)


def proxy_app(
    guards: Sequence[Any],
    forwarder: Forwarder,
    engines: EngineRoutes,
    lessor: Lessor,
    *,
    strip_preamble: bool,
) -> web.Application:
    """Return the application: what it forwards, what engines tell, and its health.

    Args:
        guards: middlewares that every request has to pass.
        forwarder: takes the requests of :data:`FORWARDED`.
        engines: answers with what the endpoints tell of themselves.
        lessor: the endpoints.
        strip_preamble: remove session lines that begin texts, see :func:`without_preamble`.
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
    """Return a request body whose texts do not begin with header-like lines of a session."""
    return _PREAMBLE_IN_TEXT.sub(b"", body)
