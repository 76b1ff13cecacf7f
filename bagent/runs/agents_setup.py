"""Setup of a job's ``agent:``: tools, turns, compaction, agent programs."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from bagent.agents.plan import AgentPlan, SpendingLog, StagePlan, StreamPolicy
from bagent.backend_kinds import TRAITS
from bagent.backends.request import CallSettings, encode_payload
from bagent.errors import JobError, UsageError
from bagent.job.spec.job import KeyPath, stage_parts
from bagent.redaction import Redactor
from bagent.runs.hostfile_reload import HostfileFollower
from bagent.runs.run_store import RunStore
from bagent.runs.shutdown import Stop, stop_for_error
from bagent.servers.fleet_factory import make_timeouts
from bagent.servers.pricing import job_pricer
from bagent.servers.resolve import Servers
from bagent.store.journal.turns import TurnIndex
from bagent.types import Json, Usage

if TYPE_CHECKING:
    from bagent.agents.external_agent import ProgramPlan
    from bagent.job.spec.agent import ToolSpec
    from bagent.job.spec.job import Job
    from bagent.tools import ToolExecutor


class AgentSetup:
    """Opens tools and reads earlier turns, once for a run.

    Args:
        stack: closes what is opened.
        env: the environment of the run.
        stop: gets the stop of the run where agent programs can no longer be served.
        log_text: writes a detail into ``run.log``.
        spending: counts what conversations cost while they run.
    """

    def __init__(
        self,
        store: RunStore,
        stack: AsyncExitStack,
        env: Mapping[str, str],
        stop: asyncio.Future[Stop],
        log_text: Callable[[str], None],
        spending: SpendingLog,
    ) -> None:
        self._store = store
        self._stack = stack
        self._env = env
        self._stop = stop
        self._log_text = log_text
        self._spending = spending
        self._turns: TurnIndex | None = None

    async def open(self, job: Job) -> ToolExecutor | None:
        """Open the tools of ``job``; return None where it has none.

        Raises:
            UsageError: a tool cannot be opened.
        """
        return await self._stack.enter_async_context(open_job_tools(job, self._env))

    async def equip(
        self, plan: StagePlan, job: Job, servers: Servers, tools: ToolExecutor | None
    ) -> None:
        """Make the rows of ``plan`` agents, with ``tools`` or by an agent program.

        Raises:
            UsageError: the program cannot be found.
        """
        spec = job.agent
        if spec is not None and spec.command:
            try:
                plan.program = await self._open_program(plan, job, servers)
            except UsageError as error:
                if error.at is None:
                    error.at = job.source.position((*agent_path(job), "command"))
                raise
        elif spec is not None and tools is not None:
            self._set_agent_plan(plan, job, servers, tools)

    def _set_agent_plan(
        self, plan: StagePlan, job: Job, servers: Servers, tools: ToolExecutor
    ) -> None:
        spec = job.agent
        assert spec is not None
        add_tools(plan, job, servers, tools)
        self._store.tool_names.update(tools.names)
        plan.agent = AgentPlan(
            tools,
            self._store.journal,
            self._earlier_turns().pop,
            max_turns=spec.max_turns,
            first_choice=first_tool_choice(job, tools),
            compact_at=spec.compact.at,
            summary_settings=CallSettings(spec.compact.model, {}, {})
            if spec.compact.model
            else None,
            summary_price=job_pricer(job, servers.kind, spec.compact.model),
            shares=not any(tools.has_side_effects(name) for name in tools.names),
            log_text=self._log_text,
            fail_on_tool=spec.on_tool_failure == "fail",
            spending=self._spending,
            streaming=StreamPolicy() if job.stream == "auto" else None,
        )

    async def _open_program(self, plan: StagePlan, job: Job, servers: Servers) -> ProgramPlan:
        """Return the agent program of ``job``, with a proxy in front of its servers.

        The proxy serves until the stack closes; where it can no longer meter, the run stops.
        """
        # Only jobs with an agent program pay for these imports; the proxy brings aiohttp's server.
        from bagent.agents.external_agent import KEYS, ProgramPlan, ProxyTarget, environment_for
        from bagent.proxy.auth import client_key, new_token
        from bagent.proxy.server import ProxyConfig, plain_states, start_proxy
        from bagent.tools.loader import find_program
        from bagent.tools.types import tool_environment

        spec, env = job.agent, self._env
        assert spec is not None
        environment = tool_environment(env, {})
        environment.pop("HOME", None)  # each row has its own
        program = find_program(spec.command[0], job.source.folder, environment)
        usage = UsageByRow()
        token = new_token()
        config = ProxyConfig(
            port=0, token=token, timeouts=make_timeouts(job), strip_preamble=True, drain=DRAIN
        )
        states = plain_states(servers.endpoints, PER_ENDPOINT)
        run = self._store.path
        folder = run / "proxy" / f"{plan.name}-{self._store.part}"
        proxy = await self._stack.enter_async_context(
            start_proxy(states, config, folder, _ignore, usage.add)
        )
        proxy.fault.add_done_callback(self._stop_for_proxy)
        if job.hostfile is not None:
            # The fleet of the run follows the hostfile too, and reports its changes.
            follower = HostfileFollower(
                job.hostfile.path, job.backend, env, _ignore, servers.endpoints, servers.select
            )
            following = asyncio.create_task(
                follower.follow(proxy.lessor, partial(plain_states, limit=PER_ENDPOINT))
            )
            self._stack.callback(following.cancel)
        model = plan.settings.model or ""
        target = ProxyTarget(proxy.url, model, plan.budget.context, plan.settings.max_tokens)
        environment |= {**environment_for(target), **spec.env}
        concurrency = job.limits.concurrency
        return ProgramPlan(
            argv=(program, *spec.command[1:]),
            env=environment,
            keys=KEYS,
            row_key=partial(client_key, token),
            folder=run / "work",
            homes=run / "home",
            job_folder=job.source.folder,
            most=2 * (os.cpu_count() or 1) if concurrency == "auto" else int(concurrency),
            seconds=job.limits.row or job.limits.timeout.total,
            model=model,
            base_url=proxy.url,
            usage=usage.take,
        )

    def _stop_for_proxy(self, fault: asyncio.Future[BaseException]) -> None:
        """Stop the run for a fault of its proxy, unless it stops already."""
        if not fault.cancelled() and not self._stop.done():
            self._stop.set_result(stop_for_error(fault.result()))

    def _earlier_turns(self) -> TurnIndex:
        if self._turns is None:
            store = self._store
            self._turns = TurnIndex.load(store.path, store.done.has, report=store.notes.append)
        return self._turns


def has_no_side_effect_on_open(tool: ToolSpec) -> bool:
    """Return whether opening ``tool`` runs no code of the job and reads no database.

    Opening imports Python files and starts MCP servers; a command runs only once it is called.
    """
    return bool(tool.command) or tool.builtin not in (None, "sql")


@asynccontextmanager
async def open_job_tools(
    job: Job, env: Mapping[str, str], only: Callable[[ToolSpec], bool] = lambda _: True
) -> AsyncIterator[ToolExecutor | None]:
    """Open the tools of ``job`` that ``only`` accepts until the block ends; yield None without any.

    Raises:
        UsageError: a tool cannot be opened.
    """
    spec = job.agent
    if spec is None or spec.command:
        yield None
        return
    from bagent.tools import open_tools  # only jobs with tools need this import

    path = agent_path(job)
    selected = [(index, tool) for index, tool in enumerate(spec.tools) if only(tool)]
    async with open_tools(
        [tool for _, tool in selected],
        job.source.folder,
        env,
        allow_code=spec.allow_code,
        places=[job.source.position((*path, "tools", index)) for index, _ in selected],
        redact=Redactor(job.source.secrets),
    ) as tools:
        yield tools


def agent_path(job: Job) -> KeyPath:
    """Return the path of the agent of ``job`` in its file: the job's own, or that of a stage."""
    for path, part in stage_parts(job):
        if part.agent is not None and part.agent is job.agent:
            return (*path, "agent")
    return ("agent",)


