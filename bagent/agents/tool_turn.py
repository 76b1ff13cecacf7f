"""The tool calls of one conversation, recorded in the journal before they run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Sequence

import msgspec

from bagent.agents.conversation import Conversation
from bagent.agents.plan import AgentPlan
from bagent.backends.messages import assistant_message
from bagent.clocks import unix
from bagent.store.journal.codec import unit_of
from bagent.text.json import decode_json, encode_json
from bagent.tools import CallContext, ToolResult
from bagent.types import Json, Message, Reply, ToolCall, ToolRecord, Turn

MOST_CALLS = 64
"""Tool calls of one turn that are run; the others are answered with an error."""


def assign_call_ids(reply: Reply, turn: int, used: Container[str]) -> tuple[ToolCall, ...]:
    """Return the calls of ``reply``, each with an id that is unique in the conversation.

    Some servers send no ids, the same one for all, or begin with ``call_0`` each turn. Ids stay
    where the turn is sent back in the provider's own form, which has them.
    """
    if reply.blocks is not None:
        return reply.tool_calls
    calls: list[ToolCall] = []
    taken: set[str] = set()
    for index, call in enumerate(reply.tool_calls):
        name = call.id
        again = 0
        while not name or name in taken or name in used:
            name = f"call_{turn}_{index}" + (f"_{again}" if again else "")
            again += 1
        taken.add(name)
        calls.append(msgspec.structs.replace(call, id=name))
    return tuple(calls)


def turn_message(reply: Reply, calls: Sequence[ToolCall]) -> Message:
    """Return the assistant's message of a turn with ``calls``, in a form that every server takes.

    Arguments are JSON objects as text: servers parse them for their templates.
    """
    wired = tuple(
        msgspec.structs.replace(call, arguments=normalize_arguments(call.arguments))
        for call in calls
    )
    return assistant_message(msgspec.structs.replace(reply, tool_calls=wired))


def pending_calls_message(calls: Sequence[ToolCall]) -> Message:
    """Return the assistant's message for calls of a turn that was lost before it was complete."""
    return turn_message(Reply(None, "tool_calls"), calls)


def answer_message(call: ToolCall, text: str) -> Message:
    """Return the message that answers a call."""
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def normalize_arguments(arguments: str) -> str:
    """Return ``arguments`` as JSON text of an object.

    A text within a text is unwrapped, nothing is an empty object, and any other value is put under
    the key ``arguments``, so that the model sees what it wrote.
    """
    value: Json = arguments
    layers = 0
    while isinstance(value, str) and layers < 2:
        layers += 1
        try:
            value = decode_json(value) if value.strip() else None
        except ValueError:
            return encode_json({"arguments": value})
    if isinstance(value, dict):
        return arguments if layers == 1 else encode_json(value)
    return "{}" if value is None else encode_json({"arguments": value})


def calls_of(message: Message) -> list[ToolCall]:
    """Return the calls of an assistant's message in OpenAI form."""
    calls = []
    for entry in message.get("tool_calls") or ():
        function = entry.get("function") or {}
        calls.append(
            ToolCall(str(entry.get("id")), str(function.get("name")), str(function["arguments"]))
        )
    return calls


def call_key(call: ToolCall) -> tuple[str, str]:
    """Return the key of equal calls: the name, and the arguments whatever their white space."""
    try:
        value = decode_json(call.arguments)
        return call.name, msgspec.json.encode(value, order="deterministic").decode()
    except (ValueError, OverflowError, RecursionError):
        return call.name, call.arguments


MAY_HAVE_RUN = (
    "error: this call was started before the run was interrupted. It may have run, wholly or in"
    " part; it was not started again. Find out what it did before you call it once more."
)

INTERRUPTED = "may_have_run"
"""The error of such a call in the table of tool calls."""

Spawn = Callable[[Coroutine[None, None, None]], "asyncio.Task[None]"]


class ConversationKey(msgspec.Struct, frozen=True):
    """The conversation of calls; ``request_hash`` as in :class:`bagent.types.Turn`."""

    key: str
    row: int
    stage: str
    answer: int
    request_hash: str
    id: Json = None


class PendingToolCall(msgspec.Struct, eq=False):
    """A call that was started; ``risky`` if it may have side effects."""

    call: ToolCall
    risky: bool
    task: asyncio.Task[None] | None = None
    result: ToolResult | None = None


class ToolTurn(msgspec.Struct):
    """One turn's tool calls."""

    turn: int
    head: list[Message]
    """The turn's messages up to the assistant's, which has the calls."""
    calls: Sequence[ToolCall]
    answers: dict[str, str]
    """The texts of answers, by the id of the call."""


def _renamed(turn: int, early: Sequence[PendingToolCall]) -> list[ToolCall]:
    """Return calls of a reply that broke off, with ids that no other call has."""
    return [
        msgspec.structs.replace(begun.call, id=f"call_lost_{turn}_{number}_{begun.call.id}")
        for number, begun in enumerate(early)
    ]


