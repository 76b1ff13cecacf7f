"""What a conversation needs around it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Protocol

from bagent.fleet.call import Call
from bagent.types import Outcome

if TYPE_CHECKING:
    from bagent.agents.conversation import Conversation


class Host(Protocol):
    """Sends the calls of conversations and takes their end; the stage engine is one."""

    def now(self) -> float:
        """Unix seconds."""
        ...

    def ask(self, conversation: Conversation, call: Call) -> None:
        """Send a further call of a running conversation."""
        ...

    def finish(self, conversation: Conversation, outcome: Outcome) -> None:
        """Take the end of the conversation."""
        ...


class AgentHost(Host, Protocol):
    """What a conversation with tools needs besides."""

    @property
    def closing(self) -> bool:
        """Whether the run is ending early: nothing new is begun."""
        ...

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a task that is waited for, or cancelled, at the run's end; its fault ends the run."""
        ...
