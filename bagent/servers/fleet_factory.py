"""Construction of a fleet and of its endpoints' states from a job's limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from bagent.agents.plan import STREAM_EVERY
from bagent.backend_kinds import TRAITS
from bagent.backends.base import Backend, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.engines.probe import CompletionProbe
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet, FleetConfig
from bagent.fleet.limits.account import Account
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.limits.load_feedback import LoadFeedback
from bagent.fleet.prefix_affinity import PrefixRule
from bagent.fleet.retry import RetryPolicy
from bagent.money.budget import BudgetedBackend, CallBudget
from bagent.servers.resolve import Servers
from bagent.types import Attempt, EndpointSample

if TYPE_CHECKING:
    from bagent.job.spec.job import Job

AUTO_START = 16
AUTO_CEILING = 256
"""First and highest automatic limit of requests in flight per endpoint."""

OWN_START = 64
OWN_CEILING = 1024
"""The same for the user's own engines, which queue and report what is too much. vLLM's batches hold
256 to 1024 sequences; measurements of the engine decide in between."""

FIRST_BURST = 256
"""First limits of all own engines together, where that is more than `OWN_START` for each. A lone
engine with it did 1.13 times as many short rows a second in a run of four seconds on an H200, and
1.3 times as many long ones. Several engines may differ in speed, and what a slow one is sent first
delays the end: with 256 each a simulated fleet took 2.3 times the ideal time, with 64 each 1.1."""

MOST_IN_FLIGHT = 65_536
"""Most rows in flight over a whole fleet by default; each takes about 15 KB of memory."""

FIRST_EXPECTED = (16, 256)
"""Bounds of the first estimate of answer tokens per row, which is half of max_tokens."""

NO_CAP = 1e9
"""Seconds that stand for no cap on a server's retry-after."""

SEED = 20_240_229
"""Seed of the jitter of retries, so that runs are repeatable."""

LOOKAHEAD = 256
MOST_AHEAD = 8192
"""Most ready rows, alone and in batches: enough to fill a batch for every endpoint."""


