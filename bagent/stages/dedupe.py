"""Deduplication of equal requests: one is sent, others wait for its answer or copy it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from bagent.agents.conversation import Conversation
from bagent.types import Outcome

RECENT_ANSWERS = 1 << 18
"""Answers that equal requests are copied from, in 16 bytes each."""


EndedRow = tuple[Conversation, Outcome]
"""The conversation of a row that has ended, and its outcome."""


class RecentAnswers:
    """A fixed table from the hashes of recent requests to the locations of their answers.

    It has one slot for each hash prefix and the newer entry wins, so memory is constant (4 MiB). A
    request whose entry was overwritten is sent again.
    """

    def __init__(self, slots: int = RECENT_ANSWERS) -> None:
        self._mask = slots - 1
        self._hashes = array("Q", [0]) * slots
        self._locations = array("Q", [0]) * slots

    def put(self, request_hash: int, location: int) -> None:
        """Remember the location of the answer to a request."""
        slot = request_hash & self._mask
        self._hashes[slot] = request_hash
        self._locations[slot] = location + 1

    def get(self, request_hash: int) -> int | None:
        """Return the location of the answer to an equal request, if it is still known."""
        slot = request_hash & self._mask
        if self._hashes[slot] != request_hash or not self._locations[slot]:
            return None
        return self._locations[slot] - 1


class RequestDedupe:
    """Decides whether a request is sent, waits for an equal one, or gets a copy of an answer.

    Args:
        read_at: reads an outcome of this run's journal by location.
        recorded: returns request hash and location of answers of earlier starts, oldest first. It
            is called at the first request.
        earlier: finds an ok outcome of another run by request hash (``--reuse``), or None.
        dedupe: whether equal requests of this run are sent once.
    """

    def __init__(
        self,
        read_at: Callable[[int], Outcome],
        recorded: Callable[[], Iterable[tuple[int, int]]],
        earlier: Callable[[int], Outcome | None] | None,
        *,
        dedupe: bool,
    ) -> None:
        self._read_at = read_at
        self._earlier = earlier
        self._dedupe = dedupe
        self._recorded = recorded
        self._leaders: dict[int, list[Conversation]] = {}
        self.waiting = 0

    def finished_answer(self, conversation: Conversation) -> Outcome | None:
        """Return a finished ok outcome of an equal request, if one is known."""
        request_hash = conversation.request_hash
        if request_hash is None:
            return None
        if self._dedupe and (location := self._recent.get(request_hash)) is not None:
            return self._read_at(location)
        return self._earlier(request_hash) if self._earlier else None

    def follow(self, conversation: Conversation) -> bool:
        """Wait for the answer to an equal request in flight; return False if there is none.

        Then the conversation leads, and must be passed to :meth:`finished`.
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

    def finished(self, ended: Sequence[EndedRow], locations: Sequence[int]) -> list[EndedRow]:
        """Return the conversations that waited for those that ended, each with its outcome."""
        waited: list[EndedRow] = []
        if not self._dedupe:
            return waited
        for (conversation, outcome), location in zip(ended, locations, strict=True):
            request_hash = conversation.request_hash
            if request_hash is None:
                continue
            waited += [(each, outcome) for each in self._leaders.pop(request_hash, ())]
            if outcome.status == "ok":
                self._recent.put(request_hash, location)
        self.waiting -= len(waited)
        return waited

    @cached_property
    def _recent(self) -> RecentAnswers:
        """The recent answers of this run, of earlier starts too."""
        recent = RecentAnswers()
        for request_hash, location in self._recorded():
            recent.put(request_hash, location)
        return recent


def copy_outcome(conversation: Conversation, source: Outcome, now: float) -> Outcome:
    """Return the outcome of ``conversation`` with the answer of ``source``.

    It cost nothing: attempts are 0 and tokens unknown.
    """
    row = conversation.row
    return Outcome(
        key=conversation.key,
        row=row.index,
        id=row.id,
        source=row.source,
        line=row.line,
        stage=conversation.plan.name,
        status=source.status,
        answer=conversation.answer,
        output=source.output,
        text=source.text,
        reasoning=source.reasoning,
        error_kind=source.error_kind,
        error=source.error,
        finish_reason=source.finish_reason,
        model=source.model,
        endpoint=source.endpoint,
        finished_at=round(now, 4),
        copied_from=source.copied_from or str(source.id),
        prompt_sha256=source.prompt_sha256,
        output_sha256=source.output_sha256,
        logprobs=source.logprobs,
        parents=list(row.parents) or None,
        parents_failed=row.parents_failed,
        first_try_valid=None,
        request_hash=source.request_hash,
        response=source.response,
    )
