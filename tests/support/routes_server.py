"""A server that is nothing but a table of routes: engines as they describe themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from support.http_servers import serve_app

Routes = Mapping[str, Any]
"""``"GET /v1/models"`` -> a JSON value, a status, or text that is sent as it is."""


@asynccontextmanager
async def routes_server(routes: Routes, missing: int = 404) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve ``routes`` on 127.0.0.1; yields the address and the list of what was asked.

    A GET of a path that only has a POST is a 405, any other path ``missing``.
    """
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        line = f"{request.method} {request.path}"
        asked.append(line)
        if line not in routes:
            return web.Response(status=405 if f"POST {request.path}" in routes else missing)
        answer = routes[line]
        if isinstance(answer, int):
            return web.Response(status=answer)
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with serve_app(app) as url:
        yield f"{url}/v1", asked


def models(name: str, owner: str, **more: Any) -> dict[str, Any]:
    """The body of ``/v1/models`` with one model."""
    return {"object": "list", "data": [{"id": name, "owned_by": owner, **more}]}
