"""Access control of the proxy: token, ``Host`` and ``Origin``."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from bagent.backends.endpoint import Endpoint
from bagent.backends.http.proxies import is_loopback
from bagent.redaction import header_is_secret

NAME_SEPARATOR = ":"
"""Separates the token from the client's name in a key: ``TOKEN:NAME``."""

CLIENT_NAME = web.RequestKey("client_name", str)
"""The client's name in the key, for :mod:`bagent.proxy.forward`."""


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


def client_key(token: str, name: str) -> str:
    """Return the key for a client whose requests are to be metered under ``name``."""
    return f"{token}{NAME_SEPARATOR}{name}"


def holds_key(endpoint: Endpoint) -> bool:
    """Return whether requests to ``endpoint`` carry credentials."""
    return any(map(header_is_secret, endpoint.headers)) or bool(endpoint.query)


def bearer(request: web.Request) -> str:
    """Return the token in a request's ``Authorization``, empty where there is none.

    The scheme's case does not matter (RFC 7235).
    """
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def is_token(candidate: str, token: str) -> bool:
    """Return whether ``candidate`` is the token, in constant time.

    Headers hold any bytes, which aiohttp keeps as lone surrogates.
    """
    return hmac.compare_digest(
        *(text.encode("utf-8", "surrogateescape") for text in (candidate, token))
    )


def token_guard(token: str | None, open_paths: Collection[str] = ()) -> Any:
    """Return a middleware that answers 401 to requests without ``token``.

    Args:
        token: clients send it as bearer token or ``x-api-key``, alone or followed by
            :data:`NAME_SEPARATOR` and a name for the request; None lets everybody in.
        open_paths: decoded paths that need no token.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if token is not None and request.path not in open_paths:
            key = bearer(request) or request.headers.get("x-api-key", "")
            head, suffix = key[: len(token)], key[len(token) :]
            if not is_token(head, token) or suffix[:1] not in ("", NAME_SEPARATOR):
                return refusal(401, "auth", "the token is wrong or missing")
            if len(suffix) > 1:
                request[CLIENT_NAME] = suffix[1:]
        answer: web.StreamResponse = await handler(request)
        return answer

    return guard


def address_guard(host: str | None) -> Any:
    """Return a middleware that refuses requests of web pages, and DNS rebinding.

    A page in a browser of this machine may send requests to loopback: directly, which its
    ``Origin`` shows, or by a domain name of its own that resolves to 127.0.0.1 (DNS rebinding),
    which ``Host`` shows.

    Args:
        host: the address that the server listens on; None for a Unix socket. ``Host`` is checked
            on loopback only: elsewhere a machine may have any name, and the token keeps pages out.
    """
    checks_host = host is not None and is_loopback(host)

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        # Of a target in the form for proxies, aiohttp takes the host from there.
        hosts = {f"//{request.headers.get('Host', '')}", f"//{request.host}"}
        if checks_host and not all(map(_is_local, hosts)):
            return refusal(403, "forbidden", "the Host header names another machine")
        if not all(map(_is_local, request.headers.getall("Origin", ()))):
            return refusal(403, "forbidden", "requests of web pages are refused")
        answer: web.StreamResponse = await handler(request)
        return answer

    return guard


def refusal(status: int, kind: str, message: str) -> web.Response:
    """Return an error in OpenAI's form."""
    error = {"message": message, "type": kind, "code": status, "param": None}
    return web.json_response({"error": error}, status=status)


def _is_local(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    return host is not None and parts.username is None and is_loopback(host)
