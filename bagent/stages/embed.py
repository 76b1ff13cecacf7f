"""The embed stage: one vector for each row, asked for in batches."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from bagent.agents.plan import StagePlan
from bagent.backends.openai.embeddings import PATH
from bagent.backends.request import Request, encode_payload
from bagent.fleet.call import Call, Delivery
from bagent.fleet.fleet import Fleet
from bagent.job.templates.environment import to_text
from bagent.job.templates.template import TemplateFailure
from bagent.stages.base import (
    NO_SURVIVOR,
    FailurePolicy,
    PromptVariables,
    RowStage,
    StageContext,
    make_outcome,
    prompt_row,
)
from bagent.stages.feeder import Backpressure
from bagent.stages.row import StageRow, stage_item
from bagent.stages.slots import Slot
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.types import Failure, Outcome, Reply, Row

BATCH = 64
"""Texts in one request: servers take hundreds, and a refused one is only halved six times."""

BATCH_BYTES = 256 * 1024
"""Texts of one request together, unless one alone is longer."""


class PendingEmbedding(msgspec.Struct, frozen=True, eq=False):
    """One row whose text waits for its vector."""

    item: StageRow
    row: Row
    text: str
    ticket: Slot


class EmbedStage(RowStage):
    """Asks ``/v1/embeddings`` for the vectors of rows.

    What is embedded is the stage's prompt, else the answer of the stage before. A batch that is
    refused, or fails twice at a server that works, is halved until the bad text stands alone.

    Args:
        plan: the model and the prompt; ``prompt`` is left alone where ``has_prompt`` is False.
        advise: told why to stop, once there is a reason.
    """

    def __init__(
        self,
        plan: StagePlan,
        fleet: Fleet,
        entrance: FailurePolicy,
        names: PromptVariables,
        world: StageContext,
        gate: Backpressure,
        *,
        guards: StopRules,
        has_prompt: bool,
    ) -> None:
        super().__init__(plan.name, entrance)
        self._plan = plan
        self._fleet = fleet
        self._names = names
        self._world = world
        self._gate = gate
        self._guards = guards
        self._has_prompt = has_prompt
        self._waiting: deque[tuple[StageRow, Slot]] = deque()
        self._open = 0
        self._sizes: Counter[int] = Counter()
        self._ended = False
        self._changed = asyncio.Event()
        gate.watch(self)

    def __len__(self) -> int:
        """Rows that wait, in requests: that many as an inbox counts rows."""
        return len(self._waiting) // BATCH

    def _all_taken(self) -> None:
        self._ended = True
        self._changed.set()
        super()._all_taken()

    def _take(self, item: StageRow, ticket: Slot) -> None:
        if self._was_finished(self._world, item, ticket):
            return
        self._waiting.append((item, ticket))
        self._changed.set()

    async def run(self) -> None:
        """Ask until all rows have their vectors."""
        while True:
            if self._waiting:
                await self._fleet.wait_for_room()
                self._send(self._batch())
                self._gate.look()
            elif self._ended and not self._open:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    def _batch(self) -> list[PendingEmbedding]:
        found: list[PendingEmbedding] = []
        size = 0
        while self._waiting and len(found) < BATCH and size < BATCH_BYTES:
            item, ticket = self._waiting.popleft()
            row = prompt_row(item.row, item)
            try:
                text = self._text(item)
            except TemplateFailure as failure:
                self._end(item, ticket, self._failed(row, "template", str(failure)))
                continue
            if not item.ok and not self._has_prompt:
                words = f"there is no answer to embed: {self._entrance.reason(item)}"
                self._end(item, ticket, self._failed(row, NO_SURVIVOR, words))
                continue
            found.append(PendingEmbedding(item, row, text, ticket))
            size += len(text)
        return found

    def _text(self, item: StageRow) -> str:
        names = self._names.of(item)
        if not self._has_prompt:
            return to_text(names[item.stage])
        prompt = self._plan.prompt
        if prompt.raw:
            return prompt.render_raw(item.row.data, names)
        messages = prompt.render(item.row.data, names)
        return "\n".join(str(message.get("content")) for message in messages)

    def _send(self, batch: Sequence[PendingEmbedding], *, urgent: bool = False) -> None:
        if not batch:
            return
        self._open += 1
        body = {"model": self._plan.settings.model, "input": [one.text for one in batch]}
        request = Request(self._plan.settings, encode_payload(body), body=body, path=PATH)
        first = batch[0].row
        handler = _Batch(batch, self._done, self._sizes)
        call = Call(handler, request, f"{first.key:016x}", first.index, self.name, 0)
        call.id = first.id
        call.divisible = len(batch) > 1
        self._fleet.submit(call, urgent=urgent)

    def _done(
        self,
        batch: Sequence[PendingEmbedding],
        call: Call,
        found: Reply | Failure,
        delivery: Delivery | None,
    ) -> None:
        self._open -= 1
        self._changed.set()
        answered = isinstance(found, Failure) and (not found.passing or found.status is not None)
        if answered and len(batch) > 1:
            middle = len(batch) // 2
            self._send(batch[:middle], urgent=True)
            self._send(batch[middle:], urgent=True)
            return
        for number, one in enumerate(batch):
            if isinstance(found, Failure):
                outcome = self._failed(one.row, found.kind, found.message)
            else:
                vectors = found.vectors or []
                outcome = make_outcome(
                    self.name, one.row, self._world.now(), output=vectors[number]
                )
                outcome.model = found.model
                if len(batch) == 1:
                    outcome.prompt_tokens = found.usage.prompt
            outcome.attempts = call.attempts
            if delivery is not None:
                outcome.endpoint = delivery.endpoint
                outcome.group = delivery.group
                outcome.started_at = round(delivery.sent, 4)
                outcome.latency_ms = round((delivery.done - delivery.sent) * 1000, 2)
            self._end(one.item, one.ticket, outcome, one.row)

    def _failed(self, row: Row, kind: str, words: str) -> Outcome:
        return make_outcome(self.name, row, self._world.now(), error=(kind, words))

    def _end(self, item: StageRow, ticket: Slot, outcome: Outcome, row: Row | None = None) -> None:
        place = self._world.records.write(outcome, row or item.row)
        advice: StopReason | None = self._guards.outcome(outcome)
        if advice is not None:
            self._world.stop(advice)
        ticket.fill(stage_item(item, item.row, outcome, place))


class _Batch:
    """Takes the end of one request for vectors."""

    def __init__(
        self,
        batch: Sequence[PendingEmbedding],
        done: Callable[[Sequence[PendingEmbedding], Call, Reply | Failure, Delivery | None], None],
        sizes: Counter[int],
    ) -> None:
        self._batch = batch
        self._done = done
        self._sizes = sizes

    def replied(self, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Hand out the vectors; an answer without any, or with odd ones, is sent again."""
        if reply.vectors is None or len(reply.vectors) != len(self._batch):
            return Failure("bad_response", "no vectors in the answer", passing=True, status=200)
        sizes = Counter(len(vector) for vector in reply.vectors)
        usual = (self._sizes or sizes).most_common(1)[0][0]
        if odd := next((size for size in sizes if size != usual), None):
            words = f"a vector of {odd} numbers where others have {usual}"
            return Failure("bad_response", words, passing=True, status=200)
        self._sizes += sizes
        self._done(self._batch, call, reply, delivery)
        return None

    def failed(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        """Hand out the failure."""
        self._done(self._batch, call, failure, delivery)