class ToolTurnRunner:
    """Runs the tool calls of one conversation, and writes its turns.

    Args:
        agent: the tools and their rules.
        conversation: the conversation; what it has cost so far is written with each turn.
        spawn: runs a task that ends with the run.
    """

    def __init__(self, agent: AgentPlan, conversation: Conversation, spawn: Spawn) -> None:
        row = conversation.row
        self.key = ConversationKey(
            conversation.key,
            row.index,
            conversation.plan.name,
            conversation.answer,
            f"{conversation.exact_hash or 0:016x}",
            row.id,
        )
        self._agent = agent
        self._conversation = conversation
        self._spawn = spawn
        self._turn = 0
        self._early: dict[tuple[str, str], list[PendingToolCall]] = {}

    # --- calls that start while their turn is streamed ----------------------------------------

    def watch(self, turn: int) -> Callable[[ToolCall], None]:
        """Return the handler that starts the calls of one streamed reply of ``turn`` as they come.

        Where the turn is streamed again, calls that were started before are not started again.
        """
        self._turn = turn
        seen: Counter[tuple[str, str]] = Counter()

        def on_call(call: ToolCall) -> None:
            if self._turn != turn or seen.total() >= MOST_CALLS:
                return
            key = call_key(call)
            seen[key] += 1
            started = self._early.setdefault(key, [])
            if len(started) < seen[key]:
                started.append(self._begin(call, turn))

        return on_call

    def _begin(self, call: ToolCall, turn: int) -> PendingToolCall:
        begun = PendingToolCall(call, self._agent.tools.has_side_effects(call.name))
        if begun.risky:
            waiting = [other for calls in self._early.values() for other in calls if other.risky]
            self.write_turn(turn, [], _renamed(turn, [*waiting, begun]))
        begun.task = self._spawn(self._run(begun))
        return begun

    async def _run(self, begun: PendingToolCall) -> None:
        begun.result = await self._call(begun.call)

    async def _call(self, call: ToolCall) -> ToolResult:
        return await self._agent.tools.call(
            call, CallContext(deadline=self._conversation.give_up_at)
        )

    def close(self, *, is_resumed: bool) -> None:
        """Stop calls that were started early and are in no complete turn; write what has ended.

        Args:
            is_resumed: whether a later start takes up the conversation, and reports the calls that
                have not ended.
        """
        turn, self._turn = self._turn, 0
        early = [begun for calls in self._early.values() for begun in calls]
        self._early.clear()
        for begun in early:
            if begun.task is not None and begun.result is None:
                begun.task.cancel()
        early = [begun for begun in early if begun.risky or begun.result is not None]
        if not early:
            return
        calls = _renamed(turn, early)
        answers, unfinished = [], []
        for call, begun in zip(calls, early, strict=True):
            if begun.result is not None:
                self.record(turn, call, begun.result)
                answers.append(answer_message(call, begun.result.text))
            else:
                unfinished.append(call)
                if not is_resumed:
                    self.record_interrupted_call(turn, call, unix())
        self.write_turn(turn, [pending_calls_message(calls), *answers], unfinished)

    # --- complete turns -------------------------------------------------------------------------

    async def end_interrupted(self, work: ToolTurn) -> None:
        """Write a turn whose calls a later start runs, with the answers to those that run already.

        Where this is cancelled, calls that have not ended may have run.
        """
        self._turn = 0
        started = self._claim(work.calls)
        self.write_partial_turn(work, [begun.call for begun in started.values()])
        await self._gather(work, started)
        self.write_turn(work.turn, self._messages(work))

    async def answer(
        self, work: ToolTurn
    ) -> tuple[list[Message], list[tuple[ToolCall, ToolResult]]]:
        """Run the calls in parallel; return the messages of the turn, and each call's result.

        Results are in the order of the calls. Calls that an earlier start answered have none.
        """
        self._turn = 0
        started = self._claim(work.calls)
        lost = await self._stop_unclaimed(work.turn)
        if lost:
            work.head = lost + work.head
        todo = [c for c in work.calls if c.id not in work.answers and c.id not in started]
        results = {}
        if len(started) + len(todo) > MOST_CALLS:
            room = max(0, MOST_CALLS - len(started))
            todo, excess = todo[:room], todo[room:]
            too_many = ToolResult(_TOO_MANY, "failed", started=unix())
            results = {call.id: too_many for call in excess}
        if any(self._agent.tools.has_side_effects(call.name) for call in todo):
            self.write_partial_turn(work, [*(pending.call for pending in started.values()), *todo])
        if len(todo) == 1 and not started and not results:
            results[todo[0].id] = await self._call(todo[0])
        else:
            for call in todo:
                begun = PendingToolCall(call, self._agent.tools.has_side_effects(call.name))
                begun.task = self._spawn(self._run(begun))
                started[call.id] = begun
            results |= await self._gather(work, started)
        for call in work.calls:
            if call.id in results and call.id not in work.answers:
                work.answers[call.id] = results[call.id].text
                self.record(work.turn, call, results[call.id])
        pairs = [(call, results[call.id]) for call in work.calls if call.id in results]
        return self._messages(work), pairs

    async def _gather(
        self, work: ToolTurn, started: dict[str, PendingToolCall]
    ) -> dict[str, ToolResult]:
        """Wait for all calls; write the results of risky ones while others still run."""
        results: dict[str, ToolResult] = {}
        waiting = {
            pending.task: pending for pending in started.values() if pending.task is not None
        }
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended = [waiting.pop(task) for task in done]
            for pending in ended:
                result = pending.result or ToolResult("error: the call was stopped", "failed")
                results[pending.call.id] = result
                work.answers[pending.call.id] = result.text
                self.record(work.turn, pending.call, result)  # a partial turn must be consistent
            if waiting and any(pending.risky for pending in ended):
                self.write_partial_turn(
                    work, [pending.call for pending in waiting.values() if pending.risky]
                )
        return results

    def _claim(self, calls: Sequence[ToolCall]) -> dict[str, PendingToolCall]:
        """Take the calls that run already, by their id in the conversation."""
        claimed: dict[str, PendingToolCall] = {}
        for call in calls if self._early else ():
            same = self._early.get(call_key(call))
            if same:
                claimed[call.id] = begun = same.pop(0)
                begun.call = call
        return claimed

    async def _stop_unclaimed(self, turn: int) -> list[Message]:
        """Stop the calls of an interrupted reply that the complete one does not have.

        Calls with side effects run to their end; return messages that tell the model of them.
        """
        unclaimed = [begun for calls in self._early.values() for begun in calls]
        self._early.clear()
        tasks = []
        for begun in unclaimed:
            if begun.task is not None and begun.risky:
                tasks.append(begun.task)
            elif begun.task is not None:
                begun.task.cancel()
        if not tasks:
            return []
        await asyncio.wait(tasks)
        finished = [begun for begun in unclaimed if begun.risky and begun.result is not None]
        calls = _renamed(turn, finished)
        texts = [begun.result.text if begun.result else "" for begun in finished]
        answers = [answer_message(call, text) for call, text in zip(calls, texts, strict=True)]
        for call, begun in zip(calls, finished, strict=True):
            if begun.result is not None:
                self.record(turn, call, begun.result)
        return [pending_calls_message(calls), *answers] if calls else []

    # --- journal --------------------------------------------------------------------------------

    def write_partial_turn(self, work: ToolTurn, begun: Sequence[ToolCall]) -> None:
        """Write an incomplete turn, with the calls that may be running."""
        risky = [call for call in begun if self._agent.tools.has_side_effects(call.name)]
        self.write_turn(work.turn, self._messages(work), risky)

    def write_turn(
        self, turn: int, messages: list[Message], begun: Sequence[ToolCall] = ()
    ) -> None:
        """Write a turn, complete or not, and count what it cost."""
        unit, spending = self.key, self._agent.spending
        if spending is not None:
            name = unit_of(int(unit.key, 16), unit.stage, unit.answer)
            spending.spend(name, *self._conversation.spent())
        self._log_turn(turn, messages, begun)

    def _log_turn(self, turn: int, messages: list[Message], begun: Sequence[ToolCall] = ()) -> None:
        unit = self.key
        self._agent.log.write_turn(
            Turn(
                unit.key,
                unit.row,
                unit.stage,
                unit.answer,
                turn,
                messages,
                begun=list(begun),
                request_hash=unit.request_hash,
                at=round(unix(), 3),
                usage=self._conversation.usage,
                summary_usage=self._conversation.summary_usage,
                attempts=self._conversation.attempts,
            )
        )

    @staticmethod
    def _messages(work: ToolTurn) -> list[Message]:
        return work.head + [
            answer_message(call, work.answers[call.id])
            for call in work.calls
            if call.id in work.answers
        ]

    def forget_turns(self) -> None:
        """Have the next start begin the conversation again; the outcome counts what it cost."""
        self._log_turn(0, [])

    def record_interrupted_call(self, turn: int, call: ToolCall, started: float) -> None:
        """Write a call that may have run to the table of tool calls."""
        self.record(turn, call, ToolResult(MAY_HAVE_RUN, "failed", started=started), INTERRUPTED)

    def record(
        self, turn: int, call: ToolCall, result: ToolResult, error: str | None = None
    ) -> None:
        """Write one call to the table of tool calls; ``error`` replaces the result's own."""
        unit = self.key
        if result.trace:
            self._agent.log_text(f"tool {call.name} failed\n{result.trace}")
        self._agent.log.write_tool(
            ToolRecord(
                key=unit.key,
                row=unit.row,
                stage=unit.stage,
                answer=unit.answer,
                turn=turn,
                name=call.name,
                arguments=call.arguments,
                started=round(result.started, 4),
                shared=result.shared,
                cached=result.cached,
                latency_ms=round(result.latency_ms, 2),
                error=error or result.detail or result.error,
                id=unit.id,
            )
        )


_TOO_MANY = (
    f"error: not run: one turn may ask for at most {MOST_CALLS} calls. Ask for it again if needed."
)
