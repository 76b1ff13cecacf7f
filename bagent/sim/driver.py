"""The engine on an event loop, and the parsing of requests for one replica."""

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
from bagent.sim.requests import ApiError, ChatRequest, CompletionRequest, GenerationRequest


class PendingCall:
    """The sequences of one call in the engine.

    Args:
        stream: wake at every new token, not only at the end.
    """

    def __init__(self, *, stream: bool) -> None:
        self.sequences: list[Sequence] = []
        self.remaining = 0
        self._stream = stream
        self._changed: list[Sequence] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Return whether all sequences have ended and every change was returned."""
        return not self.remaining and not self._changed

    def changed(self, seq: Sequence) -> None:
        """Record a change of ``seq``."""
        self._changed.append(seq)
        if seq.finished_at is not None:
            self.remaining -= 1
        wake = self._stream or not self.remaining
        if wake and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> list[Sequence]:
        """Wait for new tokens (streamed) or the end; return the changed sequences."""
        while not self._changed or (self.remaining and not self._stream):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        changed, self._changed = self._changed, []
        return changed


class Driver:
    """Runs ``engine`` on the running event loop and its clock."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None

    def start(self, call: PendingCall, requests: Seq[SimRequest]) -> None:
        """Submit the requests of one call, which is their tag."""
        now = self._loop.time()
        call.remaining = len(requests)
        call.sequences = [self.engine.submit(request, now) for request in requests]
        self._pump()

    def drop(self, call: PendingCall) -> None:
        """Cancel the remaining sequences of a call."""
        now = self._loop.time()
        for seq in call.sequences:
            if seq.finished_at is None:
                self.engine.cancel(seq, now)
        self._pump()

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pump(self) -> None:
        for seq in self.engine.advance(self._loop.time()):
            seq.request.tag.changed(seq)
        due = self.engine.next_event()
        if self._timer is not None:
            # Timer handles of some event loops have no ``when()``.
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
    """One generation call; samples are ordered by prompt, then by choice."""

    head: ReplyHead
    samples: list[ReplySample]
    prompts: int
    max_tokens: list[int]
    """The limit of each sample, for the metrics."""
    stream: bool
    include_usage: bool
    continuous: bool
    priority: int
    salt: str | None

    def engine_requests(self, tag: object) -> list[SimRequest]:
        """Return the engine's requests, one for each sample."""
        requests: list[SimRequest] = []
        for sample, limit in zip(self.samples, self.max_tokens, strict=True):
            answer = sample.answer
            requests.append(
                SimRequest(
                    prompt_tokens=tokens.count(sample.prompt),
                    output_tokens=tokens.count(answer.packed),
                    blocks=tokens.block_hashes(sample.prompt + answer.packed, BLOCK, self.salt),
                    priority=self.priority,
                    stream=self.stream,
                    max_tokens=limit,
                    stopped=answer.finish_reason != "length",
                    tag=tag,
                )
            )
        return requests


class RequestParser:
    """Parses requests for one replica.

    Args:
        config: model name, lengths, seed.
        new_id: makes a request id where the client sends none.
    """

    def __init__(self, config: SimConfig, new_id: Callable[[], str]) -> None:
        self.config = config
        self.writer = AnswerWriter(config.answers, config.seed)
        self._new_id = new_id

    def chat(self, body: bytes, request_id: str | None) -> GenerationCall:
        """Parse a body of ``/v1/chat/completions``.

        Raises:
            ApiError: the request is refused.
        """
        request = protocol.decode_request(body, ChatRequest)
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
        return self._make_call(request, head, [tokens.pack(text)], n)

    def chat_batch(self, body: bytes, request_id: str | None) -> GenerationCall:
        """Parse a body of ``/v1/chat/completions/batch``: a list of conversations, one choice each.

        Raises:
            ApiError: the request is refused.
        """
        request = protocol.decode_request(body, ChatRequest)
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
        return self._make_call(request, head, [tokens.pack(text) for text in texts], 1)

    def completion(self, body: bytes, request_id: str | None) -> GenerationCall:
        """Parse a body of ``/v1/completions``.

        Raises:
            ApiError: the request is refused.
        """
        request = protocol.decode_request(body, CompletionRequest)
        n = self._check(request)
        head = ReplyHead(
            id=f"cmpl-{request_id or request.request_id or self._new_id()}",
            created=int(time.time()),
            model=self.config.model,
            chat=False,
            token_ids=bool(request.return_token_ids),
            echo=bool(request.echo),
        )
        return self._make_call(request, head, protocol.pack_prompts(request.prompt), n)

    def _check(self, request: GenerationRequest) -> int:
        protocol.check_model(request.model, self.config.model)
        return protocol.check_generation(request, by_priority=self.config.engine.priority)

    def _make_call(
        self, request: GenerationRequest, head: ReplyHead, prompts: list[bytes], n: int
    ) -> GenerationCall:
        plan = self.writer.plan(request)
        context = self.config.engine.max_model_len
        truncate_to = request.truncate_prompt_tokens
        samples: list[ReplySample] = []
        allowed: list[int] = []
        for prompt in prompts:
            if truncate_to:
                prompt = prompt[-4 * (truncate_to if truncate_to > 0 else context) :]
            limits = protocol.token_limits(request, tokens.count(prompt), context)
            for choice in range(n):
                answer = self.writer.answer(plan, prompt, limits, choice)
                samples.append(ReplySample(len(samples), prompt, answer))
                allowed.append(limits.max_tokens)
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
