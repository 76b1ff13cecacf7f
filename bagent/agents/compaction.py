"""Making a long conversation shorter before it fills the model's context.

Calls and their answers always stay together: no message goes, answers of tools become shorter, the
oldest first. Or a small model sums up the older turns, which then go as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bagent.agents.conversation import text_bytes
from bagent.agents.plan import AgentPlan
from bagent.agents.token_budget import LEAST, MARGIN_TOKENS, TokenBudget
from bagent.answers.reasoning import split_reasoning
from bagent.answers.retry_prompt import truncate_middle
from bagent.backends.request import Request, encode_payload
from bagent.clocks import unix
from bagent.fleet.call import Call, Delivery
from bagent.text.json import encode_json
from bagent.tools import ToolResult
from bagent.types import Failure, Message, Reply, ToolCall

RECORD = "(compaction)"
"""What stands as the name in the table of tool calls: no tool can have it."""

GOAL = 0.6
"""A conversation that is too long is cut to this share of its limit, so that turns follow before
the next time: each time the engine's cache of it is lost."""

SHORT = 200
"""Characters that are left of an old answer."""

KEPT_TURNS = 2
"""So many turns stay as they are, if that is enough."""

SUMMARY_TOKENS = 1024

_WORDS = (
    "Sum up the work below so that somebody can go on with it: what was asked of which tool, what"
    " was found, with all numbers, names and identifiers that may still be needed, what failed, and"
    " what is left to do. No introduction."
)
_HEADING = "Summary of the work so far, in place of the turns themselves:"


