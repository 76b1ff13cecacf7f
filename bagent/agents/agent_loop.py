"""The conversation of one row with tools: requests and tool calls in turns, until an answer.

It holds no slot of the fleet between turns. Each turn is in the journal before the next request,
so that a run that was killed resumes from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from bagent.agents.compaction import Compactor, SummaryHandler
from bagent.agents.conversation import Conversation, text_bytes
from bagent.agents.plan import AgentHost, AgentPlan, StagePlan
from bagent.agents.streaming import FirstToolCallTimer
from bagent.agents.text_tool_calls import UnreadCallError, parse_text_tool_calls
from bagent.agents.token_budget import TokenBudget
from bagent.agents.tool_turn import (
    INTERRUPTED,
    MAY_HAVE_RUN,
    ConversationKey,
    ToolTurn,
    ToolTurnRunner,
    answer_message,
    assign_call_ids,
    calls_of,
    pending_calls_message,
    turn_message,
)
from bagent.answers.evaluate import GOOD_ENDS, AnswerResult
from bagent.backends.request import Request, Watch, encode_payload
from bagent.clocks import unix
from bagent.fleet.call import Call, Delivery
from bagent.store.journal.codec import unit_of
from bagent.tools import ToolResult
from bagent.types import PASSING_KINDS, Failure, Message, Reply, Row, ToolCall, Turn

MOST_FAULTY_TURNS = 5
"""Consecutive turns in which every call failed, after which the row fails."""


class AgentConversation(Conversation):
    """One (row, answer) of a stage with tools."""

    __slots__ = (
        "_agent",
        "_agent_host",
        "_compactor",
        "_endpoint",
        "_faulty",
        "_first_call",
        "_has_written",
        "_last_size",
        "_rounds",
        "_start",
        "_tool_runner",
        "_used",
    )  # fmt: skip

    def __init__(
        self, plan: StagePlan, agent: AgentPlan, row: Row, answer: int, host: AgentHost
    ) -> None:
        super().__init__(plan, row, answer, host)
        self._agent = agent
        self._agent_host = host
        self._tool_runner: ToolTurnRunner | None = None
        self._endpoint: str | None = None
        self._faulty = 0
        self._first_call = FirstToolCallTimer(host.now)
        self._last_size: tuple[int, int] | None = None
        self._has_written = False
        self._rounds = 0
        self._start = 0
        self._used: set[str] = set()
        self._compactor: Compactor | None = None

    # --- the first call -------------------------------------------------------------------------

    def open(self) -> Call | None:
        """Return the first call; None where the row ended or an earlier start's tools run first."""
        call = super().open()
        if call is None or self.request_hash is None or call.request.messages is None:
            return call
        request_hash = f"{self.request_hash:016x}"
        row = self.row
        unit = ConversationKey(
            self.key, row.index, self.plan.name, self.answer, request_hash, row.id
        )
        self._tool_runner = ToolTurnRunner(
            self._agent,
            unit,
            self._agent_host.spawn,
            lambda: self.give_up_at,
            lambda: (self._usage, self._attempts),
        )
        self._start = len(call.request.messages)
        if not self._agent.shares:
            self.request_hash = None
        turns = self._agent.earlier(unit_of(self.row.key, self.plan.name, self.answer))
        if turns and all(turn.request_hash == unit.request_hash for turn in turns):
            return self._resume(turns, call.request)
        call.request.watch = self._watch(1) if self._may_call() else None
        call.request.tool_choice = self._agent.first_choice if self._may_call() else None
        return call

    def _resume(self, turns: list[Turn], first: Request) -> Call | None:
        """Resume from the turns of an earlier start; calls that it started are not run again."""
        last = turns[-1]
        self._turns = last.turn
        self._rounds = len(turns)
        self._has_written = True
        if last.usage is not None:
            self._usage, self._attempts = last.usage, last.attempts
        messages = list(first.messages or ())
        for turn in turns[:-1]:
            messages += turn.messages
        self._messages = messages
        work = _work_of(last)
        self._used = {call.id for message in messages for call in calls_of(message)}
        self._used |= {call.id for call in work.calls}
        interrupted = [call for call in work.calls if call.id in {c.id for c in last.begun}]
        for call in interrupted:
            work.answers[call.id] = MAY_HAVE_RUN
            result = ToolResult(MAY_HAVE_RUN, "failed", started=last.at or unix())
            self._runner().record(last.turn, call, result, INTERRUPTED)
        if all(call.id in work.answers for call in work.calls):
            added = work.head + [answer_message(call, work.answers[call.id]) for call in work.calls]
            if interrupted:
                self._runner().write_turn(last.turn, added)
            return self._next_call(messages + added)
        self._rounds -= 1
        self._agent_host.spawn(self._do(work))
        return None

    def _runner(self) -> ToolTurnRunner:
        assert self._tool_runner is not None
        return self._tool_runner

    def _may_call(self) -> bool:
        """Return whether tool calls of the next turn would be run."""
        return self._rounds + 1 < self._agent.max_turns

    # --- replies --------------------------------------------------------------------------------

    def replied(self, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Run the tool calls of a reply; a reply without any is the row's answer."""
        self._note_stream(call, delivery)
        if self._tool_runner is not None and call.request.tool_choice != "none":
            try:
                reply = parse_text_tool_calls(reply, self._agent.tools.definitions)
            except UnreadCallError as error:
                return Failure("bad_response", str(error), text=reply.text)
        if self._tool_runner is None or not _asks_for_tools(reply):
            return super().replied(call, reply, delivery)
        self._last, self._result = reply, None
        self._note_delivery(delivery)
        self._endpoint = delivery.endpoint
        size = text_bytes(call.request.payload)
        self._add_usage(reply.usage, size)
        if reply.usage.prompt is not None and reply.usage.completion is not None:
            self._last_size = size, reply.usage.prompt + reply.usage.completion
        self._attempts += call.attempts
        calls = assign_call_ids(reply, self._turns, self._used)
        if not self._may_call():
            most = self._agent.max_turns
            names = ", ".join(dict.fromkeys(call.name for call in calls))
            message = f"no answer within agent.max_turns: {most}; the last turn asks for {names}"
            self._end("failed", Failure("max_turns", message, text=reply.text))
            return None
        self._used.update(call.id for call in calls)
        requested = call.request.messages or []
        head = [*requested[len(self._messages or ()) :], turn_message(reply, calls)]
        work = ToolTurn(self._turns, head, calls, {})
        self._has_written = True
        if self._agent_host.closing:
            self._tool_runner.record_interrupted(work)
        else:
            self._agent_host.spawn(self._do(work))
        return None

    def _note_stream(self, call: Call, delivery: Delivery) -> None:
        """Note how much time a streamed turn saved."""
        choice, at = self._agent.streaming, self._first_call.at
        if choice is not None and call.request.stream and call.request.watch is not None:
            took = delivery.done - delivery.sent
            saved = delivery.done - at if at is not None else 0.0
            choice.note(call.turn, took, saved if 0 < saved <= took else 0.0)

    def failed(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        """Retry with a shorter conversation where it was too long, else end the row."""
        if failure.kind == "context_overflow" and self._messages is not None:
            self.plan.budget.after_overflow(failure, call.request.max_tokens or 0)
            shorter = self._compaction().after_overflow(self._messages)
            if shorter is not None:
                self._attempts += call.attempts
                self._turns -= 1
                self._messages = shorter
                self._agent_host.ask(self, self._call(self._turn_request(shorter, None)))
                return
        super().failed(call, failure, delivery)

    async def _do(self, work: ToolTurn) -> None:
        """Run a turn's tools, write the turn, and request the next."""
        added, results = await self._runner().answer(work)
        self._runner().write_turn(work.turn, added)
        self._rounds += 1
        if self._agent.fail_on_tool and (broken := _broken(work.calls, results)):
            self._end("failed", Failure("tool", broken))
            return
        self._faulty = self._faulty + 1 if all(result.error for result in results) else 0
        if self._faulty >= MOST_FAULTY_TURNS:
            message = f"all tool calls of {self._faulty} turns in a row failed: {results[-1].text}"
            self._end("failed", Failure("tool", message))
            return
        now = asyncio.get_running_loop().time()
        if self.give_up_at is not None and now >= self.give_up_at:
            message = "the row's time limit (limits.row) was over while its tools ran"
            self._end("failed", Failure("timeout", message, passing=True))
            return
        messages = [*(self._messages or ()), *added]
        if not self._agent_host.closing:
            call = self._next_call(messages)
            if call is not None:
                self._agent_host.ask(self, call)

    # --- the next turn --------------------------------------------------------------------------

    def _next_call(self, messages: list[Message]) -> Call | None:
        """Return the call with ``messages``; None where they are summarized first."""
        shortener = self._compaction()
        added = messages[len(self._messages or ()) :]
        if shortener.too_long(messages, self._last_size):
            if shortener.summarize(messages):
                self._messages = messages
                return None
            messages, added = shortener.shorten(messages), []
        request = self._turn_request(messages, added)
        self._messages = messages
        return self._call(request)

    @property
    def budget(self) -> TokenBudget:
        """The token budget of its stage."""
        return self.plan.budget

    @property
    def max_tokens(self) -> int | None:
        """Tokens that the answer of a turn may have, where the job sets them."""
        return self.plan.settings.max_tokens

    def send(self, request: Request, handler: SummaryHandler) -> None:
        """Send a call for this row whose reply goes to ``handler``."""
        call = Call(
            handler, request, self.key, self.row.index, self.plan.name, self.answer, self._turns
        )
        call.id = self.row.id
        call.deadline = self.give_up_at
        self._agent_host.ask(self, call)

    def continue_with(self, messages: list[Message]) -> None:
        """Continue with a conversation that a model has summarized."""
        self._messages = messages
        if not self._agent_host.closing:
            self._agent_host.ask(self, self._call(self._turn_request(messages, None)))

    def _turn_request(self, messages: list[Message], added: list[Message] | None) -> Request:
        """Return the request for ``messages``; only what was added to the last one is encoded."""
        last = self._last_call.request if self._last_call is not None else None
        if added and last is not None and last.messages is self._messages:
            payload = last.payload[:-1] + b"," + encode_payload(added)[1:]
        else:
            payload = encode_payload(messages)
        return self._request(payload, messages=messages)

    def _watch(self, turn: int) -> Watch:
        return partial(self._first_call.watched, partial(self._runner().watch, turn))

    def _call(self, request: Request) -> Call:
        if self._tool_runner is not None:
            may_call = self._may_call() and request.tool_choice != "none"
            request.watch = self._watch(self._turns + 1) if may_call else None
        request.returning = self._rounds
        call = super()._call(request)
        call.preferred = self._endpoint
        return call

    def _streamed(self) -> bool:
        choice = self._agent.streaming
        return choice.next(self._turns + 1) if choice is not None else super()._streamed()

    def _retry_request(self, request: Request, messages: list[Message]) -> Request:
        """Return the retry; without tools where the schema can be enforced only without them."""
        again = super()._retry_request(request, messages)
        again.tool_choice = "none" if request.settings.apart else None
        return again

    def _after_truncation(self, call: Call, result: AnswerResult) -> Call | None:
        """Ask again with the schema enforced, where it was not: the answer may never have ended."""
        unbound = call.request.settings.apart and call.request.tool_choice != "none"
        if unbound and self._reasks < self.plan.reasks:
            return self._ask_again(call, result)
        return super()._after_truncation(call, result)

    def _compaction(self) -> Compactor:
        if self._compactor is None:
            self._compactor = Compactor(self, self._agent, self._start)
        return self._compactor

    def note_compaction(self, call: ToolCall, result: ToolResult) -> None:
        """Record in the table of tool calls that the conversation was made shorter."""
        self._runner().record(self._turns, call, result)

    # --- the end --------------------------------------------------------------------------------

    def _end(self, status: str, failure: Failure | None) -> None:
        if self._tool_runner is not None:
            self._tool_runner.cancel()
            kind = failure.kind if failure else self._result.error_kind if self._result else None
            if self._has_written and kind is not None and kind not in PASSING_KINDS:
                self._tool_runner.write_turn(0, [])  # a resumed row starts over
        super()._end(status, failure)


def _asks_for_tools(reply: Reply) -> bool:
    """Return whether a reply ended well and has tool calls, whatever its finish reason."""
    ended = (reply.finish_reason or "").lower() in GOOD_ENDS
    return bool(reply.tool_calls) and ended and not (reply.refusal or "").strip()


def _work_of(turn: Turn) -> ToolTurn:
    """Return what an earlier start left of its last turn."""
    index = next(
        (n for n in reversed(range(len(turn.messages))) if turn.messages[n].get("tool_calls")), None
    )
    if index is None:
        return ToolTurn(
            turn.turn, [*turn.messages, pending_calls_message(turn.begun)], turn.begun, {}
        )
    head, answered = turn.messages[: index + 1], turn.messages[index + 1 :]
    answers = {
        str(message.get("tool_call_id")): str(message.get("content")) for message in answered
    }
    return ToolTurn(turn.turn, head, calls_of(turn.messages[index]), answers)


def _broken(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> str | None:
    """Return the first failure of a turn's tools, if any; calls that never ran do not count."""
    for call, result in zip(calls, results, strict=False):
        if result.error is not None and result.error not in ("unknown_tool", "bad_arguments"):
            return f"tool {call.name} failed: {result.detail or result.error}"
    return None
