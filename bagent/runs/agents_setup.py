"""Gives the rows of a job what its ``agent:`` says: tools, turns, compaction."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.agents.external_agent import KEYS, ProgramPlan, ProxyTarget, environment_for
from bagent.agents.plan import AgentPlan, StagePlan
from bagent.agents.streaming import StreamPolicy
from bagent.backends.request import CallSettings, encode_payload
from bagent.errors import JobError, UsageError
from bagent.job.spec.job import KeyPath, stage_parts
from bagent.proxy.auth import client_key, new_token
from bagent.proxy.server import ProxyConfig, plain_states, start_proxy
from bagent.redaction import Redactor
from bagent.runs.hostfile_reload import HostfileFollower
from bagent.runs.run_store import RunStore
from bagent.runs.shutdown import Stop, stop_for_error
from bagent.servers.fleet_factory import make_timeouts
from bagent.servers.resolve import Servers
from bagent.store.journal.turns import TurnIndex
from bagent.tools.factory import tool_environment
from bagent.tools.loader import find_program
from bagent.types import Json, Usage

if TYPE_CHECKING:
    from bagent.job.spec.agent import ToolSpec
    from bagent.job.spec.job import Job
    from bagent.tools import ToolExecutor

COMBINE = frozenset({"openai", "anthropic", "bedrock"})
"""Backends of providers that say of themselves that they enforce a schema on the answer while tools
may be called. Other endpoints are tried, each once: see :mod:`bagent.backends.profile`."""


class AgentSetup:
    """Opens tools and reads earlier turns, once for a run.

    Args:
        stack: what is opened stays open until it is closed.
        env: the environment of the run.
        asked: gets the stop where programs can no longer be served.
    """

    def __init__(
        self,
        store: RunStore,
        stack: AsyncExitStack,
        env: Mapping[str, str],
        asked: asyncio.Future[Stop],
    ) -> None:
        self._store = store
        self._stack = stack
        self._env = env
        self._asked = asked
        self._turns: TurnIndex | None = None

    async def open(self, job: Job) -> ToolExecutor | None:
        """The tools of ``job``; None where it has none.

        Raises:
            UsageError: a tool cannot be opened.
        """
        return await self._stack.enter_async_context(open_job_tools(job, self._env))

    async def equip(
        self, plan: StagePlan, job: Job, servers: Servers, pool: ToolExecutor | None
    ) -> None:
        """Make the rows of ``plan`` agents, with the tools of ``pool`` or by a program.

        Raises:
            UsageError: the program cannot be found.
        """
        spec = job.agent
        if spec is not None and spec.command:
            store = self._store

            place = (store.path, store.part, self._env)
            try:
                opened = open_program(job, plan, servers, place, (self._stack, self._asked))
                plan.program = await opened
            except UsageError as error:
                if error.at is None:
                    error.at = job.source.position((*agent_path(job), "command"))
                raise
        elif spec is not None and pool is not None:
            self._give_tools(plan, job, servers, pool)

    def _give_tools(self, plan: StagePlan, job: Job, servers: Servers, pool: ToolExecutor) -> None:
        spec = job.agent
        assert spec is not None
        add_tools(plan, job, servers, pool)
        self._store.tool_names.update(pool.names)
        plan.agent = AgentPlan(
            pool,
            self._store.journal,
            self._earlier().pop,
            max_turns=spec.max_turns,
            first_choice=first_tool_choice(job, pool),
            compact_at=spec.compact.at,
            summary_settings=CallSettings(spec.compact.model, {}, {})
            if spec.compact.model
            else None,
            shares=not any(pool.has_side_effects(name) for name in pool.names),
            log_text=self._store.log,
            fail_on_tool=spec.on_tool_failure == "fail",
            streaming=StreamPolicy() if job.stream == "auto" else None,
        )

    def _earlier(self) -> TurnIndex:
        if self._turns is None:
            store = self._store
            self._turns = TurnIndex.load(store.path, store.done.has, report=store.notes.append)
        return self._turns


def has_no_side_effect_on_open(tool: ToolSpec) -> bool:
    """Return whether opening ``tool`` executes nothing that the job brings and reads no database.

    A Python file is imported and an MCP server started; a program runs only once it is called.
    """
    return bool(tool.command) or tool.builtin not in (None, "sql")


@asynccontextmanager
async def open_job_tools(
    job: Job, env: Mapping[str, str], only: Callable[[ToolSpec], bool] = lambda _: True
) -> AsyncIterator[ToolExecutor | None]:
    """The tools of ``job`` that ``only`` lets pass, closed at the end; None where it has none.

    Raises:
        UsageError: a tool cannot be opened.
    """
    spec = job.agent
    if spec is None or spec.command:
        yield None
        return
    from bagent.tools import open_tools  # only jobs with tools load what they need

    path = agent_path(job)
    chosen = [(number, tool) for number, tool in enumerate(spec.tools) if only(tool)]
    places = [job.source.position((*path, "tools", number)) for number, _ in chosen]
    tools = [tool for _, tool in chosen]
    async with open_tools(
        tools, job.source.folder, env, allow_code=spec.allow_code, places=places
    ) as pool:
        pool.redact = Redactor(job.source.secrets)
        yield pool


def agent_path(job: Job) -> KeyPath:
    """Where the agent of ``job`` stands in the file: the job's own, or the one of a stage."""
    for path, part in stage_parts(job):
        if part.agent is not None and part.agent is job.agent:
            return (*path, "agent")
    return ("agent",)


