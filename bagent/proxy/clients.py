"""Who asks: what a client calls its request, and which requests go on from one another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from aiohttp import web

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


def gone(request: web.Request) -> web.Response:
    """The end of a request whose client hung up: nobody reads it, and nothing is to be logged."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=499)


class Homes:
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
