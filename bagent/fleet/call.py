"""Records: calls on their way through the fleet, the requests that carry them, and actions.

Actions are what is to be done after a request, a probe or a check: `ResultHandler` and
`RetryRules` decide, `Fleet` applies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import msgspec

from bagent.backends.base import Exchange, SentCall, Timeouts
from bagent.backends.request import Request
from bagent.errors import BagentError
from bagent.fleet.limits.account import NO_TOKENS, NOTHING, RequestReservation, TokenUse
from bagent.fleet.prefix_affinity import PrefixGroup
from bagent.types import NO_USAGE, Attempt, Failure, Json, Reply

if TYPE_CHECKING:
    from bagent.fleet.endpoint_state import EndpointState

BYTES_PER_TOKEN = 4
"""Estimates the tokens of a prompt that no server has counted yet."""


UNKNOWN_CONTEXT = 1 << 60
"""Stands for the context of endpoints that do not report it."""


class Delivery(msgspec.Struct, gc=False):
    """Where and when the calls of a request were answered, in Unix seconds."""

    endpoint: str
    group: str
    sent: float
    done: float
    started_at: float = 0.0
    """``sent``, rounded for outcomes; computed like the next two."""
    finished_at: float = 0.0
    """``done``, rounded for outcomes."""
    latency_ms: float = 0.0
    """Milliseconds between them."""

    def __post_init__(self) -> None:
        # Twice as fast as `round` with decimals, and the same for times.
        self.started_at, self.finished_at = (
            round(self.sent * 1e4) / 1e4,
            round(self.done * 1e4) / 1e4,
        )
        self.latency_ms = latency_ms(self.sent, self.done)


def latency_ms(sent: float, done: float) -> float:
    """Return the milliseconds between two Unix times; the clock may have been set back."""
    return round(max(0.0, done - sent) * 1e5) / 100


class CallResult(msgspec.Struct, frozen=True, gc=False):
    """How a call ended."""

    result: Reply | Failure
    delivery: Delivery | None
    """None if the call was never sent."""


Evaluate = Callable[["Call", Reply, Delivery], Failure | None]
"""Evaluates a reply; returns a passing failure to have the call retried. Must be quick."""

EndedCall = tuple["Call", CallResult]

TakeEnded = Callable[[Sequence[EndedCall]], None]
"""Takes calls that ended in one turn of the event loop."""


class Call(msgspec.Struct, eq=False):
    """A request of a row, and its history. Times are on the fleet's clock."""

    evaluate: Evaluate
    request: Request
    key: str
    row: int
    stage: str
    answer: int
    turn: int = 1
    attempts: int = 0  # HTTP requests of this turn
    counted_attempts: int = 0  # those that count against ``retries``
    stale_connections: int = 0  # attempts that met a closed keep-alive connection
    new_keys: int = 0  # attempts whose key was replaced
    throttles: int = 0  # attempts refused by a busy server
    refusals: int = 0  # endpoints that refused it and serve other calls
    deaths: int = 0  # endpoints that died while they worked on it
    in_flight: int = 0  # requests that carry it now: two while it is hedged
    hedged: bool = False  # a copy was sent, and it was not decided since then what comes next
    take_ended: TakeEnded | None = None  # takes its end; None: a future gets it
    ended: bool = False
    avoid: tuple[str, ...] = ()  # endpoints that failed it, that of the last failure last
    pinned_to: str | None = None  # the only endpoint that may serve it
    preferred: str | None = None  # the endpoint whose cache holds its conversation
    prefix_group: PrefixGroup | None = None
    group_key: Hashable = None  # calls of one key may share a request; None goes alone
    id: Json = None
    owner: object = None  # whose call it is, for what takes it when it has ended
    ready_at: float = 0.0
    waited_ms: float = 0.0
    throttled_at: float | None = None  # when a busy server first refused it
    stranded_at: float | None = None  # when it was first too long for all that serve
    deadline: float | None = None
    failed_at: float | None = None  # Unix seconds of the last failure without Retry-After
    pause: float = 0.0  # seconds between that failure and the next attempt
    unstreamed: bool | None = None  # True: streaming was given up; False: the server needs it
    divisible: bool = False  # carries several rows, which can be sent apart
    needed_context: int = 0  # context length in tokens that it needs at least, as far as is known
    min_context: int = 0  # that of the endpoints that it waits for; 0: any

    def avoid_endpoint(self, endpoint: str) -> None:
        """Send it to other endpoints than this one, as long as they have not failed it too."""
        self.avoid = (*(name for name in self.avoid if name != endpoint), endpoint)


