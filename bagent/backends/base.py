"""What the fleet asks of a backend."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import msgspec

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.http.rate_limit_headers import RateLimits
from bagent.backends.request import Request
from bagent.types import Failure, Reply

TOO_LONG = 1 << 40
"""Stands for the tokens of a prompt that an endpoint does not count because its context is less."""


class Timeouts(msgspec.Struct, frozen=True):
    """Limits of one request in seconds; None is no limit.

    ``total`` bounds the whole request from its start. ``first_token`` and ``idle`` hold for
    streamed calls only: until the first piece of an answer, and between two pieces.
    """

    connect: float | None = 10.0
    first_token: float | None = 300.0
    idle: float | None = 120.0
    total: float | None = 1800.0


class Exchange(msgspec.Struct):
    """One HTTP request that carried a group of calls, and what came of it.

    ``results`` has one entry per call, in the group's order. ``again`` is True when sending the
    same calls once more is worth it and costs them no try: a kept-open connection was found
    closed. ``learned`` is True when the endpoint was seen to want a parameter in another form,
    and will be asked in that form. ``connected`` is False where no connection could be made,
    ``cut`` True where the answer broke off.
    ``limits`` are the account's limits as the answer's headers tell them. Times are Unix seconds.
    """

    results: list[Reply | Failure]
    sent: float
    first_byte: float | None = None
    first_token: float | None = None
    done: float = 0.0
    status: int | None = None
    request_id: str | None = None
    again: bool = False
    learned: bool = False
    connected: bool = True
    cut: bool = False
    limits: RateLimits | None = None


class Backend(Protocol):
    """One provider's wire protocol: requests out, replies in.

    ``send`` never raises for what a server or the network does: that is a
    :class:`~bagent.types.Failure` in the results. It is cancelled to give a request up.
    """

    def group_key(self, request: Request) -> Hashable | None:
        """What requests must share to travel in one HTTP request; None goes alone."""
        ...

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """How many calls like this one may share a request to this endpoint, at least 1.

        None is not known yet: :meth:`learn` finds out.
        """
        ...

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Find out how the endpoint takes groups of calls like ``samples``; never raises for what
        a server does."""
        ...

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint came back, maybe as another: what was learned of it no longer holds."""
        ...

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send ``group`` (same settings, at least one) as one request and wait for its end."""
        ...

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """Ask the endpoint, without a generation, what it serves; within ``seconds``."""
        ...

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """The tokens of the request's prompt as the endpoint counts them; None: it does not tell,
        :data:`TOO_LONG`: more than its context.

        Nothing is generated for it, and it is over after ``seconds``.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
