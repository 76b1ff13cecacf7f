"""A fleet over a backend that does what the test says, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.http.rate_limit_headers import RateLimits
from bagent.backends.request import CallSettings, Request
from bagent.fleet.call import Call, CallResult, Delivery
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet, FleetConfig
from bagent.fleet.limits.account import Account
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.types import Attempt, EndpointSample, Failure, Reply
from support.jumping_loop import run_jumping

SETTINGS = CallSettings(model="m", sampling={}, extra={})
GOOD = Reply(text="yes", finish_reason="stop")
REFUSED = Failure("connect", "connection refused", passing=True)
BROKEN = Failure("overloaded", "HTTP 500", passing=True, status=500)
LASTING = Failure("rejected", "HTTP 400", status=400)
FULL = Failure("overloaded", "HTTP 503: busy", passing=True, status=503, busy=True)


def throttled(told: float | None = None) -> Failure:
    """A 429, with the wait that it asks for."""
    return Failure("rate_limited", "HTTP 429", True, 429, told, busy=True)


@dataclass
class Answer:
    """What one request comes to, ``seconds`` after it was sent."""

    result: Reply | Failure = GOOD
    seconds: float = 1.0
    stale_connection: bool = False
    gate: asyncio.Event | None = None
    limits: RateLimits | None = None


Script = Callable[[int, int], Answer]
"""(row, how often the endpoint was asked before) -> answer."""


def always(result: Reply | Failure = GOOD, seconds: float = 1.0) -> Script:
    """The same answer to everything."""
    return lambda row, number: Answer(result, seconds)


@dataclass
class ScriptedBackend:
    """Answers by endpoint name; counts what is sent where and how much is out at once."""

    scripts: dict[str, Script]
    probes: dict[str, Callable[[int], Capabilities | Failure]] = field(default_factory=dict)
    sent: list[tuple[float, str, int]] = field(default_factory=list)
    timeouts: list[Timeouts] = field(default_factory=list)
    probed: list[tuple[float, str]] = field(default_factory=list)
    out: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    checked: list[tuple[float, str]] = field(default_factory=list)
    cancelled: int = 0
    by_rows: Callable[[list[int]], Reply | Failure] | None = None
    limits: dict[str, int | None] = field(default_factory=dict)
    learns: dict[str, int] = field(default_factory=dict)
    learned: list[tuple[str, int]] = field(default_factory=list)
    groups: list[tuple[str, list[int]]] = field(default_factory=list)
    begins_after: float | None = None
    counts: dict[str, Callable[[int], int | None]] = field(default_factory=dict)
    counted: list[tuple[str, int]] = field(default_factory=list)
    count_seconds: float = 0.5

    @property
    def shares(self) -> Counter[str]:
        """How many requests each endpoint got."""
        return Counter(name for _, name, _ in self.sent)

    def times(self, row: int) -> list[float]:
        """When the row was sent."""
        return [at for at, _, sent in self.sent if sent == row]

    def group_key(self, request: Request) -> Hashable | None:
        """Calls of this backend may all travel together."""
        return "all"

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """As ``limits`` says; by default one call a request."""
        return self.limits.get(endpoint.name, 1)

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Find out the limit that stands in ``learns``."""
        self.learned.append((endpoint.name, len(samples)))
        await asyncio.sleep(0.5)
        self.limits[endpoint.name] = self.learns.get(endpoint.name, 1)

    def forget(self, endpoint: Endpoint) -> None:
        """Nothing needs to be forgotten."""

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """As ``counts`` says, half a second later; no endpoint tells without an entry."""
        self.counted.append((endpoint.name, int(request.payload)))
        await asyncio.sleep(self.count_seconds)
        return self.counts.get(endpoint.name, lambda row: None)(int(request.payload))

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Answer as the endpoint's script says."""
        loop = asyncio.get_running_loop()
        name, row, started = endpoint.name, int(group[0].payload), loop.time()
        number = self.shares[name] if len(self.scripts) > 1 else len(self.sent)
        rows = [int(request.payload) for request in group]
        self.groups.append((name, rows))
        self.sent.extend((started, name, one) for one in rows)
        self.timeouts.append(timeouts)
        answer = self.scripts[name](row, number)
        if group[0].stream and group[0].began is not None and self.begins_after is not None:
            loop.call_later(self.begins_after, group[0].began)
        for key in (name, "all"):
            self.out[key] += 1
            self.peak[key] = max(self.peak[key], self.out[key])
        try:
            if answer.gate is not None:
                await answer.gate.wait()
            elif answer.seconds:
                await asyncio.sleep(answer.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            for key in (name, "all"):
                self.out[key] -= 1
        result = answer.result if self.by_rows is None else self.by_rows(rows)
        exchange = self.exchange(result, len(group), started)
        exchange.stale_connection, exchange.limits = answer.stale_connection, answer.limits
        return exchange

    def exchange(self, result: Reply | Failure, count: int, sent: float) -> Exchange:
        """The end of a request of ``count`` calls that all have this result."""
        status = 200 if isinstance(result, Reply) else result.status
        done = asyncio.get_running_loop().time()
        connected = result != REFUSED
        return Exchange([result] * count, sent, done=done, status=status, connected=connected)

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """Answer as ``probes`` says; without an entry the endpoint is well."""
        self.probed.append((asyncio.get_running_loop().time(), endpoint.name))
        await asyncio.sleep(0.1)
        found = self.probes.get(endpoint.name)
        return found(len(self.probed)) if found else Capabilities()

    async def check(self, endpoint: Endpoint, request: Request | None) -> Failure | None:
        """Answer a row of its own, 10**6, as the script says; it is no call."""
        self.checked.append((asyncio.get_running_loop().time(), endpoint.name))
        answer = self.scripts[endpoint.name](10**6, self.shares[endpoint.name])
        if answer.gate is not None:
            await answer.gate.wait()
        await asyncio.sleep(answer.seconds)
        return answer.result if isinstance(answer.result, Failure) else None

    async def close(self) -> None:
        """Nothing to close."""


@dataclass
class Recorder:
    """Takes the ends of calls."""

    replies: dict[int, Delivery] = field(default_factory=dict)
    failures: dict[int, tuple[Failure, Delivery | None]] = field(default_factory=dict)
    started_at: dict[int, float] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)
    on_reply: Callable[[Call, Reply], Failure | None] = lambda call, reply: None

    def evaluate(self, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Evaluate a reply as the test says."""
        return self.on_reply(call, reply)

    def request(self, fleet: Fleet, call: Call, *, urgent: bool = False) -> None:
        """Request a call and note its end."""
        future = fleet.request(call, urgent=urgent)
        future.add_done_callback(lambda future: self._ended(call, future))

    def _ended(self, call: Call, future: asyncio.Future[CallResult]) -> None:
        if future.cancelled():
            return
        end = future.result()
        assert call.row not in self.ended_at, f"row {call.row} ended twice"
        self.ended_at[call.row] = asyncio.get_running_loop().time()
        if isinstance(end.result, Failure):
            self.failures[call.row] = end.result, end.delivery
        else:
            assert end.delivery is not None
            self.replies[call.row] = end.delivery


@dataclass
class Setup:
    """A fleet with everything that it talks to."""

    fleet: Fleet
    backend: ScriptedBackend
    states: list[EndpointState]
    account: Account
    recorder: Recorder
    attempts: list[Attempt]
    notices: list[str]
    samples: list[EndpointSample]

    def call(self, row: int, **fields: Any) -> Call:
        """A call for a row."""
        request = Request(SETTINGS, b"%d" % row)
        return Call(self.recorder.evaluate, request, f"k{row}", row, "map", 0, **fields)

    def request(self, call: Call, *, urgent: bool = False) -> None:
        """Request a call; the recorder notes its end."""
        self.recorder.request(self.fleet, call, urgent=urgent)

    async def feed(self, count: int, row_seconds: float | None = None) -> None:
        """Submit rows as a reader does: each when there is room."""
        for row in range(count):
            await self.fleet.wait_for_room()
            now = asyncio.get_running_loop().time()
            end = None if row_seconds is None else now + row_seconds
            self.recorder.started_at[row] = now
            self.request(self.call(row, deadline=end))

    def submit(self, *rows: int, **fields: Any) -> None:
        """Submit the calls of these rows at once."""
        for row in rows:
            self.request(self.call(row, **fields))

    async def run(
        self,
        count: int,
        row_seconds: float | None = None,
        *,
        announced: bool = False,
        ticks: bool = False,
    ) -> None:
        """Feed rows and wait for their ends; a reason to stop is raised.

        Args:
            count: the rows to feed.
            row_seconds: the time limit of each row.
            announced: the fleet knows that more rows come, until the last one is there.
            ticks: tick as a session does.
        """
        self.fleet.expect(announced)
        ticker = asyncio.ensure_future(ticking(self)) if ticks else None
        await self.finish(self.feed(count, row_seconds))
        if ticker is not None:
            ticker.cancel()

    async def finish(self, feeding: Coroutine[Any, Any, None]) -> None:
        """Wait for the last row and the ends of all; a reason to stop is raised."""

        async def whole() -> None:
            await feeding
            self.fleet.expect(False)
            await self.fleet.wait_idle()

        work = asyncio.ensure_future(whole())
        await asyncio.wait([work, self.fleet.stopped], return_when=asyncio.FIRST_COMPLETED)
        if self.fleet.stopped.done():
            work.cancel()
            raise self.fleet.stopped.result()
        await work

    def tries(self) -> Counter[int]:
        """How many attempts were recorded for each row."""
        return Counter(attempt.row for attempt in self.attempts)


def setup(
    scripts: dict[str, Script],
    *,
    limit: int = 8,
    growing: bool = False,
    per_minute: float | None = None,
    probes: dict[str, Callable[[int], Capabilities | Failure]] | None = None,
    own_accounts: bool = False,
    hosted: bool = False,
    weights: Mapping[str, float] = MappingProxyType({}),
    limits: dict[str, int | None] | None = None,
    learns: dict[str, int] | None = None,
    backend: ScriptedBackend | None = None,
    states: list[EndpointState] | None = None,
    **config: Any,
) -> Setup:
    """A fleet of one endpoint per script, or of ``states``; call it inside the loop."""
    backend = backend or ScriptedBackend(
        scripts, probes or {}, limits=limits or {}, learns=learns or {}
    )
    account = Account(per_minute, None, 120.0, hosted=hosted)
    states = states or [
        EndpointState(
            Endpoint(name, f"http://{name}/v1"),
            InFlightLimit(limit, 1000, growing=growing),
            Account(per_minute, None, 120.0) if own_accounts else account,
            weight=weights.get(name, 1.0),
        )
        for name in scripts
    ]
    config.setdefault("concurrency", 1000)
    attempts: list[Attempt] = []
    notices: list[str] = []
    samples: list[EndpointSample] = []
    fleet = Fleet(
        states,
        backend,
        FleetConfig(**config),
        on_attempts=attempts.extend,
        notice=notices.append,
        random=Random(1),
        on_sample=samples.append,
        check=backend.check,
    )
    return Setup(fleet, backend, states, account, Recorder(), attempts, notices, samples)


async def ticking(s: Setup) -> None:
    """What a session does beside the rows, until cancelled."""
    while True:
        await asyncio.sleep(0.25)
        s.fleet.tick()


def run_rows(
    scripts: dict[str, Script],
    count: int,
    *,
    row_seconds: float | None = None,
    announced: bool = False,
    ticks: bool = False,
    **options: Any,
) -> Setup:
    """Run ``count`` rows to their ends on a clock that jumps; returns the fleet after it.

    The arguments are those of :func:`setup` and :meth:`Setup.run`.
    """

    async def main() -> Setup:
        s = setup(scripts, **options)
        await s.run(count, row_seconds, announced=announced, ticks=ticks)
        return s

    return run_jumping(main())