class InFlightRequest(msgspec.Struct, eq=False):
    """One HTTP request in flight."""

    state: EndpointState
    calls: Sequence[Call]
    started: float
    attempt: int = 0  # which attempt of its first call it is, from 1
    tokens: TokenUse = NO_TOKENS  # reserved of the account's limit
    reservation: RequestReservation = NOTHING  # the account's totals at its start
    reserved_usd: float = 0.0  # of the budget, until it ends
    cost_usd: float = 0.0  # once it is sent: what it reserved, until its answer says less
    task: asyncio.Task[None] | None = None
    sent: SentCall | None = None  # set where no task sends it
    exchange: Exchange | None = None  # what came of it, once its task has it
    ended: bool = False
    cancel_reason: str = ""  # why the fleet cancelled it
    streaming: bool = False  # a part of the answer was forwarded: it cannot be sent elsewhere
    uncancellable: bool = False  # cancelled only if its endpoint is dead

    def cancel(self, reason: str) -> None:
        """Cancel the request, unless it has ended; what sends it finds ``cancel_reason``."""
        if not (self.cancel_reason or self.ended):
            self.cancel_reason = reason
            if self.sent is not None:
                self.sent.cancel()
            elif self.task is not None:  # else `begin` raises
                self.task.cancel()

    def begin(self) -> None:
        """Let the running task be the one that is cancelled; it may have been before it ran.

        Raises:
            CancelledError: the request was cancelled.
        """
        self.task = asyncio.current_task()
        if self.cancel_reason:
            raise asyncio.CancelledError
        self.cost_usd = self.reserved_usd  # it may be billed even if it is cancelled


class SuspendedCall(msgspec.Struct, frozen=True):
    """A failed call whose retry depends on whether its server works.

    It waits for a probe after a connection failure, and for a check after an answer that would end
    it.
    """

    call: Call
    failure: Failure
    delivery: Delivery
    sent: float  # when its request started
    until_probe: bool = False  # else until a check
    connected: bool = True  # a connection was made


class Complete(msgspec.Struct, eq=False):
    """Calls of a request end with replies; copies of them that are in flight are cancelled."""

    ended: list[EndedCall]


class Fail(msgspec.Struct, eq=False):
    """A call ends with a failure."""

    call: Call
    failure: Failure
    delivery: Delivery | None  # None: it was not sent


class Retry(msgspec.Struct, eq=False):
    """A call is sent again from ``at`` on."""

    call: Call
    at: float  # on the fleet's clock; `LAST`: after all other calls, alone


LAST = float("inf")


class Split(msgspec.Struct, eq=False):
    """A refused group is sent again in two halves."""

    calls: list[Call]


class Suspend(msgspec.Struct, eq=False):
    """A call waits until the endpoint that failed it was probed, or checked."""

    state: EndpointState
    suspended: SuspendedCall


class ProbeEndpoint(msgspec.Struct, eq=False):
    """An endpoint is probed; with ``block`` it gets no calls until the probe is back."""

    state: EndpointState
    block: bool


class CheckEndpoint(msgspec.Struct, eq=False):
    """An endpoint is checked by a request like this; a suspect one gets no calls meanwhile."""

    state: EndpointState
    request: Request
    suspect: bool = False


class OpenCircuit(msgspec.Struct, eq=False):
    """An endpoint gets no more calls until a check passes."""

    state: EndpointState
    fault: Failure


class StopFleet(msgspec.Struct, eq=False):
    """The fleet cannot continue."""

    error: BagentError


EndpointAction = ProbeEndpoint | CheckEndpoint | OpenCircuit
Action = Complete | Fail | Retry | Split | Suspend | EndpointAction | StopFleet


def attempt_record(
    call: Call,
    result: Reply | Failure,
    failure: Failure | None,
    exchange: Exchange,
    delivery: Delivery,
) -> Attempt:
    """Return the record of one call's part in a request; ``failure`` is its final judgement."""
    attempt = Attempt(  # a call with more than 15 keyword arguments is much slower
        key=call.key,
        row=call.row,
        stage=call.stage,
        answer=call.answer,
        turn=call.turn,
        try_=call.attempts,
        endpoint=delivery.endpoint,
        sent=exchange.sent,
        first_byte=exchange.first_byte,
        done=exchange.done,
        status_code=exchange.status,
        group=delivery.group,
        group_size=len(exchange.results),
        request_id=exchange.request_id,
        id=call.id,
    )
    attempt.first_token = exchange.first_token
    if failure is not None:
        attempt.error_kind, attempt.error = failure.kind, failure.message
    if isinstance(result, Reply) and result.usage is not NO_USAGE:
        usage = result.usage
        attempt.prompt_tokens, attempt.cached_tokens = usage.prompt, usage.cached
        attempt.completion_tokens = usage.completion
    return attempt


def urgent_calls(calls: Sequence[Call], now: float) -> list[Call]:
    """Return the calls with less than half the time of the most patient one.

    They go in a request of their own: together, their deadline would end it for all.
    """
    deadlines = [call.deadline for call in calls if call.deadline is not None]
    if len(deadlines) < 2:
        return []
    soon = now + max(0.0, max(deadlines) - now) / 2
    return [call for call in calls if call.deadline is not None and call.deadline < soon]


def timeouts_for(calls: Sequence[Call], timeouts: Timeouts, now: float) -> Timeouts:
    """Return ``timeouts`` with a total no longer than the earliest deadline of ``calls``."""
    earliest: float | None = None
    for call in calls:
        if call.deadline is not None and (earliest is None or call.deadline < earliest):
            earliest = call.deadline
    if earliest is None:
        return timeouts
    remaining = max(0.1, round(earliest - now, 1))
    if timeouts.total is not None and timeouts.total <= remaining:
        return timeouts
    return msgspec.structs.replace(timeouts, total=remaining)
