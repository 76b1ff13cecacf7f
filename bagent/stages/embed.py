"""The embed stage: one vector for each row, requested in batches."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

import msgspec

from bagent.agents.plan import StagePlan
from bagent.backends.request import EMBEDDINGS, Request, encode_payload
from bagent.fleet.call import Call, CallResult, Delivery
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
"""Texts in one request; a refused batch is halved at most six times."""

BATCH_BYTES = 256 * 1024
"""Bytes of the texts of one request, unless a single text is longer."""


class PendingEmbedding(msgspec.Struct, frozen=True, eq=False):
    """A row whose text waits for its vector."""

    item: StageRow
    row: Row
    text: str
    slot: Slot


class EmbedStage(RowStage):
    """Requests the vectors of rows from ``/v1/embeddings``.

    The text is the stage's prompt or, without ``has_prompt``, the answer of the stage before. A
    batch that is refused, or fails twice at a server that works, is halved until the bad text is
    alone.
    """

    def __init__(
        self,
        plan: StagePlan,
        fleet: Fleet,
        policy: FailurePolicy,
        variables: PromptVariables,
        context: StageContext,
        backpressure: Backpressure,
        *,
        stop_rules: StopRules,
        has_prompt: bool,
    ) -> None:
        super().__init__(plan.name, policy)
        self._plan = plan
        self._fleet = fleet
        self._variables = variables
        self._context = context
        self._backpressure = backpressure
        self._stop_rules = stop_rules
        self._has_prompt = has_prompt
        self._waiting: deque[tuple[StageRow, Slot]] = deque()
        self._open = 0
        self._sizes: Counter[int] = Counter()
        self._ended = False
        self._changed = asyncio.Event()
        backpressure.watch(self)

    def __len__(self) -> int:
        """Return the requests that wait, on the scale of a stage's queue."""
        return len(self._waiting) // BATCH

    def _on_input_end(self) -> None:
        self._ended = True
        self._changed.set()
        super()._on_input_end()

    def _process(self, item: StageRow, slot: Slot) -> None:
        if self._was_finished(self._context, item, slot):
            return
        self._waiting.append((item, slot))
        self._changed.set()

    async def run(self) -> None:
        """Send requests until all rows have ended."""
        while True:
            if self._waiting:
                await self._fleet.wait_for_room()
                self._send(self._batch())
                self._backpressure.notify()
            elif self._ended and not self._open:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    def _batch(self) -> list[PendingEmbedding]:
        batch: list[PendingEmbedding] = []
        size = 0
        while self._waiting and len(batch) < BATCH and size < BATCH_BYTES:
            item, slot = self._waiting.popleft()
            row = prompt_row(item.row, item)
            try:
                text = self._text(item)
            except TemplateFailure as failure:
                self._end(item, slot, self._failed(row, "template", str(failure)))
                continue
            if not item.ok and not self._has_prompt:
                message = f"there is no answer to embed: {self._policy.reason(item)}"
                self._end(item, slot, self._failed(row, NO_SURVIVOR, message))
                continue
            batch.append(PendingEmbedding(item, row, text, slot))
            size += len(text)
        return batch

    def _text(self, item: StageRow) -> str:
        names = self._variables.of(item)
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
        body = {"model": self._plan.settings.model, "input": [pending.text for pending in batch]}
        request = Request(self._plan.settings, encode_payload(body), body=body, path=EMBEDDINGS)
        first = batch[0].row
        evaluate = partial(self._evaluate, len(batch))
        call = Call(evaluate, request, f"{first.key:016x}", first.index, self.name, 0)
        call.id = first.id
        call.divisible = len(batch) > 1
        end = self._fleet.request(call, urgent=urgent)
        self._fleet.spawn(self._finish(batch, call, end))

    def _evaluate(self, count: int, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Return a failure to retry where ``count`` vectors of the usual size are not all there."""
        if reply.vectors is None or len(reply.vectors) != count:
            return Failure("bad_response", "no vectors in the answer", passing=True, status=200)
        sizes = Counter(len(vector) for vector in reply.vectors)
        usual = (self._sizes or sizes).most_common(1)[0][0]
        if odd := next((size for size in sizes if size != usual), None):
            message = f"a vector of {odd} numbers where others have {usual}"
            return Failure("bad_response", message, passing=True, status=200)
        self._sizes += sizes
        return None

    async def _finish(
        self, batch: Sequence[PendingEmbedding], call: Call, request: asyncio.Future[CallResult]
    ) -> None:
        """Write the outcomes of a batch; halve one that was refused."""
        end = await request
        result, delivery = end.result, end.delivery
        self._open -= 1
        self._changed.set()
        answered = isinstance(result, Failure) and (not result.passing or result.status is not None)
        if answered and len(batch) > 1:
            middle = len(batch) // 2
            self._send(batch[:middle], urgent=True)
            self._send(batch[middle:], urgent=True)
            return
        for index, pending in enumerate(batch):
            if isinstance(result, Failure):
                outcome = self._failed(pending.row, result.kind, result.message)
            else:
                vectors = result.vectors or []
                outcome = make_outcome(
                    self.name, pending.row, self._context.now(), output=vectors[index]
                )
                outcome.model = result.model
                if len(batch) == 1:
                    outcome.prompt_tokens = result.usage.prompt
            outcome.attempts = call.attempts
            if delivery is not None:
                outcome.endpoint = delivery.endpoint
                outcome.group = delivery.group
                outcome.started_at = round(delivery.sent, 4)
                outcome.latency_ms = round((delivery.done - delivery.sent) * 1000, 2)
            self._end(pending.item, pending.slot, outcome, pending.row)

    def _failed(self, row: Row, kind: str, message: str) -> Outcome:
        return make_outcome(self.name, row, self._context.now(), error=(kind, message))

    def _end(self, item: StageRow, slot: Slot, outcome: Outcome, row: Row | None = None) -> None:
        location = self._context.results.write(outcome, row or item.row)
        stop_reason: StopReason | None = self._stop_rules.ended([(None, outcome)])
        if stop_reason is not None:
            self._context.stop(stop_reason)
        slot.fill(stage_item(item, item.row, outcome, location))
