"""The conversation of one row: request, evaluation of the reply, and retries with another prompt.

A conversation is a state machine that returns calls and receives replies, without I/O or clock.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, TypeVar

import msgspec

from bagent.agents.plan import AgentHost, ConversationHost, StagePlan
from bagent.answers.evaluate import AnswerResult, evaluate
from bagent.answers.retry_prompt import add_schema_instruction, retry_messages
from bagent.backends.openai.raw_request import CHAT, ROUTES, route_of
from bagent.backends.request import Request, encode_payload
from bagent.fleet.call import Call, Delivery
from bagent.job.templates.template import TemplateFailure
from bagent.store.journal.codec import clean
from bagent.text.json import decode_json
from bagent.text.suggest import describe_value
from bagent.text.unicode import clean_text
from bagent.types import Failure, Json, Message, Outcome, Reply, Row, Usage

SENT = ", ".join(f"/v1{route}" for route in ROUTES)
"""The routes of batch file lines that can be sent, as text."""


def line_fault(data: dict[str, Json]) -> str | None:
    """Return why a line of a batch file cannot be sent, None if it can."""
    body, method, url = data.get("body"), data.get("method"), data.get("url")
    if data.get("custom_id") in (None, ""):
        return "the line has no custom_id"
    if method not in (None, "POST"):
        return f"method {method!s:.20}: lines are sent by POST"
    if not isinstance(body, dict):
        return "no body" if body is None else f"its body is {describe_value(body)}, not an object"
    if route_of(url) is None:
        return f"url {url!s:.80}: lines are sent to {SENT}"
    if body.get("n") not in (None, 1):
        return "n in its body: a line has one answer (write the line once for each of them)"
    if body.get("background"):
        return "background in its body: a line is answered at once"
    return None


def received_json(body: bytes) -> msgspec.Raw:
    """Return the body of a response on one line, as JSON that every reader accepts."""
    try:
        msgspec.json.decode(body)
        return msgspec.Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value: Any = decode_json(body)
        return msgspec.Raw(msgspec.json.encode(clean(value)))


class ConversationState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A conversation that waits for the reply to one call, without its row and its prompt."""

    max_tokens: int | None = None
    tries: int = 0
    counted: int = 0
    messages: list[Message] | None = None
    """The messages of the call; None: the row's own prompt."""
    attempts: int = 0
    turns: int = 1
    reasks: int = 0
    grown: bool = False
    shrunk: bool = False
    first_valid: bool | None = None
    usage: Usage = Usage()
    started: float | None = None
    """Unix seconds."""


_Number = TypeVar("_Number", int, float)
_NO_USAGE = Usage()


