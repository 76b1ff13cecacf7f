"""One row's conversation with tools: asks, runs the calls, asks again, until there is an answer.

Between two turns it holds no slot of the fleet. Each whole turn is in the journal before the next
is asked, so that a run that was killed goes on from there.
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
"""Turns in a row in which every call failed: after so many the row fails."""


class AgentConversation(Conversation):
    """One (row, answer) of a stage with tools."""

    __slots__ = (
        "_agent",
        "_agent_host",
        "_compacting",
        "_desk",
        "_endpoint",
        "_faulty",
        "_first_call",
        "_known",
        "_noted",
        "_rounds",
        "_start",
        "_used",
    )  # fmt: skip

    def __init__(
        self, plan: StagePlan, agent: AgentPlan, row: Row, answer: int, host: AgentHost
    ) -> None:
        super().__init__(plan, row, answer, host)
        self._agent = agent
        self._agent_host = host
        self._desk: ToolTurnRunner | None = None
        self._endpoint: str | None = None
        self._faulty = 0
        self._first_call = FirstToolCallTimer(host.now)
        self._known: tuple[int, int] | None = None
        self._noted = False
        self._rounds = 0
        self._start = 0
        self._used: set[str] = set()
        self._compacting: Compactor | None = None

    # --- the first call, of the row or of what an earlier start left ----------------------------

    def open(self) -> Call | None:
        """The first call; None where the row ended, or tools of an earlier start come first."""
        call = super().open()
        if call is None or self.request_hash is None or call.request.messages is None:
            return call
        request_hash = f"{self.request_hash:016x}"
        row = self.row
        unit = ConversationKey(
            self.key, row.index, self.plan.name, self.answer, request_hash, row.id
        )
        self._desk = ToolTurnRunner(
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
        """Go on from the turns of an earlier start; what was begun then is not run again."""
        last = turns[-1]
        self._turns = last.turn
        self._rounds = len(turns)
        self._noted = True
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
            self._desk_now().record(last.turn, call, result, INTERRUPTED)
        if all(call.id in work.answers for call in work.calls):
            added = work.head + [answer_message(call, work.answers[call.id]) for call in work.calls]
            if interrupted:
                self._desk_now().note(last.turn, added)
            return self._next_call(messages + added)
        self._rounds -= 1
        self._agent_host.spawn(self._do(work))
        return None

    def _desk_now(self) -> ToolTurnRunner:
        assert self._desk is not None
        return self._desk

    def _may_call(self) -> bool:
        """Whether the calls that the next turn asks for would be run."""
        return self._rounds + 1 < self._agent.max_turns

    # --- what came of a turn --------------------------------------------------------------------

    def replied(self, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Run the tools that a reply asks for; any other reply is the row's answer."""
        self._note_stream(call, delivery)
        if self._desk is not None and call.request.tool_choice != "none":
            try:
                reply = parse_text_tool_calls(reply, self._agent.tools.definitions)
            except UnreadCallError as error:
                return Failure("bad_response", str(error), text=reply.text)
        if self._desk is None or not _asks_for_tools(reply):
            return super().replied(call, reply, delivery)
        self._last, self._verdict = reply, None
        self._note(delivery)
        self._endpoint = delivery.endpoint
        size = text_bytes(call.request.payload)
        self._add_usage(reply.usage, size)
        if reply.usage.prompt is not None and reply.usage.completion is not None:
            self._known = size, reply.usage.prompt + reply.usage.completion
        self._attempts += call.attempts
        calls = assign_call_ids(reply, self._turns, self._used)
        if not self._may_call():
            most = self._agent.max_turns
            names = ", ".join(dict.fromkeys(one.name for one in calls))
            words = f"no answer within agent.max_turns: {most}; the last turn asks for {names}"
            self._end("failed", Failure("max_turns", words, text=reply.text))
            return None
        self._used.update(one.id for one in calls)
        asked = call.request.messages or []
        head = [*asked[len(self._messages or ()) :], turn_message(reply, calls)]
        work = ToolTurn(self._turns, head, calls, {})
        self._noted = True
        if self._agent_host.closing:
            self._desk.postpone(work)
        else:
            self._agent_host.spawn(self._do(work))
        return None

    def _note_stream(self, call: Call, delivery: Delivery) -> None:
        """Note what a streamed turn saved."""
        choice, at = self._agent.streaming, self._first_call.at
        if choice is not None and call.request.stream and call.request.watch is not None:
            took = delivery.done - delivery.sent
            saved = delivery.done - at if at is not None else 0.0
            choice.note(call.turn, took, saved if 0 < saved <= took else 0.0)

    def failed(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        """End the row, unless a shorter conversation may fit."""
        if failure.kind == "context_overflow" and self._messages is not None:
            self.plan.budget.after_overflow(failure, call.request.max_tokens or 0)
            shorter = self._shortener().after_overflow(self._messages)
            if shorter is not None:
                self._attempts += call.attempts
                self._turns -= 1
                self._messages = shorter
                self._agent_host.ask(self, self._call(self._turn_request(shorter, None)))
                return
        super().failed(call, failure, delivery)

    async def _do(self, work: ToolTurn) -> None:
        """Run a turn's tools, note the turn, ask the next."""
        added, results = await self._desk_now().answer(work)
        self._desk_now().note(work.turn, added)
        self._rounds += 1
        if self._agent.fail_on_tool and (broken := _broken(work.calls, results)):
            self._end("failed", Failure("tool", broken))
            return
        self._faulty = self._faulty + 1 if all(one.error for one in results) else 0
        if self._faulty >= MOST_FAULTY_TURNS:
            words = f"all tool calls of {self._faulty} turns in a row failed: {results[-1].text}"
            self._end("failed", Failure("tool", words))
            return
        now = asyncio.get_running_loop().time()
        if self.give_up_at is not None and now >= self.give_up_at:
            words = "the row's time limit (limits.row) was over while its tools ran"
            self._end("failed", Failure("timeout", words, passing=True))
            return
        messages = [*(self._messages or ()), *added]
        if not self._agent_host.closing:
            call = self._next_call(messages)
            if call is not None:
                self._agent_host.ask(self, call)

    # --- the next turn --------------------------------------------------------------------------

    def _next_call(self, messages: list[Message]) -> Call | None:
        """The call that goes on with ``messages``; None where they are summed up before."""
        shortener = self._shortener()
        added = messages[len(self._messages or ()) :]
        if shortener.too_long(messages, self._known):
            if shortener.sum_up(messages):
                self._messages = messages
                return None
            messages, added = shortener.shorten(messages), []
        request = self._turn_request(messages, added)
        self._messages = messages
        return self._call(request)

    @property
    def budget(self) -> TokenBudget:
        """The budget of its stage."""
        return self.plan.budget

    @property
    def max_tokens(self) -> int | None:
        """What the answer of a turn may take, where the job says so."""
        return self.plan.settings.max_tokens

    def send(self, request: Request, handler: SummaryHandler) -> None:
        """Send a call whose answer ``handler`` takes; it counts for this row."""
        call = Call(
            handler, request, self.key, self.row.index, self.plan.name, self.answer, self._turns
        )
        call.id = self.row.id
        call.deadline = self.give_up_at
        self._agent_host.ask(self, call)

    def summed_up(self, messages: list[Message]) -> None:
        """Go on with a conversation that a model has made shorter."""
        self._messages = messages
        if not self._agent_host.closing:
            self._agent_host.ask(self, self._call(self._turn_request(messages, None)))

    def _turn_request(self, messages: list[Message], added: list[Message] | None) -> Request:
        """The request for ``messages``: only what was added to the last one is encoded."""
        asked = self._asked.request if self._asked is not None else None
        if added and asked is not None and asked.messages is self._messages:
            payload = asked.payload[:-1] + b"," + encode_payload(added)[1:]
        else:
            payload = encode_payload(messages)
        return self._request(payload, messages=messages)

    def _watch(self, turn: int) -> Watch:
        return partial(self._first_call.watched, partial(self._desk_now().watch, turn))

    def _call(self, request: Request) -> Call:
        if self._desk is not None:
            may_call = self._may_call() and request.tool_choice != "none"
            request.watch = self._watch(self._turns + 1) if may_call else None
        request.returning = self._rounds
        call = super()._call(request)
        call.preferred = self._endpoint
        return call

    def _streamed(self) -> bool:
        choice = self._agent.streaming
        return choice.next(self._turns + 1) if choice is not None else super()._streamed()

    def _asking_again(self, request: Request, messages: list[Message]) -> Request:
        """Ask for the answer alone where the schema may be enforced only without tools."""
        again = super()._asking_again(request, messages)
        again.tool_choice = "none" if request.settings.apart else None
        return again

    def _after_cut(self, call: Call, verdict: AnswerResult) -> Call | None:
        """Where nothing bound the answer to the schema it may never have ended: bind it."""
        unbound = call.request.settings.apart and call.request.tool_choice != "none"
        if unbound and self._reasks < self.plan.reasks:
            return self._reask(call, verdict)
        return super()._after_cut(call, verdict)

    def _shortener(self) -> Compactor:
        if self._compacting is None:
            self._compacting = Compactor(self, self._agent, self._start)
        return self._compacting

    def note_compaction(self, call: ToolCall, result: ToolResult) -> None:
        """Note in the table of tool calls that the conversation was made shorter."""
        self._desk_now().record(self._turns, call, result)

    # --- the end --------------------------------------------------------------------------------

    def _end(self, status: str, failure: Failure | None) -> None:
        if self._desk is not None:
            self._desk.cancel()
            kind = failure.kind if failure else self._verdict.error_kind if self._verdict else None
            if self._noted and kind is not None and kind not in PASSING_KINDS:
                self._desk.note(0, [])  # whoever takes the row up again begins anew
        super()._end(status, failure)


def _asks_for_tools(reply: Reply) -> bool:
    """Whether a reply ended well and asks for tools, whatever word it ends with."""
    ended = (reply.finish_reason or "").lower() in GOOD_ENDS
    return bool(reply.tool_calls) and ended and not (reply.refusal or "").strip()


def _work_of(turn: Turn) -> ToolTurn:
    """What an earlier start left of its last turn."""
    place = next(
        (n for n in reversed(range(len(turn.messages))) if turn.messages[n].get("tool_calls")), None
    )
    if place is None:
        return ToolTurn(
            turn.turn, [*turn.messages, pending_calls_message(turn.begun)], turn.begun, {}
        )
    head, rest = turn.messages[: place + 1], turn.messages[place + 1 :]
    answers = {str(one.get("tool_call_id")): str(one.get("content")) for one in rest}
    return ToolTurn(turn.turn, head, calls_of(turn.messages[place]), answers)


def _broken(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> str | None:
    """What failed of a turn's tools, None where nothing did; calls that never ran are the model's
    mistakes."""
    for call, result in zip(calls, results, strict=False):
        if result.error is not None and result.error not in ("unknown_tool", "bad_arguments"):
            return f"tool {call.name} failed: {result.detail or result.error}"
    return None
