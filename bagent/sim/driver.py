"""An engine on an event loop: its next event is a timer, its changes wake whoever waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import msgspec

from bagent.sim import requests as protocol
from bagent.sim import tokens
from bagent.sim.config import BLOCK, SimConfig
from bagent.sim.engine import Sequence, SimEngine, SimRequest
from bagent.sim.generator import AnswerWriter
from bagent.sim.replies import ReplyHead, ReplySample
from bagent.sim.requests import ApiError, ChatRequest, Common, CompletionRequest


class PendingCall:
    """The sequences of one call, on their way.

    Args:
        stream: wake at every new token, not only at the end.
    """

    def __init__(self, *, stream: bool) -> None:
        self.sequences: list[Sequence] = []
        self.left = 0
        self._stream = stream
        self._fresh: list[Sequence] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Whether all sequences have ended and all that is new on them was handed out."""
        return not self.left and not self._fresh

    def changed(self, seq: Sequence) -> None:
        """The engine has something new on ``seq``."""
        self._fresh.append(seq)
        if seq.finished_at is not None:
            self.left -= 1
        wake = self._stream or not self.left
        if wake and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> list[Sequence]:
        """Wait for new tokens (streamed) or the end (else): the sequences that have changed."""
        while not self._fresh or (self.left and not self._stream):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        fresh, self._fresh = self._fresh, []
        return fresh


class Driver:
    """Runs ``engine`` on the running event loop, on that loop's clock."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None

    def start(self, flight: PendingCall, requests: Seq[SimRequest]) -> None:
        """Submit the requests of one call; each has ``flight`` as its tag."""
        now = self._loop.time()
        flight.left = len(requests)
        flight.sequences = [self.engine.submit(request, now) for request in requests]
        self._pump()

    def drop(self, flight: PendingCall) -> None:
        """Take what is left of a call out of the engine."""
        now = self._loop.time()
        for seq in flight.sequences:
            if seq.finished_at is None:
                self.engine.cancel(seq, now)
        self._pump()

    def close(self) -> None:
        """Stop the clock; nothing changes any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pump(self) -> None:
        for seq in self.engine.advance(self._loop.time()):
            seq.request.tag.changed(seq)
        due = self.engine.next_event()
        if self._timer is not None:
            # The handles of some loops do not tell when they are due.
            if self._due == due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._due = due
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._pump()


class GenerationCall(msgspec.Struct, frozen=True):
    """One generation call: samples are prompt-major, then by choice.

    ``max_tokens`` is what each sample was allowed, for the metrics.
    """

    head: ReplyHead
    samples: list[ReplySample]
    prompts: int
    max_tokens: list[int]
    stream: bool
    include_usage: bool
    continuous: bool
    priority: int
    salt: str | None

    def engine_requests(self, tag: object) -> list[SimRequest]:
        """What to submit to the engine, one for each sample."""
        made: list[SimRequest] = []
        for sample, most in zip(self.samples, self.max_tokens, strict=True):
            answer = sample.answer
            made.append(
                SimRequest(
                    prompt_tokens=tokens.count(sample.prompt),
                    output_tokens=tokens.count(answer.packed),
                    blocks=tokens.block_hashes(sample.prompt + answer.packed, BLOCK, self.salt),
                    priority=self.priority,
                    stream=self.stream,
                    max_tokens=most,
                    stopped=answer.finish_reason != "length",
                    tag=tag,
                )
            )
        return made


class RequestParser:
    """Reads requests for one replica.

    Args:
        config: model name, lengths, seed.
        new_id: makes a request id where the client names none.
    """

    def __init__(self, config: SimConfig, new_id: Callable[[], str]) -> None:
        self.config = config
        self.writer = AnswerWriter(config.answers, config.seed)
        self._new_id = new_id

    def chat(self, body: bytes, request_id: str | None) -> GenerationCall:
        """``/v1/chat/completions``.

        Raises:
            ApiError: the request is refused.
        """
        request = protocol.decode(body, ChatRequest)
        n = self._check(request)
        text = protocol.render_chat(request, request.messages)
        head = ReplyHead(
            id=f"chatcmpl-{request_id or request.request_id or self._new_id()}",
            created=int(time.time()),
            model=self.config.model,
            chat=True,
            token_ids=bool(request.return_token_ids),
            prompt_text=text if request.return_prompt_text else None,
        )
        return self._order(request, head, [tokens.pack(text)], n)

    def chat_batch(self, body: bytes, request_id: str | None) -> GenerationCall:
        """``/v1/chat/completions/batch``: a list of conversations, one choice each.

        Raises:
            ApiError: the request is refused.
        """
        request = protocol.decode(body, ChatRequest)
        n = self._check(request)
        if request.stream:
            raise ApiError(400, "Batch chat completions do not support streaming.")
        if request.tools and request.tool_choice != "none":
            raise ApiError(400, "Batch chat completions do not support tools.")
        if n != 1:
            raise ApiError(400, "Batch chat completions only support n=1.", param="n")
        if not request.messages or not all(isinstance(m, list) for m in request.messages):
            raise ApiError(400, "messages must be a list of conversations.", param="messages")
        texts = [protocol.render_chat(request, messages) for messages in request.messages]
        head = ReplyHead(
            id=f"chatcmpl-{request_id or request.request_id or self._new_id()}",
            created=int(time.time()),
            model=self.config.model,
            chat=True,
            token_ids=bool(request.return_token_ids),
            count_cached=False,
        )
        return self._order(request, head, [tokens.pack(text) for text in texts], 1)

    def completion(self, body: bytes, request_id: str | None) -> GenerationCall:
        """``/v1/completions``.

        Raises:
            ApiError: the request is refused.
        """
        request = protocol.decode(body, CompletionRequest)
        n = self._check(request)
        head = ReplyHead(
            id=f"cmpl-{request_id or request.request_id or self._new_id()}",
            created=int(time.time()),
            model=self.config.model,
            chat=False,
            token_ids=bool(request.return_token_ids),
            echo=bool(request.echo),
        )
        return self._order(request, head, protocol.pack_prompts(request.prompt), n)

    def _check(self, request: Common) -> int:
        protocol.check_model(request.model, self.config.model)
        return protocol.check_common(request, by_priority=self.config.engine.priority)

    def _order(
        self, request: Common, head: ReplyHead, prompts: list[bytes], n: int
    ) -> GenerationCall:
        plan = self.writer.plan(request)
        context = self.config.engine.max_model_len
        kept = request.truncate_prompt_tokens
        samples: list[ReplySample] = []
        allowed: list[int] = []
        for prompt in prompts:
            if kept:
                prompt = prompt[-4 * (kept if kept > 0 else context) :]
            limits = protocol.limits_of(request, tokens.count(prompt), context)
            for choice in range(n):
                answer = self.writer.answer(plan, prompt, limits, choice)
                samples.append(ReplySample(len(samples), prompt, answer))
                allowed.append(limits.most)
        options = request.stream_options
        return GenerationCall(
            head=head,
            samples=samples,
            prompts=len(prompts),
            max_tokens=allowed,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous=bool(options and options.continuous_usage_stats),
            priority=request.priority,
            salt=request.cache_salt,
        )