class LimitShare(NamedTuple):
    """The share of one of several processes in the limits of endpoints."""

    part: int = 0
    """The number of the process, from 0 on."""

    parts: int = 1

    def of(self, limit: int, position: int) -> int:
        """Return the share in the limit of the endpoint at ``position``, at least 1.

        The processes get the remainder in turns from one endpoint to the next, so that none has
        less over all endpoints and ends later.
        """
        remainder = limit % self.parts
        extra = (self.part - position * remainder) % self.parts < remainder
        return max(1, limit // self.parts + extra)


ALONE = LimitShare()


class EndpointStateFactory:
    """Makes the states of endpoints: limit, weight and shared account.

    Args:
        max_in_flight: rows in flight over the whole run.
        accounts: accounts by name, shared with the run's other fleets.
        share: that of this process in limits of endpoints.
    """

    def __init__(
        self,
        job: Job,
        servers: Servers,
        rule: BatchSizeRule,
        max_in_flight: int,
        accounts: dict[str, Account] | None = None,
        share: LimitShare = ALONE,
    ) -> None:
        self._share = share
        self._count = 0
        self._limits = job.limits
        self._model = job.model
        self._servers = servers
        self._rule = rule
        self._max_in_flight = max_in_flight
        self._accounts: dict[str, Account] = {} if accounts is None else accounts

    def states(self, endpoints: Sequence[Endpoint]) -> list[EndpointState]:
        """Return the states of endpoints that join now."""
        return [self._state(endpoint) for endpoint in endpoints]

    def _state(self, endpoint: Endpoint) -> EndpointState:
        limits = self._limits
        # Limits per minute that the user set apply to all endpoints of the run together.
        name = "" if limits.rpm or limits.tpm else endpoint.account
        if name and not endpoint.own:
            name += f" {self._model}"  # providers count each model by itself
        account = self._accounts.get(name)
        if account is None:
            account = Account(
                limits.rpm,
                limits.tpm,
                limits.retry_after_max or NO_CAP,
                hosted=not endpoint.own,
            )
            self._accounts[name] = account
        limit, adapts = self._limit(endpoint)
        self._count += 1
        feedback = LoadFeedback() if adapts and endpoint.own else None
        return EndpointState(endpoint, limit, account, weight=endpoint.weight, feedback=feedback)

    def _limit(self, endpoint: Endpoint) -> tuple[InFlightLimit, bool]:
        """Return the limit of an endpoint, and whether it adapts."""
        per_endpoint, concurrency = self._limits.per_endpoint, self._limits.concurrency
        tag = endpoint.tags.get("max_concurrency")
        cap = self._share.of(int(tag), self._count) if tag else self._max_in_flight
        if per_endpoint != "auto":
            limit = min(cap, self._share.of(int(per_endpoint), self._count))
        elif "max_concurrency" in endpoint.tags:
            limit = cap
        elif concurrency != "auto":
            limit = min(cap, self._max_in_flight)
        elif self._servers.slots is not None:
            # More requests than twice the slots would only wait inside an embedded engine.
            limit = min(cap, self._servers.slots * 2)
        else:
            start, ceiling = auto_limits(self._servers, self._rule)
            weight = endpoint.weight
            highest = max(1, min(cap, round(ceiling * weight)))
            first = min(highest, max(1, round(start * weight)))
            return InFlightLimit(first, highest), True
        return InFlightLimit(limit, limit, growing=False), False


def auto_limits(servers: Servers, rule: BatchSizeRule) -> tuple[int, int]:
    """Return the first and the highest limit of an endpoint, where the user names none."""
    traits = TRAITS[servers.kind]
    large = traits.own and traits.groups_rows
    start, ceiling = (OWN_START, OWN_CEILING) if large else (AUTO_START, AUTO_CEILING)
    share = MOST_IN_FLIGHT // max(1, len(servers.endpoints))
    if large:
        start = max(start, FIRST_BURST // max(1, len(servers.endpoints)))
    start = max(AUTO_START, min(start, share))
    size = rule.size or 0
    return max(start, 2 * size), max(ceiling, 4 * size)


def make_batch_size_rule(job: Job, servers: Servers) -> BatchSizeRule:
    """Return whether and how rows share requests; by default on the user's own engines."""
    batching = job.batching
    size = None if batching.size == "auto" else int(batching.size)
    single = batching.mode == "single" or batching.in_batches or size == 1
    if batching.mode == "auto":
        hosted = bool(servers.endpoints) and not any(each.own for each in servers.endpoints)
        single |= hosted or not TRAITS[servers.kind].groups_rows
    return BatchSizeRule(size, single, STREAM_EVERY if job.stream == "auto" else 0)


def make_timeouts(job: Job) -> Timeouts:
    """Return the time limits of one request."""
    limits = job.limits.timeout
    return Timeouts(limits.connect, limits.first_token, limits.idle, limits.total)


def make_fleet(
    job: Job,
    servers: Servers,
    backend: Backend,
    *,
    handles: int,
    on_attempts: Callable[[Sequence[Attempt]], None],
    on_sample: Callable[[EndpointSample], None],
    notice: Callable[[str], None],
    accounts: dict[str, Account] | None = None,
    share: LimitShare = ALONE,
) -> tuple[Fleet, EndpointStateFactory]:
    """Make the fleet over ``servers``, and the factory for endpoints that join later.

    Args:
        handles: how many connections may be open.
        accounts: shared with the run's other fleets, so that limits per minute apply to all.
        share: that of this process in limits of endpoints.
    """
    limits = job.limits
    rule = make_batch_size_rule(job, servers)
    max_in_flight = _max_in_flight(job, servers, rule, handles, notice)
    hedge = limits.hedge
    check = CompletionProbe(backend).check
    budget: CallBudget | None = None
    if isinstance(backend, BudgetedBackend):  # the fleet admits its calls itself
        budget, backend = backend.budget, backend.inner
    config = FleetConfig(
        concurrency=max_in_flight,
        timeouts=make_timeouts(job),
        retry=RetryPolicy(retries=limits.retries, retry_after_max=limits.retry_after_max or NO_CAP),
        lookahead=min(LOOKAHEAD if rule.single else MOST_AHEAD, max(16, max_in_flight)),
        group=rule,
        first_expected=_first_expected(job),
        hedge=None if hedge in ("off", None) else 0.0 if hedge == "auto" else float(hedge),
        connections=handles,
        prefix=PrefixRule(job.batching.prefix),
        budget=budget,
    )
    state_factory = EndpointStateFactory(job, servers, rule, max_in_flight, accounts, share)
    fleet = Fleet(
        state_factory.states(servers.endpoints),
        backend,
        config,
        on_attempts=on_attempts,
        on_sample=on_sample,
        notice=notice,
        random=Random(SEED),
        check=check,
    )
    return fleet, state_factory


def _max_in_flight(
    job: Job, servers: Servers, rule: BatchSizeRule, handles: int, notice: Callable[[str], None]
) -> int:
    """Return how many rows may be in flight over the whole fleet."""
    limits = job.limits
    start, ceiling = auto_limits(servers, rule)
    count = len(servers.endpoints)
    max_in_flight = min(ceiling * count, max(MOST_IN_FLIGHT, start * count))
    if limits.concurrency != "auto":
        max_in_flight = int(limits.concurrency)
    if max_in_flight > handles:
        if limits.concurrency != "auto":
            notice(
                f"only {handles} connections can be open (ulimit -n);"
                f" as many requests are in flight at once, not {max_in_flight}"
            )
        # Rows that share requests need fewer connections.
        max_in_flight = handles if rule.single else max_in_flight
    return max_in_flight


def _first_expected(job: Job) -> float:
    low, high = FIRST_EXPECTED
    return float(max(low, min(high, (job.sampling.max_tokens or high) // 2)))
