"""What all conversations of one stage share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from bagent.agents.agent_plan import AgentPlan
from bagent.agents.budget import TokenBudget
from bagent.answers.schema import OutputSchema
from bagent.backends.request import CallSettings
from bagent.types import Json, Message

if TYPE_CHECKING:
    from bagent.agents.program import ProgramPlan

STREAM_EVERY = 50
"""One call in so many is streamed by ``stream: auto``, for its first-token time."""

MOST_HASHES = 256
"""Beginnings of hashes that are kept: one for each limit and seed, of which there may be many."""


class Renderer(Protocol):
    """Makes a row's prompt: :class:`bagent.job.prompt.Prompt` does."""

    raw: bool

    def render(
        self, data: Mapping[str, Json], extra: Mapping[str, Json] | None = None
    ) -> list[Message]:
        """Messages of one row; raises :class:`bagent.job.template.TemplateFailure`."""
        ...

    def render_raw(self, data: Mapping[str, Json], extra: Mapping[str, Json] | None = None) -> str:
        """Raw text of one row; raises like :meth:`render`."""
        ...


class StagePlan(msgspec.Struct, eq=False):
    """One stage's prompt, settings and rules for answers; the same for all its rows.

    ``reasks`` is how often an invalid answer is asked again; ``grow`` multiplies ``max_tokens``
    once for a truncated one, ``truncated`` is the job's ``output.truncated``. ``row_seconds``
    bounds a row, from its first call being ready.
    ``own_bodies`` says that rows are request bodies themselves (an OpenAI batch file). ``agent``
    has the tools that rows may call, ``program`` the program that answers them; None where there is
    none.
    """

    name: str
    prompt: Renderer
    settings: CallSettings
    schema: OutputSchema | None
    budget: TokenBudget
    describe: bool = False
    reasks: int = 2
    grow: float = 1.0
    truncated: str | None = None
    stream: bool | None = None
    answers: int = 1
    row_seconds: float | None = None
    own_bodies: bool = False
    own_bodies_keep_model: bool = True
    agent: AgentPlan | None = None
    program: ProgramPlan | None = None
    price: Callable[[str | None, Json], float | None] | None = None
    _count: int = 0
    _begun_hashes: dict[tuple[int, int], Any] = {}

    def streamed(self) -> bool:
        """Whether the next call is streamed."""
        if self.stream is not None:
            return self.stream
        self._count += 1
        return self._count % STREAM_EVERY == 1

    @property
    def offers_tools(self) -> bool:
        """Whether requests name tools that nobody here runs, so that calls of them are answers."""
        return self.own_bodies or "tools" in self.settings.extra

    def request_hash(self, payload: bytes, max_tokens: int | None, seed: int | None) -> int:
        """64 bits that name the exact request: settings, prompt, limit and seed."""
        besides = max_tokens or 0, -1 if seed is None else seed
        begun = self._begun_hashes.get(besides)
        if begun is None:
            words = self.settings.fingerprint() + b"%d/%d/" % besides
            if len(self._begun_hashes) >= MOST_HASHES:
                self._begun_hashes.clear()
            begun = self._begun_hashes[besides] = hashlib.blake2b(words, digest_size=8)
        digest = begun.copy()
        digest.update(payload)
        return int.from_bytes(digest.digest(), "big")
