"""Makes the conversation of a row: with tools, with a program, or plain."""

from __future__ import annotations

from bagent.agents.conversation import Conversation
from bagent.agents.plan import AgentHost, StagePlan
from bagent.types import Row


def make_conversation(plan: StagePlan, row: Row, answer: int, host: AgentHost) -> Conversation:
    """The conversation of one answer of a row."""
    if plan.program is not None:
        from bagent.agents.external_agent import ProgramConversation

        return ProgramConversation(plan, plan.program, row, answer, host)
    if plan.agent is None:
        return Conversation(plan, row, answer, host)
    from bagent.agents.agent_loop import (
        AgentConversation,  # only jobs with tools load what it needs
    )

    return AgentConversation(plan, plan.agent, row, answer, host)
