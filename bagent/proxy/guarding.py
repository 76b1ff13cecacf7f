"""Who may ask: tokens of requests."""

from __future__ import annotations

import hmac

from aiohttp import web


def bearer(request: web.Request) -> str:
    """The token in a request's ``Authorization``, empty where there is none.

    The scheme's case does not matter (RFC 7235).
    """
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def is_token(given: str, token: str) -> bool:
    """Whether it is the token; how long that takes tells nothing of it.

    Headers hold any bytes, which aiohttp keeps as lone surrogates.
    """
    return hmac.compare_digest(
        *(word.encode("utf-8", "surrogateescape") for word in (given, token))
    )
