"""The web server: routes, access control, and the stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import duckdb
from aiohttp import web

from bagent.errors import BagentError
from bagent.proxy.auth import address_guard, is_token, new_token
from bagent.report import html
from bagent.view.catalog import RunCatalog
from bagent.view.handlers import TEMPLATES, Handlers, explain_error

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline';"
    " img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'"
)
"""Content Security Policy: nothing is loaded from elsewhere, and no inline script runs."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_STATIC = {
    "view.css": ("bagent.view", "static/view.css", "text/css"),
    "view.js": ("bagent.view", "static/view.js", "text/javascript"),
    "page.css": ("bagent.report", "page.css", "text/css"),
}

_BEGUN = web.RequestKey("begun", bool)
"""Whether the headers of the response are sent."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def view_app(catalog: RunCatalog, token: str, host: str) -> web.Application:
    """Return the application: every address begins with the token, and only GET is served.

    Args:
        catalog: the runs.
        token: the first part of every path.
        host: the address that the server listens on.
    """
    handlers = Handlers(catalog)
    app = web.Application(middlewares=[address_guard(host), _same_origin, _token(token), _errors])
    app.on_response_prepare.append(_begin)
    routes: dict[str, Handler] = {
        "/": handlers.runs,
        "/compare": handlers.compare,
        "/run/{run}/": handlers.run,
        "/run/{run}/overview": handlers.overview,
        "/run/{run}/answers": handlers.answers,
        "/run/{run}/findings": handlers.findings,
        "/run/{run}/events": handlers.events,
        "/run/{run}/rows": handlers.rows,
        "/run/{run}/count": handlers.count,
        "/run/{run}/export.{form}": handlers.export,
        "/run/{run}/row": handlers.row,
        "/run/{run}/text": handlers.text,
        "/static/{name}": _static,
    }
    for path, handler in routes.items():
        app.router.add_get(f"/{{token}}{path}", handler)

    async def close(_: web.Application) -> None:
        await catalog.close()

    app.on_cleanup.append(close)
    return app


async def _begin(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers to a response, and note that it has begun."""
    response.headers.update(HEADERS)
    request[_BEGUN] = True


@web.middleware
async def _same_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what pages of another origin send, also of other servers on this machine."""
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        raise web.HTTPForbidden(text="requests of other pages are refused")
    site = request.headers.get("Sec-Fetch-Site", "none")
    opens_page = request.headers.get("Sec-Fetch-Mode") == "navigate"
    if site not in ("none", "same-origin") and not opens_page:
        raise web.HTTPForbidden(text="requests of other pages are refused")
    return await handler(request)


def _token(token: str) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        first = request.path.split("/")[1]
        if not is_token(first, token):
            raise web.HTTPForbidden(
                text="the token in the address is wrong or missing: take the address that"
                " bagent view printed"
            )
        return await handler(request)

    return guard


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors of the user's input into a page; a stream that has begun breaks off."""
    try:
        return await handler(request)
    except (BagentError, duckdb.Error) as error:
        if request.get(_BEGUN):
            raise
        message, hint = explain_error(error)
    text = html.template_page(
        TEMPLATES, "error.html", message=message, hint=hint, base=f"/{request.path.split('/')[1]}"
    )
    return web.Response(text=text, content_type="text/html", status=400)


async def _static(request: web.Request) -> web.Response:
    entry = _STATIC.get(request.match_info["name"])
    if entry is None:
        raise web.HTTPNotFound
    package, path, kind = entry
    body = files(package).joinpath(path).read_bytes()
    return web.Response(body=body, content_type=kind, charset="utf-8")


async def serve(catalog: RunCatalog, port: int, ready: Callable[[str], None]) -> None:
    """Serve on loopback until cancelled.

    Args:
        catalog: the runs.
        port: 0 for a free one.
        ready: called with the address once it listens.

    Raises:
        OSError: the port is taken.
    """
    host, token = "127.0.0.1", new_token()
    runner = web.AppRunner(view_app(catalog, token, host), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0][1]
        ready(f"http://{host}:{bound}/{token}/")
        first = ("run.html", "base.html", "parts.html", "overview.html")
        await asyncio.to_thread(html.compile_templates, TEMPLATES, *first)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