def add_tools(plan: StagePlan, job: Job, servers: Servers, pool: ToolExecutor) -> CallSettings:
    """Put the tools into the settings of ``plan``, which are also given back.

    Where the server may not be able to enforce the schema while tools may be called, it is also in
    the prompt, and each endpoint is tried.
    """
    asked = plan.settings
    apart = asked.output is not None and not enforces_schema_with_tools(job, servers)
    plan.settings = msgspec.structs.replace(
        asked,
        tools=tuple(tool_definitions(pool, servers)),
        apart=apart,
    )
    plan.budget.fixed = len(encode_payload(plan.settings.tools))
    plan.describe |= apart and job.output.describe != "never"
    if job.stream == "auto":
        plan.stream = None
    return plan.settings


def tool_definitions(pool: ToolExecutor, servers: Servers) -> list[Json]:
    """The tools as requests have them; strict where a schema allows it.

    Own engines bind the arguments of a call to the tool's schema only then, and so does OpenAI.
    """
    if servers.kind in ("anthropic", "bedrock"):
        return pool.definitions
    found: list[Json] = []
    for name, definition in zip(pool.names, pool.definitions, strict=True):
        tool = pool.tool(name)
        if tool is not None and tool.schema.strict:
            definition = {**definition, "function": {**definition["function"], "strict": True}}
        found.append(definition)
    return found


def first_tool_choice(job: Job, pool: ToolExecutor) -> Json:
    """The ``tool_choice`` of the first turn; None leaves it to the model.

    Raises:
        JobError: it names no tool of the job.
    """
    word = job.agent.tool_choice if job.agent is not None else "auto"
    if word == "auto":
        return None
    if word == "required":
        return word
    if word not in pool:
        raise JobError(
            f"agent.tool_choice: there is no tool {word}",
            hint=f"write auto, required, or one of {' '.join(pool.names)}",
            at=job.source.position((*agent_path(job), "tool_choice")),
        )
    return {"type": "function", "function": {"name": word}}


def enforces_schema_with_tools(job: Job, servers: Servers) -> bool:
    """Whether the schema is asked for by the API, untried, in turns that may call tools."""
    return job.output.enforce == "native" or servers.kind in COMBINE


PER_ENDPOINT = 256
"""Requests in flight per endpoint: programs ask one after the other, so rows are the limit."""

DRAIN = 1.0
"""Seconds that the proxy waits at the end: the programs that asked are gone by then."""


class UsageByRow:
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
    usage = UsageByRow()
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
    service = ProxyTarget(proxy.url, model, plan.budget.context, plan.settings.max_tokens)
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
        asked.set_result(stop_for_error(fault.result()))
