"""Agent programs: which one, what it sees of the environment, and the proxy that it asks."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bagent.agents.plan import StagePlan
from bagent.agents.program import ProgramPlan
from bagent.agents.told import KEYS, Service, environment_for
from bagent.proxy.guarding import client_key, new_token
from bagent.proxy.serve import ProxyConfig, plain_states, start_proxy
from bagent.runs.endpoints import Servers
from bagent.runs.fleets import make_timeouts
from bagent.runs.stop import Stop, stop_for
from bagent.runs.watching import HostfileFollower
from bagent.tools.environment import tool_environment
from bagent.tools.opening import find_program
from bagent.types import Usage

if TYPE_CHECKING:
    from bagent.job.spec import Job

PER_ENDPOINT = 256
"""Requests in flight per endpoint: programs ask one after the other, so rows are the limit."""

DRAIN = 1.0
"""Seconds that the proxy waits at the end: the programs that asked are gone by then."""


class UsageByName:
    """Counts requests and adds up what they took, by who asked."""

    def __init__(self) -> None:
        self._sums: dict[str, Usage] = {}
        self._requests: Counter[str] = Counter()

    def add(self, name: str, usage: Usage) -> None:
        """Take what one request took."""
        self._requests[name] += 1
        old = self._sums.get(name, Usage())
        self._sums[name] = Usage(
            prompt=_sum(old.prompt, usage.prompt),
            cached=_sum(old.cached, usage.cached),
            completion=_sum(old.completion, usage.completion),
            reasoning=_sum(old.reasoning, usage.reasoning),
        )

    def take(self, name: str) -> tuple[Usage, int]:
        """The sums and the number of requests of one name, which are then forgotten."""
        return self._sums.pop(name, Usage()), self._requests.pop(name, 0)


def _sum(old: int | None, new: int | None) -> int | None:
    return old if new is None else new + (old or 0)


async def open_program(
    job: Job,
    plan: StagePlan,
    servers: Servers,
    place: tuple[Path, str, Mapping[str, str]],
    life: tuple[AsyncExitStack, asyncio.Future[Stop]],
) -> ProgramPlan:
    """The program of a job, with a proxy in front of its servers.

    Args:
        plan: its model is what the program is told.
        place: the run directory, the part of the rows, and the environment of the run.
        life: the proxy serves until the stack is closed; the future gets the stop of the run where
            the proxy can no longer meter.

    Raises:
        UsageError: there is no such program.
    """
    run, part, env = place
    stack, asked = life
    spec = job.agent
    assert spec is not None
    environment = tool_environment(env, {})
    environment.pop("HOME", None)  # each row has its own
    program = find_program(spec.command[0], job.source.folder, environment)
    usage = UsageByName()
    token = new_token()
    config = _proxy_config(job, token)
    states = plain_states(servers.endpoints, PER_ENDPOINT)
    proxy = await stack.enter_async_context(
        start_proxy(states, config, run / "proxy" / f"{plan.name}-{part}", _say_nothing, usage.add)
    )
    proxy.fault.add_done_callback(lambda fault: _stop(asked, fault))
    if job.hostfile is not None:
        # The fleet of the run follows it too, and says so.
        follower = HostfileFollower(
            job.hostfile.path, job.backend, env, _say_nothing, servers.endpoints, servers.select
        )
        following = asyncio.create_task(
            follower.follow(proxy.lessor, partial(plain_states, limit=PER_ENDPOINT))
        )
        stack.callback(following.cancel)
    model = plan.settings.model or ""
    service = Service(proxy.url, model, plan.budget.context, plan.settings.max_tokens)
    environment |= {**environment_for(service), **spec.env}
    wanted = job.limits.concurrency
    return ProgramPlan(
        argv=(program, *spec.command[1:]),
        env=environment,
        keys=KEYS,
        row_key=partial(client_key, token),
        folder=run / "work",
        homes=run / "home",
        job_folder=job.source.folder,
        most=2 * (os.cpu_count() or 1) if wanted == "auto" else int(wanted),
        seconds=job.limits.row or job.limits.timeout.total,
        model=model,
        base_url=proxy.url,
        usage=usage.take,
    )


def _proxy_config(job: Job, token: str) -> ProxyConfig:
    return ProxyConfig(
        port=0, token=token, timeouts=make_timeouts(job), strip_preamble=True, drain=DRAIN
    )


def _say_nothing(text: str) -> None:
    """What the proxy has to say is of no use to who runs a job."""


def _stop(asked: asyncio.Future[Stop], fault: asyncio.Future[BaseException]) -> None:
    """Have the run stop for a fault of its proxy, unless it stops already."""
    if not fault.cancelled() and not asked.done():
        asked.set_result(stop_for(fault.result()))
