"""Equal requests are sent once: who leads, who follows, and where a finished answer is found."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from bagent.agents.conversation import Conversation
from bagent.types import Outcome

SLOTS = 1 << 18


class RecentAnswers:
    """Where the answers to recent requests stand: a fixed table of 64-bit hashes to locations.

    One slot per hash prefix, the newer entry wins, so memory is constant (4 MiB) however many
    rows there are; an answer that was overwritten is only asked for again.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._mask = slots - 1
        self._hashes = array("Q", bytes(8 * slots))
        self._places = array("Q", bytes(8 * slots))

    def put(self, request_hash: int, location: int) -> None:
        """Remember that the answer to a request stands at ``location``."""
        slot = request_hash & self._mask
        self._hashes[slot] = request_hash
        self._places[slot] = location + 1

    def get(self, request_hash: int) -> int | None:
        """The location of the answer to an equal request, if it is still known."""
        slot = request_hash & self._mask
        if self._hashes[slot] != request_hash or not self._places[slot]:
            return None
        return self._places[slot] - 1


class RequestDedupe:
    """Decides for each conversation whether it asks, waits for an equal one, or takes an answer.

    Args:
        read_at: reads an outcome of this run's journal by location.
        earlier: finds an ok outcome of another run by request hash (``--reuse``), or None.
        dedupe: whether equal requests of this run are sent once.
    """

    def __init__(
        self,
        read_at: Callable[[int], Outcome],
        earlier: Callable[[int], Outcome | None] | None,
        *,
        dedupe: bool,
    ) -> None:
        self._read_at = read_at
        self._earlier = earlier
        self._dedupe = dedupe
        self._recent = RecentAnswers() if dedupe else None
        self._leaders: dict[int, list[Conversation]] = {}
        self.waiting = 0

    def answer_for(self, conversation: Conversation) -> Outcome | None:
        """A finished ok outcome of an equal request, if one is known."""
        request_hash = conversation.request_hash
        if request_hash is None:
            return None
        if self._recent is not None and (place := self._recent.get(request_hash)) is not None:
            return self._read_at(place)
        return self._earlier(request_hash) if self._earlier else None

    def follow(self, conversation: Conversation) -> bool:
        """Whether an equal request is in flight: then the conversation waits for its answer.

        Else the conversation leads, and must be reported to :meth:`finished`.
        """
        request_hash = conversation.request_hash
        if not self._dedupe or request_hash is None:
            return False
        followers = self._leaders.get(request_hash)
        if followers is None:
            self._leaders[request_hash] = []
            return False
        followers.append(conversation)
        self.waiting += 1
        return True

    def finished(
        self, conversation: Conversation, outcome: Outcome, location: int
    ) -> list[Conversation]:
        """The conversations that waited for this one; after a passing failure they ask anew."""
        request_hash = conversation.request_hash
        if not self._dedupe or request_hash is None:
            return []
        followers = self._leaders.pop(request_hash, [])
        self.waiting -= len(followers)
        if outcome.status == "ok" and self._recent is not None:
            self._recent.put(request_hash, location)
        return followers


def copy_outcome(conversation: Conversation, found: Outcome, now: float, origin: str) -> Outcome:
    """The outcome of ``conversation`` that takes over the answer of ``found``.

    It cost nothing: attempts are 0 and tokens unknown. ``origin`` names where it came from.
    """
    row = conversation.row
    return Outcome(
        key=conversation.key,
        row=row.index,
        id=row.id,
        source=row.source,
        line=row.line,
        stage=conversation.plan.name,
        status=found.status,
        answer=conversation.answer,
        output=found.output,
        text=found.text,
        reasoning=found.reasoning,
        error_kind=found.error_kind,
        error=found.error,
        finish_reason=found.finish_reason,
        model=found.model,
        endpoint=found.endpoint,
        finished_at=round(now, 4),
        copied_from=origin,
        prompt_sha256=found.prompt_sha256,
        output_sha256=found.output_sha256,
        logprobs=found.logprobs,
        parents=list(row.parents) or None,
        parents_failed=row.parents_failed,
        first_try_valid=None,
        request_hash=found.request_hash,
        response=found.response,
    )
