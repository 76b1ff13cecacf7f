"""The conversation of one row with tools: requests and tool calls in turns, until an answer.

It holds no slot of the fleet between turns. Each turn is in the journal before the next request,
so that a run that was killed resumes from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from bagent.agents.compaction import Compactor
from bagent.agents.conversation import Conversation, text_bytes
from bagent.agents.plan import AgentPlan, FirstToolCallTimer
from bagent.agents.text_tool_calls import UnreadCallError, parse_text_tool_calls
from bagent.agents.tool_turn import (
    MAY_HAVE_RUN,
    ToolTurn,
    ToolTurnRunner,
    assign_call_ids,
    calls_of,
    pending_calls_message,
    turn_message,
)
from bagent.answers.evaluate import GOOD_ENDS
from bagent.backends.request import Request, Watch, encode_payload
from bagent.clocks import unix
from bagent.fleet.call import Call, CallResult, Delivery
from bagent.fleet.fleet import Fleet
from bagent.store.journal.codec import unit_of
from bagent.tools import ToolResult
from bagent.types import PASSING_KINDS, Failure, Message, Outcome, Reply, ToolCall, Turn

MOST_FAULTY_TURNS = 5
"""Consecutive turns in which every call failed, after which the row fails."""


class Agent:
    """The agent loop of one (row, answer) of a stage with tools.

    Args:
        conversation: the row's conversation; it evaluates answers and asks again.
        agent_plan: the tools and the rules for turns.
        fleet: sends calls.
    """

    def __init__(self, conversation: Conversation, agent_plan: AgentPlan, fleet: Fleet) -> None:
        self._conversation = conversation
        self._agent_plan = agent_plan
        self._fleet = fleet
        self._tools = ToolTurnRunner(agent_plan, conversation, fleet.spawn)
        self._first_tool_call = FirstToolCallTimer(unix)
        start = len(conversation.messages or ())
        self._compactor = Compactor(conversation.plan, agent_plan, start, self._record_compaction)
        self._endpoint: str | None = None
        """The endpoint whose cache holds the last turn."""
        self._last_request: Request | None = None
        self._last_size: tuple[int, int] | None = None
        """Bytes of the last turn's prompt, and the tokens of it and of its answer."""
        self._tool_reply: Reply | None = None
        """The last reply where it asks for tools."""
        self._used_ids: set[str] = set()
        self._rounds = 0
        """Turns whose tools have run."""
        self._faulty = 0
        """Turns in a row in which every tool call failed."""
        self._has_written = False

    async def run(self, call: Call) -> Outcome | None:
        """Ask and run tools until a reply is the row's answer.

        Return None where the run ends before the tools of a turn ran: a later start runs them.
        """
        step: Call | ToolTurn | Outcome = self._resume(call) or self._first_turn(call)
        try:
            while not isinstance(step, Outcome):
                if isinstance(step, Call):
                    self._last_request = step.request
                    # A further call goes before new rows.
                    end = await self._fleet.request(step, urgent=step is not call)
                    step = self._handle(step, end)
                elif self._fleet.closed:
                    await self._tools.end_interrupted(step)
                    return None
                else:
                    step = await self._run_tools(step)
        except asyncio.CancelledError:
            self._tools.close(is_resumed=True)
            raise
        self._close(step)
        return step

    # --- the first turn -------------------------------------------------------------------------

    def _first_turn(self, call: Call) -> Call:
        if self._may_call_tools():
            call.request.tool_choice = self._agent_plan.first_choice
        self._choose_streaming(call.request, 1)
        return self._prepare(call)

    def _resume(self, first: Call) -> ToolTurn | None:
        """Return the last turn of an earlier start, if there is one.

        Calls that may have run already are not run again.
        """
        conversation, tools = self._conversation, self._tools
        unit = unit_of(conversation.row.key, conversation.plan.name, conversation.answer)
        turns = self._agent_plan.earlier(unit)
        if not turns or any(turn.request_hash != tools.key.request_hash for turn in turns):
            return None
        last = turns[-1]
        conversation.turns = last.turn
        self._rounds = len(turns) - 1
        self._has_written = True
        if last.usage is not None:
            conversation.usage, conversation.attempts = last.usage, last.attempts
        conversation.summary_usage = last.summary_usage
        if self._agent_plan.spending is not None:
            self._agent_plan.spending.resume_conversation(unit, *conversation.spent())
        messages = list(first.request.messages or ())
        for turn in turns[:-1]:
            messages += turn.messages
        conversation.messages = messages
        work = _work_of(last)
        self._used_ids = {call.id for message in messages for call in calls_of(message)}
        self._used_ids |= {call.id for call in work.calls}
        begun = {call.id for call in last.begun}
        for call in work.calls:
            if call.id in begun:
                work.answers[call.id] = MAY_HAVE_RUN
                tools.record_interrupted_call(last.turn, call, last.at or unix())
        return work

    def _may_call_tools(self) -> bool:
        """Return whether tool calls of the next turn would be run."""
        return self._rounds + 1 < self._agent_plan.max_turns

    # --- replies --------------------------------------------------------------------------------

    def _evaluate(self, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Note a reply that asks for tools; any other one is evaluated as the row's answer."""
        self._note_stream(call, delivery)
        if call.request.tool_choice != "none":
            try:
                reply = parse_text_tool_calls(reply, self._agent_plan.tools.definitions)
            except UnreadCallError as error:
                self._conversation.note_reply(call, reply, delivery, None)
                return Failure("bad_response", str(error), text=reply.text)
        if not _asks_for_tools(reply):
            self._tool_reply = None
            return self._conversation.evaluate(call, reply, delivery)
        self._tool_reply = reply
        self._endpoint = delivery.endpoint
        self._conversation.note_reply(call, reply, delivery, None)
        if reply.usage.prompt is not None and reply.usage.completion is not None:
            tokens = reply.usage.prompt + reply.usage.completion
            self._last_size = text_bytes(call.request.payload), tokens
        return None

    def _handle(self, call: Call, end: CallResult) -> Call | ToolTurn | Outcome:
        """Return the next step after the end of ``call``."""
        if isinstance(end.result, Failure):
            shorter = self._shorten_after(end.result, call)
            if shorter is not None:
                return shorter
        elif self._tool_reply is not None:
            return self._tool_turn(call, self._tool_reply)
        step = self._conversation.handle(call, end)
        return self._prepare(step) if isinstance(step, Call) else step

    def _tool_turn(self, call: Call, reply: Reply) -> ToolTurn | Outcome:
        """Return the turn whose tool calls ``reply`` has, or the outcome where it is one too many.

        Retry prompts since the last turn become part of the conversation.
        """
        conversation = self._conversation
        conversation.attempts += call.attempts
        calls = assign_call_ids(reply, conversation.turns, self._used_ids)
        if not self._may_call_tools():
            most = self._agent_plan.max_turns
            names = ", ".join(dict.fromkeys(call.name for call in calls))
            message = f"no answer within agent.max_turns: {most}; the last turn asks for {names}"
            return conversation.end("failed", Failure("max_turns", message, text=reply.text))
        self._used_ids.update(call.id for call in calls)
        requested = call.request.messages or []
        head = [*requested[len(conversation.messages or ()) :], turn_message(reply, calls)]
        self._has_written = True
        return ToolTurn(conversation.turns, head, calls, {})

    def _note_stream(self, call: Call, delivery: Delivery) -> None:
        """Note how much time a streamed turn saved."""
        choice, at = self._agent_plan.streaming, self._first_tool_call.at
        if choice is not None and call.request.stream and call.request.watch is not None:
            took = delivery.done - delivery.sent
            saved = delivery.done - at if at is not None else 0.0
            choice.note(call.turn, took, saved if 0 < saved <= took else 0.0)

    def _shorten_after(self, failure: Failure, call: Call) -> Call | None:
        """Return the same turn with a shorter conversation, where that was too long."""
        conversation = self._conversation
        if failure.kind != "context_overflow" or conversation.messages is None:
            return None
        conversation.plan.budget.after_overflow(failure, call.request.max_tokens or 0)
        shorter = self._compactor.after_overflow(conversation.messages)
        if shorter is None:
            return None
        conversation.attempts += call.attempts
        return self._turn(shorter, None, is_resent=True)

    # --- tools and the next turn ----------------------------------------------------------------

    async def _run_tools(self, work: ToolTurn) -> Call | Outcome:
        """Run a turn's tools, write the turn, and return the next one."""
        conversation = self._conversation
        added, results = await self._tools.answer(work)
        self._tools.write_turn(work.turn, added)
        self._rounds += 1
        if self._agent_plan.fail_on_tool and (failure := _first_failure(results)):
            return conversation.end("failed", Failure("tool", failure))
        all_failed = bool(results) and all(result.error for _, result in results)
        self._faulty = self._faulty + 1 if all_failed else 0
        if self._faulty >= MOST_FAULTY_TURNS:
            message = (
                f"all tool calls of {self._faulty} turns in a row failed: {results[-1][1].text}"
            )
            return conversation.end("failed", Failure("tool", message))
        now, give_up_at = asyncio.get_running_loop().time(), conversation.give_up_at
        if give_up_at is not None and now >= give_up_at:
            message = "the row's time limit (limits.row) was over while its tools ran"
            return conversation.end("failed", Failure("timeout", message, passing=True))
        messages = [*(conversation.messages or ()), *added]
        if self._compactor.too_long(messages, self._last_size):
            return self._turn(await self._compact(messages), None)
        return self._turn(messages, added)

    async def _compact(self, messages: list[Message]) -> list[Message]:
        """Return ``messages`` made shorter, by a model's summary where the job has one."""
        request = self._compactor.summary_request(messages)
        if request is None:
            return self._compactor.shorten(messages)
        call = self._conversation.new_call(request, lambda call, reply, delivery: None)
        end = await self._fleet.request(call, urgent=True)
        if isinstance(end.result, Failure) or end.delivery is None:
            return self._compactor.shorten(messages)
        self._conversation.note_summary(end.result.usage)
        took = end.delivery.done - end.delivery.sent
        return self._compactor.summarize(messages, end.result.text, took)

    def _turn(
        self, messages: list[Message], added: list[Message] | None, *, is_resent: bool = False
    ) -> Call:
        """Return the call with ``messages``; only what was ``added`` to the last is encoded.

        ``is_resent`` if it repeats the last turn.
        """
        conversation, last = self._conversation, self._last_request
        if added and last is not None and last.messages is conversation.messages:
            payload = last.payload[:-1] + b"," + encode_payload(added)[1:]
        else:
            payload = encode_payload(messages)
        conversation.messages = messages
        request = conversation.request(payload, messages=messages)
        call = conversation.resend(request) if is_resent else conversation.ask(request)
        self._choose_streaming(call.request, call.turn)
        return self._prepare(call)

    def _prepare(self, call: Call) -> Call:
        """Have a call evaluated here, and its tool calls started while it is streamed."""
        request = call.request
        may_call = self._may_call_tools() and request.tool_choice != "none"
        request.watch = self._watch(call.turn) if may_call else None
        request.returning = self._rounds
        call.evaluate = self._evaluate
        call.preferred = self._endpoint
        return call

    def _choose_streaming(self, request: Request, turn: int) -> None:
        if self._agent_plan.streaming is not None:
            request.stream = self._agent_plan.streaming.next(turn)

    def _watch(self, turn: int) -> Watch:
        return partial(self._first_tool_call.watched, partial(self._tools.watch, turn))

    def _record_compaction(self, call: ToolCall, result: ToolResult) -> None:
        self._tools.record(self._conversation.turns, call, result)

    # --- the end --------------------------------------------------------------------------------

    def _close(self, outcome: Outcome) -> None:
        """Stop tools that started early; let a row that failed for good start over.

        This is noted once the outcome is written: a row without an outcome resumes where it was.
        """
        kind = outcome.error_kind
        is_resumed = kind is not None and kind in PASSING_KINDS
        self._tools.close(is_resumed=is_resumed)
        if self._has_written and kind is not None and not is_resumed:
            self._conversation.on_written = self._tools.forget_turns


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


def _first_failure(results: Sequence[tuple[ToolCall, ToolResult]]) -> str | None:
    """Return the first failure of a turn's tools, if any; calls that never ran do not count."""
    for call, result in results:
        if result.error is not None and result.error not in ("unknown_tool", "bad_arguments"):
            return f"tool {call.name} failed: {result.detail or result.error}"
    return None
