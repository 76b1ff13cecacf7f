"""Runs the tool calls of one conversation, and notes which were begun before they run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Sequence

import msgspec

from bagent.agents.plan import AgentPlan
from bagent.backends.messages import assistant_message
from bagent.clocks import unix
from bagent.text.json import decode_json, encode_json
from bagent.tools import CallContext, ToolResult
from bagent.types import Json, Message, Reply, ToolCall, ToolRecord, Turn, Usage

MOST_CALLS = 64
"""Most tool calls of one turn that are run; the others are answered with a fault."""


def assign_call_ids(reply: Reply, turn: int, used: Container[str]) -> tuple[ToolCall, ...]:
    """The calls of ``reply``, each with an id that no other call of the conversation has.

    Some servers send no ids, the same one for all, or start again with ``call_0`` each turn. Where
    the turn is given back in the provider's own form its ids stand there, and stay.
    """
    if reply.blocks is not None:
        return reply.tool_calls
    found: list[ToolCall] = []
    taken: set[str] = set()
    for place, call in enumerate(reply.tool_calls):
        name = call.id
        again = 0
        while not name or name in taken or name in used:
            name = f"call_{turn}_{place}" + (f"_{again}" if again else "")
            again += 1
        taken.add(name)
        found.append(msgspec.structs.replace(call, id=name))
    return tuple(found)


def turn_message(reply: Reply, calls: Sequence[ToolCall]) -> Message:
    """The assistant's message of a turn that asks for ``calls``, as every server takes it.

    Arguments are the JSON text of one object: servers parse them to fill in their templates.
    """
    wired = tuple(
        msgspec.structs.replace(call, arguments=normalize_arguments(call.arguments))
        for call in calls
    )
    return assistant_message(msgspec.structs.replace(reply, tool_calls=wired))


def pending_calls_message(calls: Sequence[ToolCall]) -> Message:
    """The assistant's message for calls whose own turn was lost before it was whole."""
    return turn_message(Reply(None, "tool_calls"), calls)


def answer_message(call: ToolCall, text: str) -> Message:
    """The message that answers a call."""
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def normalize_arguments(arguments: str) -> str:
    """``arguments`` as JSON text that decodes once, to an object.

    Text within text is taken out of it, nothing is an empty object, and what is no object stands
    under the key ``arguments``, so that the model sees what it wrote.
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
    """The calls of an assistant's message in OpenAI form."""
    found = []
    for entry in message.get("tool_calls") or ():
        function = entry.get("function") or {}
        found.append(
            ToolCall(str(entry.get("id")), str(function.get("name")), str(function["arguments"]))
        )
    return found


def call_key(call: ToolCall) -> tuple[str, str]:
    """What two equal calls have in common: the name, and the arguments however they are spaced."""
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
"""What the table of tool calls has as the error of such a call."""

Spawn = Callable[[Coroutine[None, None, None]], "asyncio.Task[None]"]


class ConversationKey(msgspec.Struct, frozen=True):
    """Whose calls they are; ``request_hash`` as in :class:`bagent.types.Turn`."""

    key: str
    row: int
    stage: str
    answer: int
    request_hash: str
    id: Json = None


class PendingToolCall(msgspec.Struct, eq=False):
    """A call that was started."""

    call: ToolCall
    risky: bool
    task: asyncio.Task[None] | None = None
    result: ToolResult | None = None


class ToolTurn(msgspec.Struct):
    """One turn's calls; ``head`` are the turn's messages up to the assistant's, with the calls.

    ``answers`` are the texts known already, by the id of the call.
    """

    turn: int
    head: list[Message]
    calls: Sequence[ToolCall]
    answers: dict[str, str]