def add_tools(plan: StagePlan, job: Job, servers: Servers, tools: ToolExecutor) -> CallSettings:
    """Add the tools to the settings of ``plan`` and return these.

    Where the server may be unable to enforce the schema while tools may be called, the prompt
    describes the schema too, and each endpoint is tried.
    """
    excludes = plan.settings.output is not None and not enforces_schema_with_tools(job, servers)
    plan.settings = msgspec.structs.replace(
        plan.settings, tools=tuple(tool_definitions(tools, servers)), schema_excludes_tools=excludes
    )
    plan.budget.fixed = len(encode_payload(plan.settings.tools))
    plan.describe |= excludes and job.output.describe != "never"
    if job.stream == "auto":
        plan.stream = None
    return plan.settings


def tool_definitions(tools: ToolExecutor, servers: Servers) -> list[Json]:
    """Return the tools as requests hold them; strict where a schema allows it.

    Only then OpenAI and the user's own engines enforce the schema of a call's arguments.
    """
    if not TRAITS[servers.kind].strict_tools:
        return tools.definitions
    definitions: list[Json] = []
    for name, definition in zip(tools.names, tools.definitions, strict=True):
        tool = tools.tool(name)
        if tool is not None and tool.schema.strict:
            definition = {**definition, "function": {**definition["function"], "strict": True}}
        definitions.append(definition)
    return definitions


