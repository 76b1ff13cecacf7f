"""From a job's limits and the servers found to a fleet, and to endpoints that join it later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from random import Random
from typing import TYPE_CHECKING

from bagent.agents.plan import STREAM_EVERY
from bagent.backends.base import Backend, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet, FleetConfig
from bagent.fleet.limits.account import Account
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.limits.load_feedback import LoadFeedback
from bagent.fleet.prefix_affinity import PrefixRule
from bagent.fleet.retry import RetryPolicy
from bagent.fleet.state import ResultContext
from bagent.servers.resolve import Servers
from bagent.types import Attempt, EndpointSample

if TYPE_CHECKING:
    from bagent.job.spec.job import Job

AUTO_START = 16
AUTO_CEILING = 256
"""In flight per endpoint where the user names no number."""

OWN_START = 64
OWN_CEILING = 1024
"""The same for engines of the user's own: they queue what is too much and tell so, and vLLM's
batches end at 256 to 1024 sequences. What is measured of the engine decides in between."""

MOST_IN_FLIGHT = 65_536
"""Rows in flight over a whole fleet where the user names no number: each takes some 15 KB here."""

FIRST_EXPECTED = (16, 256)
"""Bounds of what a row is first thought to answer, half its max_tokens, until some have."""

NO_CAP = 1e9
"""Seconds that stand for no cap on a wait that a server asks for."""

SEED = 20_240_229
"""Seed of the spread of retries: runs are repeatable, and no two waits are alike anyway."""

LOOKAHEAD = 256
MOST_AHEAD = 8192
"""Rows that may stand ready: enough to fill a group for each of a large fleet's endpoints."""


class EndpointStateFactory:
    """Makes an endpoint's state: its limit, its weight, and the account that it shares.

    Args:
        most: rows in flight over the whole run.
        accounts: those that other fleets of the run use too, by name.
    """

    def __init__(
        self,
        job: Job,
        servers: Servers,
        rule: BatchSizeRule,
        most: int,
        accounts: dict[str, Account] | None = None,
    ) -> None:
        self._limits = job.limits
        self._model = job.model
        self._servers = servers
        self._rule = rule
        self._most = most
        self._accounts: dict[str, Account] = {} if accounts is None else accounts

    def states(self, endpoints: Sequence[Endpoint]) -> list[EndpointState]:
        """The states of endpoints that begin to work now."""
        return [self._state(endpoint) for endpoint in endpoints]

    def _state(self, endpoint: Endpoint) -> EndpointState:
        limits = self._limits
        # Limits a minute that the user set hold over all endpoints of the run.
        name = "" if limits.rpm or limits.tpm else endpoint.account
        if name and not endpoint.own:
            name += f" {self._model}"  # providers count each model by itself
        account = self._accounts.get(name)
        if account is None:
            longest = limits.retry_after_max or NO_CAP
            account = Account(limits.rpm, limits.tpm, longest, hosted=not endpoint.own)
            self._accounts[name] = account
        limit, growing = self._limit(endpoint)
        state = EndpointState(endpoint, limit, account, weight=endpoint.weight)
        if growing and endpoint.own:
            state.feedback = LoadFeedback()
        return state

    def _limit(self, endpoint: Endpoint) -> tuple[InFlightLimit, bool]:
        """The limit of an endpoint, and whether it finds its own height."""
        given, concurrency = self._limits.per_endpoint, self._limits.concurrency
        cap = int(endpoint.tags.get("max_concurrency") or self._most)
        if given != "auto":
            most = min(cap, int(given))
        elif "max_concurrency" in endpoint.tags:
            most = cap
        elif concurrency != "auto":
            most = min(cap, self._most)
        elif self._servers.slots is not None:
            # More than the slots of an embedded engine would only wait inside it.
            most = min(cap, self._servers.slots * 2)
        else:
            start, ceiling = auto_limits(self._servers, self._rule)
            weight = endpoint.weight
            top = max(1, min(cap, round(ceiling * weight)))
            return InFlightLimit(min(top, max(1, round(start * weight))), top), True
        return InFlightLimit(most, most, growing=False), False