class ToolTurnRunner:
    """The tools of one conversation.

    Args:
        spawn: runs a task that ends with the run.
        deadline: the event loop's time at which the row's own limit is over.
        spent: what the turns so far took, and in how many attempts: noted with each.
    """

    def __init__(
        self,
        agent: AgentPlan,
        unit: ConversationKey,
        spawn: Spawn,
        deadline: Callable[[], float | None],
        spent: Callable[[], tuple[Usage, int]],
    ) -> None:
        self._agent = agent
        self._unit = unit
        self._spawn = spawn
        self._deadline = deadline
        self._spent = spent
        self._turn = 0
        self._early: dict[tuple[str, str], list[PendingToolCall]] = {}

    # --- calls that begin before their turn is whole ------------------------------------------

    def watch(self, turn: int) -> Callable[[ToolCall], None]:
        """Watch one streamed answer of ``turn``: calls start as they come.

        Where the turn is streamed again, a call that was started the first time is not started
        again.
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
            waiting = [s.call for some in self._early.values() for s in some if s.risky]
            self.note(turn, [], [*waiting, call])
        begun.task = self._spawn(self._run(begun))
        return begun

    async def _run(self, begun: PendingToolCall) -> None:
        begun.result = await self._call(begun.call)

    async def _call(self, call: ToolCall) -> ToolResult:
        return await self._agent.tools.call(call, CallContext(deadline=self._deadline()))

    def cancel(self) -> None:
        """Stop what was started early and nobody asked for."""
        self._turn = 0
        for some in self._early.values():
            for begun in some:
                if begun.task is not None:
                    begun.task.cancel()
        self._early.clear()

    # --- a whole turn ---------------------------------------------------------------------------

    def postpone(self, work: ToolTurn) -> None:
        """Note a turn whose calls are to run at another time; those begun may have run."""
        self._turn = 0
        early = self._claimed(work.calls)
        self.note(work.turn, work.head, [one.call for one in early.values() if one.risky])

    async def answer(self, work: ToolTurn) -> tuple[list[Message], list[ToolResult]]:
        """Run the calls side by side: the messages of the whole turn, and what the calls gave."""
        self._turn = 0
        started = self._claimed(work.calls)
        lost = await self._lost(work.turn)
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
            self.note_part(work, [*(one.call for one in started.values()), *todo])
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
        return self._messages(work), list(results.values())

    async def _gather(
        self, work: ToolTurn, started: dict[str, PendingToolCall]
    ) -> dict[str, ToolResult]:
        """Wait for all; what tools with side effects did is noted while others still run."""
        results: dict[str, ToolResult] = {}
        waiting = {one.task: one for one in started.values() if one.task is not None}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            over = [waiting.pop(task) for task in done]
            for one in over:
                found = one.result or ToolResult("error: the call was stopped", "failed")
                results[one.call.id] = found
                work.answers[one.call.id] = found.text
                self.record(work.turn, one.call, found)  # at once: a part that is noted is whole
            if waiting and any(one.risky for one in over):
                self.note_part(work, [one.call for one in waiting.values() if one.risky])
        return results

    def _claimed(self, calls: Sequence[ToolCall]) -> dict[str, PendingToolCall]:
        """The calls that are running already, by the id that they have in the conversation."""
        found: dict[str, PendingToolCall] = {}
        for call in calls if self._early else ():
            same = self._early.get(call_key(call))
            if same:
                found[call.id] = begun = same.pop(0)
                begun.call = call
        return found

    async def _lost(self, turn: int) -> list[Message]:
        """What was started of an answer that was cut off, and is not in the whole one.

        It is stopped, unless it has side effects: these the model has to know of.
        """
        left = [begun for some in self._early.values() for begun in some]
        self._early.clear()
        tasks = []
        for begun in left:
            if begun.task is not None and begun.risky:
                tasks.append(begun.task)
            elif begun.task is not None:
                begun.task.cancel()
        if not tasks:
            return []
        await asyncio.wait(tasks)
        kept = [begun for begun in left if begun.risky and begun.result is not None]
        calls = [
            msgspec.structs.replace(begun.call, id=f"call_lost_{number}_{begun.call.id}")
            for number, begun in enumerate(kept)
        ]
        texts = [begun.result.text if begun.result else "" for begun in kept]
        answers = [answer_message(call, text) for call, text in zip(calls, texts, strict=True)]
        for call, begun in zip(calls, kept, strict=True):
            if begun.result is not None:
                self.record(turn, call, begun.result)
        return [pending_calls_message(calls), *answers] if calls else []

    # --- notes ----------------------------------------------------------------------------------

    def note_part(self, work: ToolTurn, begun: Sequence[ToolCall]) -> None:
        """Note a turn that is not whole, with the calls that may be running."""
        risky = [call for call in begun if self._agent.tools.has_side_effects(call.name)]
        self.note(work.turn, self._messages(work), risky)

    def note(self, turn: int, messages: list[Message], begun: Sequence[ToolCall] = ()) -> None:
        """Write a turn, whole or not."""
        unit = self._unit
        usage, attempts = self._spent()
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
                usage=usage,
                attempts=attempts,
            )
        )

    @staticmethod
    def _messages(work: ToolTurn) -> list[Message]:
        return work.head + [
            answer_message(call, work.answers[call.id])
            for call in work.calls
            if call.id in work.answers
        ]

    def record(
        self, turn: int, call: ToolCall, result: ToolResult, error: str | None = None
    ) -> None:
        """Note one call for the table of tool calls; ``error`` in place of the result's own."""
        unit = self._unit
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
