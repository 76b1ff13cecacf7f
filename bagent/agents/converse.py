"""The driver of a conversation: from its first call to the row's outcome."""

from __future__ import annotations

from bagent.agents.conversation import Conversation
from bagent.fleet.call import Call
from bagent.fleet.fleet import Fleet
from bagent.types import Outcome


async def converse(conversation: Conversation, call: Call, fleet: Fleet) -> Outcome | None:
    """Ask until a reply is the row's answer, or no further call may help; return the outcome.

    Return None where the run ends first. Rows with tools or a program have their own drivers; a
    plain row awaits nothing but the fleet's futures.
    """
    plan = conversation.plan
    # Only jobs with programs or tools load what those need.
    if plan.program is not None:
        from bagent.agents.external_agent import ProgramRow

        return await ProgramRow(conversation, plan.program).run(call)
    if plan.agent is not None and call.request.messages is not None:
        from bagent.agents.agent_loop import Agent

        return await Agent(conversation, plan.agent, fleet).run(call)
    step = conversation.handle(call, await fleet.request(call))
    while isinstance(step, Call):
        # A further call goes before new rows.
        step = conversation.handle(step, await fleet.request(step, urgent=True))
    return step