def auto_limits(servers: Servers, rule: BatchSizeRule) -> tuple[int, int]:
    """The first limit of an endpoint, and the highest, where the user names none."""
    own = servers.own and servers.kind not in ("local", "compatible")
    start, ceiling = (OWN_START, OWN_CEILING) if own else (AUTO_START, AUTO_CEILING)
    share = MOST_IN_FLIGHT // max(1, len(servers.endpoints))
    start = max(AUTO_START, min(start, share))
    size = rule.size or 0
    return max(start, 2 * size), max(ceiling, 4 * size)


def make_batch_size_rule(job: Job, servers: Servers) -> BatchSizeRule:
    """Whether and how rows travel together: on engines of the user's own, unless told otherwise."""
    batching = job.batching
    size = None if batching.size == "auto" else int(batching.size)
    single = batching.mode in ("single", "provider") or size == 1
    if batching.mode == "auto":
        single |= not servers.own or servers.kind == "local"
    return BatchSizeRule(size, single, STREAM_EVERY if job.stream == "auto" else 0)


def make_timeouts(job: Job) -> Timeouts:
    """The time limits of one request."""
    limits = job.limits.timeout
    return Timeouts(limits.connect, limits.first_token, limits.idle, limits.total)


def make_fleet(
    job: Job,
    servers: Servers,
    backend: Backend,
    *,
    handles: int,
    on_attempt: Callable[[Attempt], None],
    on_sample: Callable[[EndpointSample], None],
    notice: Callable[[str], None],
    accounts: dict[str, Account] | None = None,
    result_context: ResultContext = nullcontext,
) -> tuple[Fleet, EndpointStateFactory]:
    """The fleet over the servers, and who takes in more; ``handles`` connections may be open.

    ``accounts`` are shared with the run's other fleets: limits a minute hold over all of them.
    ``result_context`` surrounds the ends of all calls of one request.
    """
    limits = job.limits
    rule = make_batch_size_rule(job, servers)
    wanted = limits.concurrency
    start, ceiling = auto_limits(servers, rule)
    count = len(servers.endpoints)
    most = min(ceiling * count, max(MOST_IN_FLIGHT, start * count))
    if wanted != "auto":
        most = int(wanted)
    if most > handles:
        if wanted != "auto":
            notice(
                f"only {handles} connections can be open (ulimit -n);"
                f" as many requests are in flight at once, not {most}"
            )
        # Rows that travel together need fewer.
        most = handles if rule.single else most
    hedge = limits.hedge
    config = FleetConfig(
        concurrency=most,
        timeouts=make_timeouts(job),
        retry=RetryPolicy(retries=limits.retries, retry_after_max=limits.retry_after_max or NO_CAP),
        lookahead=min(MOST_AHEAD, max(16, most)) if not rule.single else _few_ahead(most),
        group=rule,
        first_expected=_first_expected(job),
        hedge=None if hedge in ("off", None) else 0.0 if hedge == "auto" else float(hedge),
        connections=handles,
        prefix=PrefixRule(job.batching.prefix),
    )
    state_factory = EndpointStateFactory(job, servers, rule, most, accounts)
    fleet = Fleet(
        state_factory.states(servers.endpoints),
        backend,
        config,
        on_attempt=on_attempt,
        on_sample=on_sample,
        notice=notice,
        random=Random(SEED),
        result_context=result_context,
    )
    return fleet, state_factory


def _first_expected(job: Job) -> float:
    least, most = FIRST_EXPECTED
    asked = job.sampling.max_tokens
    return float(max(least, min(most, (asked or most) // 2)))


def _few_ahead(most: int) -> int:
    return min(LOOKAHEAD, max(16, most))