class CompactionHost(Protocol):
    """The conversation that is made shorter."""

    @property
    def budget(self) -> TokenBudget:
        """The budget of its stage."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """What the answer of a turn may take, where the job says so."""
        ...

    def send(self, request: Request, handler: SummaryHandler) -> None:
        """Send a call whose answer ``handler`` takes."""
        ...

    def summed_up(self, messages: list[Message]) -> None:
        """Go on with these messages."""
        ...

    def note_compaction(self, call: ToolCall, result: ToolResult) -> None:
        """Note that it was made shorter."""
        ...


class Compactor:
    """Decides when one conversation is too long, and makes it shorter.

    Args:
        start: how many messages are the row's own prompt; they stay as they are.
    """

    def __init__(self, owner: CompactionHost, agent: AgentPlan, start: int) -> None:
        self._owner = owner
        self._agent = agent
        self._start = start
        self._overflowed = False
        self._tokens = 0

    def too_long(self, messages: Sequence[Message], known: tuple[int, int] | None) -> bool:
        """Whether the next turn should not be asked with all of ``messages``.

        Args:
            messages: the whole conversation.
            known: bytes of the last turn's prompt, and the tokens of it and of its answer.
        """
        limit = self._limit()
        if limit is None:
            return False
        size = _size(messages)
        tokens = self._owner.budget.whole(size)
        if known is not None:
            tokens = known[1] + self._owner.budget.tokens(max(0, size - known[0]))
        self._tokens = tokens
        return tokens > limit

    def _limit(self) -> int | None:
        """Tokens that a prompt may have; None where the context is not known."""
        context = self._owner.budget.context
        if context is None:
            return None
        left = context - MARGIN_TOKENS - (self._owner.max_tokens or LEAST)
        return min(int(context * self._agent.compact_at), left)

    def shorten(self, messages: list[Message]) -> list[Message]:
        """``messages`` with the answers of tools cut, the oldest first."""
        size = _size(messages)
        limit = self._limit() or 0
        goal = int(size * GOAL * limit / max(1, self._tokens))
        shorter, count = cut_answers(messages, self._start, goal)
        self._note(size, _size(shorter), {"by": "cutting", "answers_cut": count})
        return shorter

    def after_overflow(self, messages: list[Message]) -> list[Message] | None:
        """Half of ``messages``, once; None where nothing of it can be cut."""
        if self._overflowed:
            return None
        self._overflowed = True
        size = _size(messages)
        self._tokens = self._owner.budget.whole(size)
        shorter, count = cut_answers(messages, self._start, size // 2)
        if not count:
            return None
        self._note(size, _size(shorter), {"by": "cutting", "answers_cut": count})
        return shorter

    def sum_up(self, messages: list[Message]) -> bool:
        """Have a model sum up the older turns; False where there are none."""
        settings = self._agent.summary_settings
        recent = _recent(messages, self._start)
        if settings is None or recent <= self._start:
            return False
        context = self._owner.budget.context or 0
        room = int(context * 0.6 / max(self._owner.budget.tokens(1000) / 1000, 0.01))
        text = truncate_middle(_transcript(messages[self._start : recent]), max(1000, room))
        asked: list[Message] = [
            {"role": "system", "content": _WORDS},
            {"role": "user", "content": text},
        ]
        request = Request(
            settings, encode_payload(asked), messages=asked, max_tokens=SUMMARY_TOKENS
        )
        self._owner.send(request, SummaryHandler(self, messages, recent))
        return True

    def take_summary(
        self, messages: list[Message], recent: int, text: str | None, took: float
    ) -> None:
        """Put a summary in the place of the older turns; without one, cut."""
        if not text:
            self._owner.summed_up(self.shorten(messages))
            return
        size = _size(messages)
        prompt = with_summary(messages[: self._start], text)
        self._start = len(prompt)
        shorter = prompt + messages[recent:]
        settings = self._agent.summary_settings
        by = settings.model if settings is not None else None
        self._note(size, _size(shorter), {"by": by, "messages_left_out": recent}, took)
        self._owner.summed_up(shorter)

    def _note(
        self, before: int, after: int, words: dict[str, Any], took: float | None = None
    ) -> None:
        tokens = self._tokens
        told = {"before_tokens": tokens, "after_tokens": tokens * after // max(1, before), **words}
        call = ToolCall("", RECORD, encode_json(told))
        latency = (took or 0.0) * 1000
        self._owner.note_compaction(call, ToolResult("", latency_ms=latency, started=unix()))


class SummaryHandler:
    """Takes the summary that a model makes; a :class:`bagent.fleet.call.CallHandler`."""

    def __init__(self, compacting: Compactor, messages: list[Message], recent: int) -> None:
        self._compacting = compacting
        self._messages = messages
        self._recent = recent

    def replied(self, call: Call, reply: Reply, delivery: Delivery) -> Failure | None:
        """Put the summary in place, or cut where there is none."""
        text = split_reasoning(reply.text or "").text.strip()
        took = delivery.done - delivery.sent
        self._compacting.take_summary(self._messages, self._recent, text, took)
        return None

    def failed(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        """Cut instead."""
        self._compacting.take_summary(self._messages, self._recent, None, 0.0)


def cut_answers(messages: list[Message], start: int, goal: int) -> tuple[list[Message], int]:
    """``messages`` with answers of tools after ``start`` cut until they take ``goal`` bytes.

    The oldest first, to :data:`SHORT` characters; the last turns only where that is not enough,
    and then to equal shares. Also returns how many were cut.
    """
    found = list(messages)
    size = _size(found)
    answers = [n for n in range(start, len(found)) if found[n].get("role") == "tool"]
    recent = _recent(found, start)
    count = 0
    for place in answers:
        if size <= goal or place >= recent:
            break
        saved = _cut(found, place, SHORT)
        size -= saved
        count += saved > 0
    if size > goal:
        late = [place for place in answers if place >= recent]
        taken = sum(len(encode_payload(found[place]["content"])) for place in late)
        share = max(SHORT, (goal - (size - taken)) // max(1, len(late)))
        count += sum(_cut(found, place, share) > 0 for place in late)
    return found, count


def _cut(messages: list[Message], place: int, characters: int) -> int:
    """Cut one message's text; returns the bytes saved."""
    before = messages[place]
    text = before.get("content")
    if not isinstance(text, str) or len(text) <= characters:
        return 0
    shorter = {**before, "content": truncate_middle(text, characters)}
    saved = _size([before]) - _size([shorter])
    if saved <= 0:  # the note on what was left out takes as much
        return 0
    messages[place] = shorter
    return saved


def _recent(messages: Sequence[Message], start: int) -> int:
    """Where the last turns begin that stay as they are."""
    asks = [n for n in range(start, len(messages)) if messages[n].get("tool_calls")]
    return asks[-KEPT_TURNS] if len(asks) > KEPT_TURNS else start


def with_summary(prompt: Sequence[Message], text: str) -> list[Message]:
    """The prompt with a summary at the end of its last message: roles go on to alternate."""
    found = list(prompt)
    words = f"{_HEADING}\n{text}"
    last = found[-1] if found else {"role": "user", "content": ""}
    content = last.get("content") or ""
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": words}]
    else:
        content = f"{content}\n\n{words}" if content else words
    found[-1:] = [{**last, "content": content}]
    return found


def _transcript(messages: Sequence[Message]) -> str:
    lines = []
    for message in messages:
        lines.append(f"{message.get('role')}: {message.get('content') or ''}")
        lines += [
            f"calls {call['function']['name']} {call['function']['arguments']}"
            for call in message.get("tool_calls") or ()
        ]
    return "\n".join(lines)


def _size(messages: Sequence[Message]) -> int:
    return text_bytes(encode_payload(list(messages)))
