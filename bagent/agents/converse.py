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
    """Queue the first call and return the coroutine that yields the row's outcome.

    The outcome is None where the run ends first. Rows with tools queue theirs when the
    coroutine runs, and the program of a row sends its own calls.
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
    conversation: Conversation, call: Call, result: asyncio.Future[CallResult], fleet: Fleet
) -> Outcome:
    """Ask until a reply is the row's answer, or no further call may help."""
    step = conversation.handle(call, await result)
    while isinstance(step, Call):
        # A further call goes before new rows.
        result = fleet.request(step, urgent=True)
        step = conversation.handle(step, await result)
    return step
