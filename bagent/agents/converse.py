"""The driver of a conversation: from its first call to the row's outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from bagent.agents.conversation import Conversation
from bagent.fleet.call import Call, CallResult
from bagent.fleet.fleet import Fleet
from bagent.types import Outcome


def converse(
    conversation: Conversation, call: Call, fleet: Fleet
) -> Coroutine[Any, Any, Outcome | None]:
    """Start a conversation with its first call, and return what waits for the row's outcome.

    The outcome is None where the run ends first. A plain row's call is queued at once.
    """
    plan = conversation.plan
    # Only jobs with programs or tools load what those need.
    if plan.program is not None:
        from bagent.agents.external_agent import ProgramRow

        return ProgramRow(conversation, plan.program).run(call)
    if plan.agent is not None and call.request.messages is not None:
        from bagent.agents.agent_loop import Agent

        return Agent(conversation, plan.agent, fleet).run(call)
    return _converse(conversation, call, fleet.request(call), fleet)


async def _converse(
    conversation: Conversation, call: Call, end: asyncio.Future[CallResult], fleet: Fleet
) -> Outcome:
    """Ask until a reply is the row's answer, or no further call may help."""
    step = conversation.handle(call, await end)
    while isinstance(step, Call):
        # A further call goes before new rows.
        end = fleet.request(step, urgent=True)
        step = conversation.handle(step, await end)
    return step
