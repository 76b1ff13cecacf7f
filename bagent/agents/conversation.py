"""The conversation of one row: request, evaluation of the reply, and retries with another prompt.

A conversation is a state machine that returns calls and receives replies, without I/O or clock.
:func:`converse` drives it from its first call to the row's outcome.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from bagent.agents.plan import StagePlan
from bagent.answers.evaluate import AnswerResult, evaluate, requested_object
from bagent.answers.messages import add_schema_instruction, retry_messages
from bagent.backends.openai.raw_request import CHAT, ROUTES, route_of
from bagent.backends.request import BODY_LIMITS, Request, encode_payload
from bagent.fleet.call import Call, CallResult, Delivery, Evaluate, latency_ms
from bagent.fleet.fleet import Fleet
from bagent.job.templates.template import TemplateFailure
from bagent.store.journal.codec import clean
from bagent.text.json import decode_json
from bagent.text.suggest import describe_value
from bagent.text.unicode import clean_text
from bagent.types import NO_USAGE, Failure, Json, Message, Outcome, Reply, Row, Usage

SENT_ROUTES = ", ".join(f"/v1{route}" for route in ROUTES)
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
        return f"url {url!s:.80}: lines are sent to {SENT_ROUTES}"
    if route_of(url) == CHAT and not isinstance(body.get("messages"), list):
        return "no messages in its body"
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
    usage: Usage = NO_USAGE
    started: float | None = None
    """Unix seconds."""


_Number = TypeVar("_Number", int, float)


Step = Call | Outcome
"""The next step of a conversation: a call to send, or the row's outcome."""