def first_tool_choice(job: Job, tools: ToolExecutor) -> Json:
    """Return the ``tool_choice`` of the first turn; None leaves it to the model.

    Raises:
        JobError: it names no tool of the job.
    """
    choice = job.agent.tool_choice if job.agent is not None else "auto"
    if choice == "auto":
        return None
    if choice == "required":
        return choice
    if choice not in tools.names:
        raise JobError(
            f"agent.tool_choice: there is no tool {choice}",
            hint=f"write auto, required, or one of {' '.join(tools.names)}",
            at=job.source.position((*agent_path(job), "tool_choice")),
        )
    return {"type": "function", "function": {"name": choice}}


def enforces_schema_with_tools(job: Job, servers: Servers) -> bool:
    """Return whether turns that may call tools use the API's schema option without a trial."""
    return job.output.enforce == "native" or TRAITS[servers.kind].native_schema_with_tools


PER_ENDPOINT = 256
"""Requests in flight per endpoint; programs ask one at a time, so rows are the real limit."""

DRAIN = 1.0
"""Seconds that the proxy waits at the end; its clients have ended by then."""


class UsageByRow:
    """Counts the requests of each row and sums their tokens."""

    def __init__(self) -> None:
        self._sums: dict[str, Usage] = {}
        self._requests: Counter[str] = Counter()

    def add(self, name: str, usage: Usage) -> None:
        """Add the tokens of one request."""
        self._requests[name] += 1
        old = self._sums.get(name, Usage())
        self._sums[name] = Usage(
            prompt=_sum(old.prompt, usage.prompt),
            cached=_sum(old.cached, usage.cached),
            completion=_sum(old.completion, usage.completion),
            reasoning=_sum(old.reasoning, usage.reasoning),
        )

    def take(self, name: str) -> tuple[Usage, int]:
        """Return and forget the sums and the number of requests of one row."""
        return self._sums.pop(name, Usage()), self._requests.pop(name, 0)


def _sum(old: int | None, new: int | None) -> int | None:
    return old if new is None else new + (old or 0)


def _ignore(*_: object) -> None:
    """Drop messages of the proxy, which are of no use to the person who runs a job."""
