"""One model call on its way through the fleet, and the request that carries it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.request import Request
from bagent.fleet.limits.account import NO_TOKENS, NOTHING, Account, RequestReservation, TokenUse
from bagent.fleet.prefix_affinity import PrefixGroup
from bagent.types import Attempt, Failure, Json, Reply

if TYPE_CHECKING:
    from bagent.fleet.endpoint_state import EndpointState

BYTES_PER_TOKEN = 4
"""For what a call will take of an account's tokens a minute, before the server has told."""


class Delivery(msgspec.Struct, frozen=True):
    """How the answer to a call came: Unix seconds, and milliseconds waited for a free slot."""

    endpoint: str
    group: str
    sent: float
    done: float
    queue_ms: float


class CallHandler(Protocol):
    """What wants to know how its call ended. Both methods run on the event loop; they are quick."""

    def replied(self, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Take a reply; return a passing failure to have the call sent again as if it failed."""
        ...

    def failed(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        """Take the failure that ends the call; no delivery means that it was never sent."""
        ...


class Call(msgspec.Struct, eq=False):
    """A request with whom it is for and what has happened to it so far.

    ``tries`` counts HTTP requests of this turn, ``counted`` those that cost the row a try,
    ``free`` those found on a closed connection, ``throttles`` those that met a full server,
    ``refusals`` endpoints that would not have it, ``deaths`` endpoints that died of it or with it.
    ``out`` is how many requests carry it now: two where it was hedged. ``avoid`` names the
    endpoint that failed it last, ``only`` the one that may have it (None: any), ``prefer`` the one
    whose cache holds what comes before it, ``family`` those that begin as it does. Calls of one
    ``group_key`` may share a request; None goes alone. ``ready_at``, ``throttled_at`` and
    ``give_up_at`` are on the fleet's monotonic clock. ``failed_at`` is when it failed last without
    being told when to come back (Unix seconds), ``pause`` the seconds that then passed until it
    was sent. ``whole`` says that it is no longer streamed, False that the server refused that.
    One that is ``divisible`` holds several rows' texts, which are divided where it fails twice.
    ``least`` is the context in tokens that an endpoint needs for it, 0 where any will do.
    """

    handler: CallHandler
    request: Request
    key: str
    row: int
    stage: str
    answer: int
    turn: int = 1
    tries: int = 0
    counted: int = 0
    free: int = 0
    throttles: int = 0
    refusals: int = 0
    deaths: int = 0
    out: int = 0
    ended: bool = False
    avoid: str | None = None
    only: str | None = None
    prefer: str | None = None
    family: PrefixGroup | None = None
    group_key: Hashable = None
    id: Json = None
    ready_at: float = 0.0
    waited_ms: float = 0.0
    throttled_at: float | None = None
    give_up_at: float | None = None
    failed_at: float | None = None
    pause: float = 0.0
    whole: bool | None = None
    divisible: bool = False
    least: int = 0


class InFlightRequest(msgspec.Struct, eq=False):
    """One HTTP request in flight. ``started`` is on the fleet's clock; ``tokens`` were reserved of
    the account's limit, which stood at ``mark`` then; ``given_up`` says why the fleet ended it.
    ``begun`` says that a part of its answer has been passed on: it can not be had elsewhere any
    more. One that ``stays`` is given up only where its endpoint is dead."""

    state: EndpointState
    group: list[Call]
    started: float
    tokens: TokenUse = NO_TOKENS
    mark: RequestReservation = NOTHING
    task: asyncio.Task[None] | None = None
    given_up: str = ""
    begun: bool = False
    stays: bool = False

    def give_up(self, why: str) -> None:
        """End it; whoever carries it is cancelled, and finds the reason here."""
        if self.task is not None and not self.given_up:
            self.given_up = why
            self.task.cancel()

    def begin(self, account: Account) -> None:
        """Count the request at its calls, and take it, and what they are thought to need, from
        the account."""
        for call in self.group:
            call.tries += 1
            call.out += 1
            if call.out == 1:
                call.waited_ms += (self.started - call.ready_at) * 1000
        if account.counts_tokens:
            for call in self.group:
                asked = call.request
                prompt = len(asked.payload) // BYTES_PER_TOKEN
                self.tokens += account.estimate(prompt, asked.max_tokens)
        self.mark = account.started(self.started, self.tokens)


def attempt_record(
    call: Call,
    result: Reply | Failure,
    failure: Failure | None,
    exchange: Exchange,
    delivery: Delivery,
) -> Attempt:
    """The record of one call's part in one request; ``failure`` is what it came to."""
    usage = result.usage if isinstance(result, Reply) else None
    return Attempt(
        key=call.key,
        row=call.row,
        stage=call.stage,
        answer=call.answer,
        turn=call.turn,
        try_=call.tries,
        endpoint=delivery.endpoint,
        group=delivery.group,
        group_size=len(exchange.results),
        sent=exchange.sent,
        first_byte=exchange.first_byte,
        first_token=exchange.first_token,
        done=exchange.done,
        status_code=exchange.status,
        error_kind=failure.kind if failure else None,
        error=failure.message if failure else None,
        prompt_tokens=usage.prompt if usage else None,
        cached_tokens=usage.cached if usage else None,
        completion_tokens=usage.completion if usage else None,
        request_id=exchange.request_id,
        id=call.id,
    )


def in_a_hurry(group: Sequence[Call], now: float) -> list[Call]:
    """Those of a group that have less than half the time of another: in one request with the
    others they would end it for all. Empty where all go together."""
    ends = [call.give_up_at for call in group if call.give_up_at is not None]
    if len(ends) < 2:
        return []
    soon = now + max(0.0, max(ends) - now) / 2
    return [call for call in group if call.give_up_at is not None and call.give_up_at < soon]


def timeouts_for(group: Sequence[Call], timeouts: Timeouts, now: float) -> Timeouts:
    """The limits of a request that carries ``group``: no longer than its rows' own limits leave."""
    end: float | None = None
    for call in group:
        if call.give_up_at is not None and (end is None or call.give_up_at < end):
            end = call.give_up_at
    if end is None:
        return timeouts
    left = max(0.1, round(end - now, 1))
    if timeouts.total is not None and timeouts.total <= left:
        return timeouts
    return msgspec.structs.replace(timeouts, total=left)
