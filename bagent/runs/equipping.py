"""Gives the rows of a job what its ``agent:`` says: tools, turns, compaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from bagent.agents.agent_plan import AgentPlan
from bagent.agents.plan import StagePlan
from bagent.agents.streaming import StreamChoice
from bagent.backends.request import CallSettings, encode_payload
from bagent.errors import JobError, UsageError
from bagent.job.parts import Path, stage_parts
from bagent.redaction import Redactor
from bagent.runs.endpoints import Servers
from bagent.runs.openrun import OpenRun
from bagent.runs.stop import Stop
from bagent.store.turns import TurnIndex
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.job.spec import Job
    from bagent.job.spec_agent import ToolSpec
    from bagent.tools import ToolPool

COMBINE = frozenset({"openai", "anthropic", "bedrock"})
"""Backends of providers that say of themselves that they enforce a schema on the answer while tools
may be called. Other endpoints are tried, each once: see :mod:`bagent.backends.abilities`."""


class Equipment:
    """Opens tools and reads earlier turns, once for a run.

    Args:
        stack: what is opened stays open until it is closed.
        env: the environment of the run.
        asked: gets the stop where programs can no longer be served.
    """

    def __init__(
        self,
        store: OpenRun,
        stack: AsyncExitStack,
        env: Mapping[str, str],
        asked: asyncio.Future[Stop],
    ) -> None:
        self._store = store
        self._stack = stack
        self._env = env
        self._asked = asked
        self._turns: TurnIndex | None = None

    async def open(self, job: Job) -> ToolPool | None:
        """The tools of ``job``; None where it has none.

        Raises:
            UsageError: a tool cannot be opened.
        """
        return await self._stack.enter_async_context(opened_tools(job, self._env))

    async def equip(
        self, plan: StagePlan, job: Job, servers: Servers, pool: ToolPool | None
    ) -> None:
        """Make the rows of ``plan`` agents, with the tools of ``pool`` or by a program.

        Raises:
            UsageError: the program cannot be found.
        """
        spec = job.agent
        if spec is not None and spec.command:
            from bagent.runs.programs import open_program

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

    def _give_tools(self, plan: StagePlan, job: Job, servers: Servers, pool: ToolPool) -> None:
        spec = job.agent
        assert spec is not None
        with_tools(plan, job, servers, pool)
        self._store.tool_names.update(pool.names)
        plan.agent = AgentPlan(
            pool,
            self._store.journal,
            self._earlier().take,
            max_turns=spec.max_turns,
            first_choice=first_choice(job, pool),
            compact_at=spec.compact.at,
            summary_settings=CallSettings(spec.compact.model, {}, {})
            if spec.compact.model
            else None,
            shares=not any(pool.has_side_effects(name) for name in pool.names),
            log_text=self._store.log,
            fail_on_tool=spec.on_tool_failure == "fail",
            streaming=StreamChoice() if job.stream == "auto" else None,
        )

    def _earlier(self) -> TurnIndex:
        if self._turns is None:
            store = self._store
            self._turns = TurnIndex.load(store.path, store.done.has, report=store.notes.append)
        return self._turns


def runs_nothing(tool: ToolSpec) -> bool:
    """Return whether opening ``tool`` executes nothing that the job brings and reads no database.

    A Python file is imported and an MCP server started; a program runs only once it is called.
    """
    return bool(tool.command) or tool.builtin not in (None, "sql")


@asynccontextmanager
async def opened_tools(
    job: Job, env: Mapping[str, str], only: Callable[[ToolSpec], bool] = lambda _: True
) -> AsyncIterator[ToolPool | None]:
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


def agent_path(job: Job) -> Path:
    """Where the agent of ``job`` stands in the file: the job's own, or the one of a stage."""
    for path, part in stage_parts(job):
        if part.agent is not None and part.agent is job.agent:
            return (*path, "agent")
    return ("agent",)


def with_tools(plan: StagePlan, job: Job, servers: Servers, pool: ToolPool) -> CallSettings:
    """Put the tools into the settings of ``plan``, which are also given back.

    Where the server may not be able to enforce the schema while tools may be called, it is also in
    the prompt, and each endpoint is tried.
    """
    asked = plan.settings
    apart = asked.output is not None and not combines(job, servers)
    plan.settings = msgspec.structs.replace(
        asked,
        tools=tuple(definitions(pool, servers)),
        apart=apart,
    )
    plan.budget.fixed = len(encode_payload(plan.settings.tools))
    plan.describe |= apart and job.output.describe != "never"
    if job.stream == "auto":
        plan.stream = None
    return plan.settings


def definitions(pool: ToolPool, servers: Servers) -> list[Json]:
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


def first_choice(job: Job, pool: ToolPool) -> Json:
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


def combines(job: Job, servers: Servers) -> bool:
    """Whether the schema is asked for by the API, untried, in turns that may call tools."""
    return job.output.enforce == "native" or servers.kind in COMBINE
