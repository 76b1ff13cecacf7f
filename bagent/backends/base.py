"""The interface between the fleet and a backend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.http.rate_limit_headers import RateLimits
from bagent.backends.request import Request
from bagent.types import Failure, Reply

TOO_LONG = 1 << 40
"""Token count of a prompt that exceeds the endpoint's context and was not counted."""


class Timeouts(msgspec.Struct, frozen=True):
    """Limits of one request in seconds; None disables a limit."""

    connect: float | None = 10.0
    first_token: float | None = 300.0
    """Until the first token of a streamed call."""
    idle: float | None = 120.0
    """Between two chunks of a streamed call."""
    total: float | None = 1800.0
    """The whole request from its start."""


Ask = Callable[[Endpoint, str, bytes, Timeouts], Awaitable[tuple[int, bytes] | Failure]]
"""Posts a body to a path below an endpoint's address; returns (status, body) or the failure."""


class Exchange(msgspec.Struct):
    """One HTTP request that carried a group of calls, and its outcome. Times are Unix seconds."""

    results: list[Reply | Failure]
    """One result per call, in the group's order."""
    sent: float
    first_byte: float | None = None
    first_token: float | None = None
    done: float = 0.0
    status: int | None = None
    request_id: str | None = None
    stale_connection: bool = False
    """A keep-alive connection had been closed before the request arrived."""
    learned: bool = False
    """The endpoint wants another form, which the next request uses."""
    new_key: bool = False
    """The key was refused; the next request uses a newer one, which is there or is got first."""
    connected: bool = True
    """False if no connection was made."""
    withheld: bool = False
    """It was not sent: the endpoint does not take such a group any more."""
    cut: bool = False
    """The response was truncated."""
    limits: RateLimits | None = None
    """The account's limits in the response headers."""

    @property
    def repeatable(self) -> bool:
        """Whether the same request may fare better at once."""
        return self.stale_connection or self.learned or self.new_key


class Backend(Protocol):
    """A provider's wire protocol: sends requests and parses replies.

    ``send`` does not raise for errors of the server or the network: they are returned as
    :class:`~bagent.types.Failure`. Cancel it to abandon a request.
    """

    def group_key(self, request: Request) -> Hashable | None:
        """Return what requests must share to travel in one HTTP request; None: never grouped."""
        ...

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """Return how many calls like this one may share a request, at least 1.

        None means not known yet: call :meth:`learn`.
        """
        ...

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Find out how the endpoint accepts groups of calls like ``samples``. Never raises for what
        a server does."""
        ...

    def forget(self, endpoint: Endpoint) -> None:
        """Discard what was learned of the endpoint: it restarted and may be another server."""
        ...

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send ``group`` (same settings, at least one call) as one request; return when it ends."""
        ...

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """Ask the endpoint what it serves, without a generation, within ``seconds``."""
        ...

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """Return the endpoint's own token count of the prompt, without a generation.

        None if it does not report one within ``seconds``, :data:`TOO_LONG` if the prompt exceeds
        its context.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class SentCall(msgspec.Struct, eq=False):
    """A call on its way that no task waits for."""

    cancel: Callable[[], None]
    """Abandons it; its end is reported in the next turn of the event loop."""
    exchange: Callable[[], Exchange]
    """Returns what came of it. Call it once, after its end was reported."""


@runtime_checkable
class DirectBackend(Protocol):
    """A backend that can send a call without a task. The task takes half of the time of sending."""

    def send_now(
        self,
        endpoint: Endpoint,
        request: Request,
        timeouts: Timeouts,
        on_end: Callable[[], None],
    ) -> SentCall | None:
        """Send one call, and have ``on_end`` called at its end.

        Return None, and send nothing, if the call needs :meth:`Backend.send`.
        """
        ...