class Conversation(msgspec.Struct, eq=False):
    """One (row, answer) of one stage: a state machine without I/O or clock.

    :meth:`open` and :meth:`handle` return the next step. An outcome whose ``finished_at`` is None
    has to be stamped by the caller: no server saw its last call.
    """

    plan: StagePlan
    row: Row
    answer: int
    give_up_at: float | None = None
    """The event loop's time at which the row's time limit is over."""
    key: str = ""
    """The row's key in hex digits."""
    exact_hash: int | None = None
    """The hash of the exact request; None before :meth:`open`."""
    request_hash: int | None = None
    """``exact_hash`` where equal rows may share an answer, else None."""
    messages: list[Message] | None = None
    """The conversation without retry prompts; None where the row has no messages."""
    attempts: int = 0
    turns: int = 0
    usage: Usage = NO_USAGE
    """Usage of all turns."""
    summary_usage: Usage | None = None
    """Usage of summaries of the conversation, which may be by another model."""
    on_written: Callable[[], None] | None = None
    """Called once the outcome is written."""
    _prompt_sha: str | None = None
    _reasks: int = 0
    _grown: bool = False
    _shrunk: bool = False
    _first_try_valid: bool | None = None
    _started: float | None = None
    _queue_ms: float = 0.0
    _delivery: Delivery | None = None
    _reply: Reply | None = None
    _result: AnswerResult | None = None

    def __post_init__(self) -> None:
        self.key = f"{self.row.key:016x}"

    # --- the first call -----------------------------------------------------------------------

    def open(self) -> Step:
        """Return the first call, or the outcome of a row that cannot be sent."""
        row = self.row
        if row.error is not None:
            return self.end("bad_input", Failure("bad_input", row.error))
        try:
            request = self._own_body() if self.plan.own_bodies else self._rendered()
        except TemplateFailure as failure:
            status = "bad_input" if failure.kind == "bad_input" else "failed"
            return self.end(status, Failure(failure.kind, str(failure)))
        if isinstance(request, Failure):
            return self.end("bad_input", request)
        self._prompt_sha = hashlib.sha256(request.payload).hexdigest()
        hashed = request.payload
        if request.body is not None and request.path != CHAT:
            hashed = request.path.encode() + hashed  # routes may take equal bodies
        self.exact_hash = self.plan.request_hash(
            hashed, self.plan.settings.max_tokens, request.seed
        )
        agent, program = self.plan.agent, self.plan.program
        if program is None and (agent is None or agent.shares):
            self.request_hash = self.exact_hash
        return self.ask(request)

    def _rendered(self) -> Request:
        plan = self.plan
        if plan.prompt.raw:
            text = plan.prompt.render_raw(self.row.data, self.row.extra)
            return self.request(encode_payload(text), prompt=text, path="/completions")
        messages = plan.prompt.render(self.row.data, self.row.extra)
        if plan.describe and plan.schema is not None:
            messages = add_schema_instruction(messages, plan.schema)
        self.messages = messages
        return self.request(encode_payload(messages), messages=messages)

    def _own_body(self) -> Request | Failure:
        fault = line_fault(self.row.data)
        if fault is not None:
            return Failure("bad_input", fault)
        body: dict[str, Json] = self.row.data["body"]
        path = route_of(self.row.data["url"]) or CHAT
        return Request(self.plan.settings, encode_payload(body), body=body, path=path)

    def request(
        self,
        payload: bytes,
        *,
        messages: list[Message] | None = None,
        prompt: str | None = None,
        path: str = "/chat/completions",
    ) -> Request:
        """Return a request of this row."""
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
            stream=plan.streamed(),
        )

    def ask(self, request: Request) -> Call:
        """Return the call of the next turn."""
        self.turns += 1
        return self.new_call(request, self.evaluate, self.row.endpoint)

    def resend(self, request: Request) -> Call:
        """Return the call that repeats the last turn with another request."""
        self.turns -= 1
        return self.ask(request)

    def new_call(self, request: Request, evaluate: Evaluate, pinned_to: str | None = None) -> Call:
        """Return a call for this row that is no turn of its own."""
        row = self.row
        return Call(
            evaluate,
            request,
            self.key,
            row.index,
            self.plan.name,
            self.answer,
            self.turns,
            pinned_to=pinned_to,
            id=row.id,
            owner=self,
            deadline=self.give_up_at,
        )

    # --- replies ------------------------------------------------------------------------------

    def evaluate(self, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Evaluate a reply; return a passing failure for the fleet to retry."""
        if reply.vectors is not None:
            result = AnswerResult("ok", output=msgspec.Raw(msgspec.json.encode(reply.vectors)))
        else:
            # Calls of tools that are not run here are answers.
            offers_tools = self.plan.own_bodies or "tools" in self.plan.settings.extra
            result = evaluate(reply, self.plan.schema, tools=offers_tools)
        self.note_reply(call, reply, delivery, result)
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
        return None

    def note_reply(
        self, call: Call, reply: Reply, delivery: Delivery, result: AnswerResult | None
    ) -> None:
        """Note the last reply and what it cost; ``result`` is None where it is no answer."""
        self._reply, self._result = reply, result
        self._note_delivery(call, delivery)
        if reply.usage is not NO_USAGE:
            if reply.usage.prompt is not None:
                size = text_bytes(call.request.payload)
                self.plan.budget.learn(size, reply.usage.prompt)
            old = self.usage
            self.usage = reply.usage if old is NO_USAGE else _sum_usage(old, reply.usage)

    def note_summary(self, usage: Usage) -> None:
        """Note what a summary of the conversation cost."""
        old = self.summary_usage
        self.summary_usage = usage if old is None else _sum_usage(old, usage)

    def handle(self, call: Call, end: CallResult) -> Step:
        """Return the call that asks again after the end of ``call``, or the row's outcome."""
        self.attempts += call.attempts
        if isinstance(end.result, Failure):
            return self._handle_failure(call, end.result, end.delivery)
        result = self._result
        assert result is not None  # the fleet has evaluated the reply
        again = None
        if result.status == "invalid" and self._reasks < self.plan.reasks:
            again = self._ask_again(call, result)
        elif result.status == "truncated":
            again = self._after_truncation(call, result)
        return again or self.end(result.status, None)

    def _handle_failure(self, call: Call, failure: Failure, delivery: Delivery | None) -> Step:
        """Ask for fewer tokens where that may fit the context, else end the row."""
        if delivery is not None:
            self._note_delivery(call, delivery)
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
                return self.resend(msgspec.structs.replace(call.request, max_tokens=smaller))
        return self.end("refused" if failure.kind == "refused" else "failed", failure)

    def _ask_again(self, call: Call, result: AnswerResult) -> Call | None:
        if self.messages is None or self.plan.schema is None:
            return None
        self._reasks += 1
        wrong = result.violations or (result.error or "",)
        messages = retry_messages(self.messages, result.text or "", wrong, self.plan.schema)
        return self.ask(self._retry_request(call.request, messages))

    def _retry_request(self, request: Request, messages: list[Message]) -> Request:
        """Return the request that asks again for an answer that fits the schema.

        It has no tools where the schema can be enforced only without them.
        """
        return msgspec.structs.replace(
            request,
            payload=encode_payload(messages),
            messages=messages,
            stream=False,
            tool_choice="none" if request.settings.schema_excludes_tools else None,
        )

    def _after_truncation(self, call: Call, result: AnswerResult) -> Call | None:
        """Return the call with more tokens for an answer that was cut off, if any may be added.

        Where the schema was not enforced, the answer may never have ended: it is enforced then.
        """
        request = call.request
        may_call_tools = request.tool_choice != "none"
        schema_not_enforced = request.settings.schema_excludes_tools and may_call_tools
        if schema_not_enforced and self._reasks < self.plan.reasks:
            return self._ask_again(call, result)
        limit = call.request.max_tokens
        if limit is None or self.plan.grow <= 1 or self._grown:
            return None
        most = int(limit * self.plan.grow)
        context = self.plan.budget.context
        prompt = self._reply.usage.prompt if self._reply else None
        if context is not None and prompt is not None and prompt + limit <= context:
            most = min(most, context - prompt)
        if most <= limit:
            return None
        self._grown = True
        return self.ask(msgspec.structs.replace(call.request, max_tokens=most))

    def _note_delivery(self, call: Call, delivery: Delivery) -> None:
        self._delivery = delivery
        if self._started is None:
            self._started = delivery.sent
        self._queue_ms = call.waited_ms

    def _accepts_cut(self) -> bool:
        """Return whether a truncated answer is accepted."""
        if self.plan.truncated is not None or not self.plan.own_bodies:
            return self.plan.truncated == "accept"
        body = self.row.data.get("body")
        return isinstance(body, dict) and any(body.get(name) is not None for name in BODY_LIMITS)

    # --- across processes ----------------------------------------------------------------------

    def to_state(self, call: Call) -> ConversationState:
        """Return what :meth:`restore` needs to handle the reply to ``call``, besides the row."""
        messages = call.request.messages
        return ConversationState(
            max_tokens=call.request.max_tokens,
            tries=call.attempts,
            counted=call.counted_attempts,
            messages=None if messages is self.messages else messages,
            attempts=self.attempts,
            turns=self.turns,
            reasks=self._reasks,
            grown=self._grown,
            shrunk=self._shrunk,
            first_valid=self._first_try_valid,
            usage=self.usage,
            started=self._started,
        )

    def restore(self, state: ConversationState) -> Step:
        """Return the call of ``state``, or the outcome of a row that cannot be sent."""
        call = self.open()
        if isinstance(call, Outcome):
            return call
        if state.messages is not None:
            call.request = self._retry_request(call.request, state.messages)
        call.request.max_tokens = state.max_tokens
        call.turn, call.attempts, call.counted_attempts = state.turns, state.tries, state.counted
        self.attempts, self.turns, self._reasks = state.attempts, state.turns, state.reasks
        self._grown, self._shrunk, self._first_try_valid = (
            state.grown,
            state.shrunk,
            state.first_valid,
        )
        self.usage, self._started = state.usage, state.started
        return call

    # --- the end ------------------------------------------------------------------------------

    def end(self, status: str, failure: Failure | None) -> Outcome:
        """Return the outcome of the row."""
        row, delivery, reply, result = self.row, self._delivery, self._reply, self._result
        outcome = Outcome(  # a call with more than 15 keyword arguments is much slower
            id=row.id,
            row=row.index,
            source=row.source,
            line=row.line,
            stage=self.plan.name,
            answer=self.answer,
            status=status,  # type: ignore[arg-type]
            attempts=self.attempts,
            turns=self.turns,
            prompt_sha256=self._prompt_sha,
            key=self.key,
            first_try_valid=self._first_try_valid,
            request_hash=None if self.request_hash is None else f"{self.request_hash:016x}",
        )
        usage, outcome.cost_usd = self.spent()
        if usage is not NO_USAGE:
            outcome.prompt_tokens, outcome.cached_tokens = usage.prompt, usage.cached
            outcome.completion_tokens = usage.completion
            outcome.reasoning_tokens = usage.reasoning
        if delivery is not None and self._started is not None:
            outcome.endpoint, outcome.group = delivery.endpoint, delivery.group
            outcome.queue_ms = round(self._queue_ms * 100) / 100
            outcome.finished_at = delivery.finished_at
            if self._started == delivery.sent:
                outcome.started_at, outcome.latency_ms = delivery.started_at, delivery.latency_ms
            else:
                outcome.started_at = round(self._started, 4)
                outcome.latency_ms = latency_ms(self._started, delivery.done)
        if row.parents:
            outcome.parents = list(row.parents)
            outcome.parents_failed = row.parents_failed
        if result is not None and reply is not None:
            self._put_answer(outcome, result, reply)
        if failure is not None:
            outcome.error_kind = failure.kind
            outcome.error = clean_text(failure.message)
            outcome.text = outcome.text or failure.text
            outcome.finish_reason = outcome.finish_reason or failure.finish_reason
            if failure.status != 200:
                outcome.response = None  # it is of an earlier attempt
        return outcome

    def spent(self) -> tuple[Usage, float | None]:
        """Return the tokens and the dollars of all turns and summaries so far."""
        plan, usage, summaries = self.plan, self.usage, self.summary_usage
        cost = None if plan.price is None else plan.price(plan.settings.model, usage)
        if summaries is not None and plan.agent is not None:
            usage = _sum_usage(usage, summaries)
            agent, summary_cost = plan.agent, None
            if agent.summary_settings is not None and agent.summary_price is not None:
                summary_cost = agent.summary_price(agent.summary_settings.model, summaries)
            cost = None if cost is None or summary_cost is None else cost + summary_cost
        return usage, cost

    def _put_answer(self, outcome: Outcome, result: AnswerResult, reply: Reply) -> None:
        outcome.text = result.text
        outcome.reasoning = result.reasoning
        outcome.finish_reason = reply.finish_reason
        outcome.model = reply.model
        if reply.ttft_ms is not None:
            outcome.ttft_ms = round(max(0.0, reply.ttft_ms), 2)
        outcome.logprobs = reply.logprobs
        if self.plan.own_bodies and reply.body is not None:
            outcome.response = received_json(reply.body)
        if result.status == "ok":
            outcome.output = result.output
            if self.plan.own_bodies and result.output is None and result.text is not None:
                outcome.output = requested_object(self.row.data.get("body"), result.text)
        elif result.status != "truncated" or not self._accepts_cut():
            outcome.error_kind = result.error_kind
            outcome.error = result.error
        if result.text is not None:
            outcome.output_sha256 = hashlib.sha256(result.text.encode()).hexdigest()


_IMAGE = re.compile(rb'"data:image/[^"]*"')
IMAGE_BYTES = 3000
"""Bytes of text that an image counts as: about a thousand tokens, whatever its file size."""


def text_bytes(payload: bytes) -> int:
    """Return the size of a prompt for estimating its tokens; images count ``IMAGE_BYTES`` each."""
    if b'"data:image/' not in payload:
        return len(payload)
    bare, images = _IMAGE.subn(b"", payload)
    return len(bare) + images * IMAGE_BYTES


def _sum_usage(old: Usage, new: Usage) -> Usage:
    return Usage(
        prompt=_sum(old.prompt, new.prompt),
        cached=_sum(old.cached, new.cached),
        completion=_sum(old.completion, new.completion),
        reasoning=_sum(old.reasoning, new.reasoning),
        cache_write=_sum(old.cache_write, new.cache_write),
        gpu_seconds=_sum(old.gpu_seconds, new.gpu_seconds),
    )


def _sum(old: _Number | None, new: _Number | None) -> _Number | None:
    if new is None:
        return old
    return new if old is None else old + new


async def converse(conversation: Conversation, call: Call, fleet: Fleet) -> Outcome | None:
    """Ask until a reply is the row's answer, or no further call may help; return the outcome.

    Return None where the run ends first. Rows with tools or a program have their own drivers.
    """
    plan = conversation.plan
    # Only jobs with programs or tools load what those need.
    if plan.program is not None:
        from bagent.agents.external_agent import ProgramRow

        return await ProgramRow(conversation, plan.program).run(call)
    if plan.agent is not None and call.request.messages is not None:
        from bagent.agents.agent_loop import Agent

        return await Agent(conversation, plan.agent, fleet).run(call)
    step = conversation.handle(call, await fleet.request(call))
    while isinstance(step, Call):
        # A further call goes before new rows.
        step = conversation.handle(step, await fleet.request(step, urgent=True))
    return step
