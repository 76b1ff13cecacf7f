"""Compaction of long conversations before they fill the model's context.

Either answers of tools are cut, the oldest first, and no message is removed; or a small model
summarizes the older turns, and the summary replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bagent.agents.conversation import text_bytes
from bagent.agents.plan import LEAST_TOKENS, MARGIN_TOKENS, AgentPlan, StagePlan
from bagent.answers.messages import truncate_middle
from bagent.answers.reasoning import split_reasoning
from bagent.backends.request import Request, encode_payload
from bagent.clocks import unix
from bagent.text.json import encode_json
from bagent.tools import ToolResult
from bagent.types import Message, ToolCall

RECORD = "(compaction)"
"""The name of a compaction in the table of tool calls; no tool can have it."""

GOAL = 0.6
"""Share of its limit that a conversation is cut to: each compaction voids the engine's cache, so
several turns should fit before the next one."""

SHORT = 200
"""Characters that an old answer keeps."""

KEPT_TURNS = 2
"""Recent turns that are cut only if cutting the others is not enough."""

SUMMARY_TOKENS = 1024

_WORDS = (
    "Sum up the work below so that somebody can go on with it: what was asked of which tool, what"
    " was found, with all numbers, names and identifiers that may still be needed, what failed, and"
    " what is left to do. No introduction."
)
_HEADING = "Summary of the work so far, in place of the turns themselves:"


class Compactor:
    """Compacts one conversation when it is too long.

    Args:
        plan: the stage.
        agent: its rules for agents.
        start: the number of the first messages, which never change.
        record: records a compaction in the table of tool calls.
    """

    def __init__(
        self,
        plan: StagePlan,
        agent: AgentPlan,
        start: int,
        record: Callable[[ToolCall, ToolResult], None],
    ) -> None:
        self._budget = plan.budget
        self._max_tokens = plan.settings.max_tokens
        self._agent = agent
        self._start = start
        self._record = record
        self._overflowed = False
        self._tokens = 0

    def too_long(self, messages: Sequence[Message], last_size: tuple[int, int] | None) -> bool:
        """Return whether ``messages`` are too long for the next turn.

        Args:
            messages: the whole conversation.
            last_size: bytes of the last turn's prompt, and the tokens of it and of its answer.
        """
        limit = self._limit()
        if limit is None:
            return False
        size = _size(messages)
        tokens = self._budget.request_tokens(size)
        if last_size is not None:
            tokens = last_size[1] + self._budget.tokens(max(0, size - last_size[0]))
        self._tokens = tokens
        return tokens > limit

    def _limit(self) -> int | None:
        """Return the tokens that a prompt may have; None where the context is not known."""
        context = self._budget.context
        if context is None:
            return None
        available = context - MARGIN_TOKENS - (self._max_tokens or LEAST_TOKENS)
        return min(int(context * self._agent.compact_at), available)

    def shorten(self, messages: list[Message]) -> list[Message]:
        """Return ``messages`` with the answers of tools cut, the oldest first."""
        size = _size(messages)
        limit = self._limit() or 0
        goal = int(size * GOAL * limit / max(1, self._tokens))
        shorter, count = cut_answers(messages, self._start, goal)
        self._note(size, _size(shorter), {"by": "cutting", "answers_cut": count})
        return shorter

    def after_overflow(self, messages: list[Message]) -> list[Message] | None:
        """Return ``messages`` cut to half their size, once; None where nothing can be cut."""
        if self._overflowed:
            return None
        self._overflowed = True
        size = _size(messages)
        self._tokens = self._budget.request_tokens(size)
        shorter, count = cut_answers(messages, self._start, size // 2)
        if not count:
            return None
        self._note(size, _size(shorter), {"by": "cutting", "answers_cut": count})
        return shorter

    def summary_request(self, messages: list[Message]) -> Request | None:
        """Return the request for a summary of the older turns; None where none is to be made."""
        settings = self._agent.summary_settings
        recent_index = _recent(messages, self._start)
        if settings is None or recent_index <= self._start:
            return None
        context = self._budget.context or 0
        room = int(context * 0.6 / max(self._budget.tokens(1000) / 1000, 0.01))
        text = truncate_middle(_transcript(messages[self._start : recent_index]), max(1000, room))
        prompt: list[Message] = [
            {"role": "system", "content": _WORDS},
            {"role": "user", "content": text},
        ]
        return Request(settings, encode_payload(prompt), messages=prompt, max_tokens=SUMMARY_TOKENS)

    def summarize(self, messages: list[Message], reply: str | None, took: float) -> list[Message]:
        """Return ``messages`` with a model's summary in place of the older turns.

        Answers of tools are cut instead where ``reply`` holds none. ``took`` is in seconds.
        """
        text = split_reasoning(reply or "").text.strip()
        if not text:
            return self.shorten(messages)
        recent_index = _recent(messages, self._start)
        prompt = with_summary(messages[: self._start], text)
        self._start = len(prompt)
        shorter = prompt + messages[recent_index:]
        settings = self._agent.summary_settings
        by = settings.model if settings is not None else None
        details = {"by": by, "messages_left_out": recent_index}
        self._note(_size(messages), _size(shorter), details, took)
        return shorter

    def _note(
        self, before: int, after: int, details: dict[str, Any], took: float | None = None
    ) -> None:
        tokens = self._tokens
        record = {
            "before_tokens": tokens,
            "after_tokens": tokens * after // max(1, before),
            **details,
        }
        call = ToolCall("", RECORD, encode_json(record))
        latency = (took or 0.0) * 1000
        self._record(call, ToolResult("", latency_ms=latency, started=unix()))


def cut_answers(messages: list[Message], start: int, goal: int) -> tuple[list[Message], int]:
    """Cut answers of tools after ``start`` until ``messages`` take ``goal`` bytes.

    The oldest are cut first, to :data:`SHORT` characters; those of the last turns only where that
    is not enough, to equal shares. Return the messages and how many answers were cut.
    """
    result = list(messages)
    size = _size(result)
    answers = [n for n in range(start, len(result)) if result[n].get("role") == "tool"]
    recent = _recent(result, start)
    count = 0
    for index in answers:
        if size <= goal or index >= recent:
            break
        saved = _cut(result, index, SHORT)
        size -= saved
        count += saved > 0
    if size > goal:
        recent_answers = [index for index in answers if index >= recent]
        taken = sum(len(encode_payload(result[index]["content"])) for index in recent_answers)
        share = max(SHORT, (goal - (size - taken)) // max(1, len(recent_answers)))
        count += sum(_cut(result, index, share) > 0 for index in recent_answers)
    return result, count


def _cut(messages: list[Message], index: int, characters: int) -> int:
    """Cut one message's text; return the bytes saved."""
    before = messages[index]
    text = before.get("content")
    if not isinstance(text, str) or len(text) <= characters:
        return 0
    shorter = {**before, "content": truncate_middle(text, characters)}
    saved = _size([before]) - _size([shorter])
    if saved <= 0:  # the note on the cut is as long
        return 0
    messages[index] = shorter
    return saved


def _recent(messages: Sequence[Message], start: int) -> int:
    """Return the index of the first of the recent turns."""
    asks = [n for n in range(start, len(messages)) if messages[n].get("tool_calls")]
    return asks[-KEPT_TURNS] if len(asks) > KEPT_TURNS else start


def with_summary(prompt: Sequence[Message], text: str) -> list[Message]:
    """Return the prompt with a summary at the end of its last message: roles still alternate."""
    messages = list(prompt)
    summary = f"{_HEADING}\n{text}"
    last = messages[-1] if messages else {"role": "user", "content": ""}
    content = last.get("content") or ""
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": summary}]
    else:
        content = f"{content}\n\n{summary}" if content else summary
    messages[-1:] = [{**last, "content": content}]
    return messages


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