class Conversation:
    """One (row, answer) of one stage; implements :class:`bagent.fleet.call.CallHandler`."""

    __slots__ = (
        "_attempts",
        "_delivery",
        "_first_try_valid",
        "_grown",
        "_last",
        "_last_call",
        "_messages",
        "_prompt_sha",
        "_queue_ms",
        "_reasks",
        "_result",
        "_shrunk",
        "_started",
        "_turns",
        "_usage",
        "answer",
        "give_up_at",
        "host",
        "key",
        "plan",
        "request_hash",
        "row",
    )  # fmt: skip

    def __init__(self, plan: StagePlan, row: Row, answer: int, host: ConversationHost) -> None:
        self.plan = plan
        self.row = row
        self.answer = answer
        self.host = host
        self.key = f"{row.key:016x}"
        self.request_hash: int | None = None
        self.give_up_at: float | None = None
        """The event loop's time at which the row's time limit is over."""
        self._messages: list[Message] | None = None
        self._prompt_sha: str | None = None
        self._last_call: Call | None = None
        self._attempts = 0
        self._turns = 0
        self._reasks = 0
        self._grown = False
        self._shrunk = False
        self._first_try_valid: bool | None = None
        self._usage = _NO_USAGE
        self._started: float | None = None
        self._queue_ms = 0.0
        self._delivery: Delivery | None = None
        self._last: Reply | None = None
        self._result: AnswerResult | None = None

    # --- the first call -----------------------------------------------------------------------

    def open(self) -> Call | None:
        """Return the first call; None where the row ended and the host was notified."""
        row = self.row
        if row.error is not None:
            self._end("bad_input", Failure("bad_input", row.error))
            return None
        try:
            request = self._own_body() if self.plan.own_bodies else self._rendered()
        except TemplateFailure as failure:
            status = "bad_input" if failure.kind == "bad_input" else "failed"
            self._end(status, Failure(failure.kind, str(failure)))
            return None
        if request is None:
            return None
        self._prompt_sha = hashlib.sha256(request.payload).hexdigest()
        hashed = request.payload
        if request.body is not None and request.path != CHAT:
            hashed = request.path.encode() + hashed  # routes may take equal bodies
        self.request_hash = self.plan.request_hash(
            hashed, self.plan.settings.max_tokens, request.seed
        )
        return self._call(request)

    def _rendered(self) -> Request:
        plan = self.plan
        if plan.prompt.raw:
            text = plan.prompt.render_raw(self.row.data, self.row.extra)
            return self._request(encode_payload(text), prompt=text, path="/completions")
        messages = plan.prompt.render(self.row.data, self.row.extra)
        if plan.describe and plan.schema is not None:
            messages = add_schema_instruction(messages, plan.schema)
        self._messages = messages
        return self._request(encode_payload(messages), messages=messages)

    def _own_body(self) -> Request | None:
        fault = line_fault(self.row.data)
        if fault is not None:
            self._end("bad_input", Failure("bad_input", fault))
            return None
        body: dict[str, Json] = self.row.data["body"]
        path = route_of(self.row.data["url"]) or CHAT
        return Request(self.plan.settings, encode_payload(body), body=body, path=path)

    def _request(
        self,
        payload: bytes,
        *,
        messages: list[Message] | None = None,
        prompt: str | None = None,
        path: str = "/chat/completions",
    ) -> Request:
        plan = self.plan
        limit = plan.settings.max_tokens
        seed = plan.settings.sampling.get("seed")
        return Request(
            plan.settings,
            payload,
            messages=messages,
            prompt=prompt,
            path=path,
            max_tokens=limit if limit is not None else plan.budget.for_payload(text_bytes(payload)),
            seed=seed + self.answer if self.answer and isinstance(seed, int) else None,
            stream=self._streamed(),
        )

    def _streamed(self) -> bool:
        """Return whether the next call is streamed."""
        return self.plan.streamed()

    def _call(self, request: Request) -> Call:
        self._turns += 1
        call = Call(
            self, request, self.key, self.row.index, self.plan.name, self.answer, self._turns
        )
        call.id = self.row.id
        call.pinned_to = self.row.endpoint
        call.deadline = self.give_up_at
        self._last_call = call
        return call

    # --- replies ------------------------------------------------------------------------------

    def replied(self, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Evaluate a reply: end the row, ask again, or return a failure for the fleet to retry."""
        if reply.vectors is not None:
            result = AnswerResult("ok", output=msgspec.Raw(msgspec.json.encode(reply.vectors)))
        else:
            result = evaluate(reply, self.plan.schema, tools=self.plan.offers_tools)
        self._last, self._result = reply, result
        self._note_delivery(delivery)
        self._add_usage(reply.usage, text_bytes(call.request.payload))
        judged = self.plan.schema is not None and not reply.tool_calls
        # A cut or refused answer does not show whether the server enforces the schema.
        if judged and self._first_try_valid is None and result.status in ("ok", "invalid"):
            self._first_try_valid = result.status == "ok"
        if result.status == "failed" and result.passing:
            return Failure(
                result.error_kind or "bad_response",
                result.error or "no good answer",
                passing=True,
                status=200,
                finish_reason=reply.finish_reason,
            )
        self._attempts += call.attempts
        again = None
        if result.status == "invalid" and self._reasks < self.plan.reasks:
            again = self._ask_again(call, result)
        elif result.status == "truncated":
            again = self._after_truncation(call, result)
        if again is not None:
            self.host.ask(self, again)
        else:
            self._end(result.status, None)
        return None

    def failed(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        """Retry with fewer tokens where that may fit the context, else end the row."""
        self._attempts += call.attempts
        if delivery is not None:
            self._note_delivery(delivery)
        limit = call.request.max_tokens
        if (
            failure.kind == "context_overflow"
            and self.plan.settings.max_tokens is None
            and not self._shrunk
            and limit is not None
        ):
            smaller = self.plan.budget.after_overflow(failure, limit)
            if smaller is not None:
                self._shrunk = True
                self._turns -= 1
                self.host.ask(
                    self, self._call(msgspec.structs.replace(call.request, max_tokens=smaller))
                )
                return
        self._end("refused" if failure.kind == "refused" else "failed", failure)

    def _ask_again(self, call: Call, result: AnswerResult) -> Call | None:
        if self._messages is None or self.plan.schema is None:
            return None
        self._reasks += 1
        wrong = result.violations or (result.error or "",)
        messages = retry_messages(self._messages, result.text or "", wrong, self.plan.schema)
        return self._call(self._retry_request(call.request, messages))

    def _retry_request(self, request: Request, messages: list[Message]) -> Request:
        """Return the request that asks again for an answer that fits the schema."""
        return msgspec.structs.replace(
            request, payload=encode_payload(messages), messages=messages, stream=False
        )

    def _after_truncation(self, call: Call, result: AnswerResult) -> Call | None:
        """Return the call with more tokens for an answer that was cut off, if any may be added."""
        limit = call.request.max_tokens
        if limit is None or self.plan.grow <= 1 or self._grown:
            return None
        most = int(limit * self.plan.grow)
        context, prompt = self.plan.budget.context, self._last.usage.prompt if self._last else None
        if context is not None and prompt is not None and prompt + limit <= context:
            most = min(most, context - prompt)
        if most <= limit:
            return None
        self._grown = True
        return self._call(msgspec.structs.replace(call.request, max_tokens=most))

    def _note_delivery(self, delivery: Delivery) -> None:
        self._delivery = delivery
        if self._started is None:
            self._started = delivery.sent
        self._queue_ms = delivery.queue_ms

    def _add_usage(self, usage: Usage, size: int) -> None:
        if usage.prompt is not None:
            self.plan.budget.learn(size, usage.prompt)
        old = self._usage
        if old is _NO_USAGE:
            self._usage = usage
            return
        self._usage = Usage(
            prompt=_sum(old.prompt, usage.prompt),
            cached=_sum(old.cached, usage.cached),
            completion=_sum(old.completion, usage.completion),
            reasoning=_sum(old.reasoning, usage.reasoning),
            cache_write=_sum(old.cache_write, usage.cache_write),
            gpu_seconds=_sum(old.gpu_seconds, usage.gpu_seconds),
        )

    def _accepts_cut(self) -> bool:
        """Return whether a truncated answer is accepted."""
        if self.plan.truncated is not None or not self.plan.own_bodies:
            return self.plan.truncated == "accept"
        body = self.row.data.get("body")
        names = ("max_tokens", "max_completion_tokens")
        return isinstance(body, dict) and any(body.get(name) is not None for name in names)

    # --- across processes ----------------------------------------------------------------------

    def to_state(self, call: Call) -> ConversationState:
        """Return what :meth:`from_state` needs to handle the reply to ``call``, besides the row."""
        messages = call.request.messages
        return ConversationState(
            max_tokens=call.request.max_tokens,
            tries=call.attempts,
            counted=call.counted_attempts,
            messages=None if messages is self._messages else messages,
            attempts=self._attempts,
            turns=self._turns,
            reasks=self._reasks,
            grown=self._grown,
            shrunk=self._shrunk,
            first_valid=self._first_try_valid,
            usage=self._usage,
            started=self._started,
        )

    def from_state(self, state: ConversationState) -> Call | None:
        """Return the call of ``state``, or None where the row ended and the host was notified."""
        call = self.open()
        if call is None:
            return None
        if state.messages is not None:
            call.request = self._retry_request(call.request, state.messages)
        call.request.max_tokens = state.max_tokens
        call.turn, call.attempts, call.counted_attempts = state.turns, state.tries, state.counted
        self._attempts, self._turns, self._reasks = state.attempts, state.turns, state.reasks
        self._grown, self._shrunk, self._first_try_valid = (
            state.grown,
            state.shrunk,
            state.first_valid,
        )
        self._usage, self._started = state.usage, state.started
        return call

    # --- the end ------------------------------------------------------------------------------

    def _end(self, status: str, failure: Failure | None) -> None:
        # The call refers to its conversation: break the cycle, so that the row is freed at once.
        self._last_call = None
        row, delivery, reply, result = self.row, self._delivery, self._last, self._result
        outcome = Outcome(
            key=self.key,
            row=row.index,
            id=row.id,
            source=row.source,
            line=row.line,
            stage=self.plan.name,
            status=status,  # type: ignore[arg-type]
            answer=self.answer,
            attempts=self._attempts,
            turns=self._turns,
            finished_at=round(delivery.done if delivery else self.host.now(), 4),
            prompt_sha256=self._prompt_sha,
            first_try_valid=self._first_try_valid,
            request_hash=None if self.request_hash is None else f"{self.request_hash:016x}",
        )
        if delivery is not None and self._started is not None:
            outcome.endpoint = delivery.endpoint
            outcome.group = delivery.group
            outcome.started_at = round(self._started, 4)
            outcome.queue_ms = round(self._queue_ms, 2)
            # The wall clock may have been set back.
            outcome.latency_ms = round(max(0.0, delivery.done - self._started) * 1000, 2)
        if row.parents:
            outcome.parents = list(row.parents)
            outcome.parents_failed = row.parents_failed
        outcome.prompt_tokens = self._usage.prompt
        outcome.cached_tokens = self._usage.cached
        outcome.completion_tokens = self._usage.completion
        outcome.reasoning_tokens = self._usage.reasoning
        if self.plan.price is not None:
            outcome.cost_usd = self.plan.price(self.plan.settings.model, self._usage)
        if result is not None and reply is not None:
            self._put_answer(outcome, result, reply)
        if failure is not None:
            outcome.error_kind = failure.kind
            outcome.error = clean_text(failure.message)
            outcome.text = outcome.text or failure.text
            outcome.finish_reason = outcome.finish_reason or failure.finish_reason
            if failure.status != 200:
                outcome.response = None  # it is of an earlier attempt
        self.host.finish(self, outcome)

    def _put_answer(self, outcome: Outcome, result: AnswerResult, reply: Reply) -> None:
        outcome.text = result.text
        outcome.reasoning = result.reasoning
        outcome.finish_reason = reply.finish_reason
        outcome.model = reply.model
        outcome.ttft_ms = None if reply.ttft_ms is None else round(max(0.0, reply.ttft_ms), 2)
        outcome.logprobs = reply.logprobs
        if self.plan.own_bodies and reply.body is not None:
            outcome.response = received_json(reply.body)
        if result.status == "ok":
            outcome.output = result.output
        elif result.status != "truncated" or not self._accepts_cut():
            outcome.error_kind = result.error_kind
            outcome.error = result.error
        if result.text is not None:
            outcome.output_sha256 = hashlib.sha256(result.text.encode()).hexdigest()


def make_conversation(plan: StagePlan, row: Row, answer: int, host: AgentHost) -> Conversation:
    """Make the conversation of one answer of a row: with a program, with tools, or plain."""
    # Only jobs with programs or tools load what those need.
    if plan.program is not None:
        from bagent.agents.external_agent import ProgramConversation

        return ProgramConversation(plan, plan.program, row, answer, host)
    if plan.agent is not None:
        from bagent.agents.agent_loop import AgentConversation

        return AgentConversation(plan, plan.agent, row, answer, host)
    return Conversation(plan, row, answer, host)


_IMAGE = re.compile(rb'"data:image/[^"]*"')
IMAGE_BYTES = 3000
"""Bytes of text that an image counts as: about a thousand tokens, whatever its file size."""


def text_bytes(payload: bytes) -> int:
    """Return the size of a prompt for estimating its tokens; images count ``IMAGE_BYTES`` each."""
    if b'"data:image/' not in payload:
        return len(payload)
    bare, images = _IMAGE.subn(b"", payload)
    return len(bare) + images * IMAGE_BYTES


def _sum(old: _Number | None, new: _Number | None) -> _Number | None:
    if new is None:
        return old
    return new if old is None else old + new
