"""Streamed answers of Anthropic's Messages API put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from bagent.backends.anthropic_wire import read_message, reply_from_message, tool_call
from bagent.backends.event_lines import EventLines, NoEvent
from bagent.backends.failures import from_body_error, shorten
from bagent.backends.json_text import decode_json
from bagent.types import Failure, Reply, ToolCall

_GROWING = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "compaction_delta": ("content", "content"),
}
"""The kinds of deltas that lengthen a text: the key of the block, and that of the delta."""


class AnthropicStream:
    """Puts a streamed message together; fed and asked like
    :class:`bagent.backends.chat_stream.StreamReader`.

    A message is whole only with its stop reason: the end of the stream proves nothing. Counts of
    tokens are cumulative, the last ones hold.

    Args:
        started: when the request was sent, on ``clock`` (seconds).
        on_call: gets every tool call once its arguments are whole.
    """

    def __init__(
        self,
        started: float,
        clock: Callable[[], float],
        on_call: Callable[[ToolCall], None] | None = None,
    ) -> None:
        self._on_call = on_call
        self._clock = clock
        self._started = started
        self.first_token: float | None = None
        self.pieces = 0
        self.done = False
        self.error: Failure | None = None
        self.tool_calls: list[ToolCall] = []
        """Calls whose arguments are whole: each may be run before the stream ends."""
        self._lines = EventLines()
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, list[str]] = {}

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self._take(lambda: self._lines.feed(data))

    def _take(self, read: Callable[[], list[dict[str, Any]]]) -> None:
        try:
            for event in read():
                if self.done or self.error is not None:
                    return
                self._event(event)
        except NoEvent as error:
            self.error = self.error or _broken(f"not JSON in the stream: {shorten(str(error))}")

    def _event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "error" or (kind is None and "error" in event):
            self.error = from_body_error(event, {}) or _broken("an error without words")
        elif kind == "message_start":
            self.pieces += 1
            message = event.get("message")
            self._message.update(message if isinstance(message, dict) else {})
            self._count(self._message.get("usage"))
        elif kind == "content_block_start":
            self.pieces += 1
            told = event.get("content_block")
            block = dict(told) if isinstance(told, dict) else {}
            self._blocks[event.get("index") or 0] = block
            self._seen(bool(block.get("text") or block.get("type") == "tool_use"))
        elif kind == "content_block_delta":
            self.pieces += 1
            self._delta(event.get("index") or 0, event.get("delta") or {})
        elif kind == "content_block_stop":
            self._block_ends(event.get("index") or 0)
        elif kind == "message_delta":
            self.pieces += 1
            self._message.update(event.get("delta") or {})
            self._count(event.get("usage"))
        elif kind == "message_stop":
            self.done = True

    def _seen(self, content: bool) -> None:
        if content and self.first_token is None:
            self.first_token = self._clock()

    def _count(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self._usage.update({name: n for name, n in usage.items() if n is not None})

    def _delta(self, index: int, delta: dict[str, Any]) -> None:
        block = self._blocks.setdefault(index, {"type": "text", "text": ""})
        kind = str(delta.get("type"))
        if kind == "input_json_delta":
            self._inputs.setdefault(index, []).append(str(delta.get("partial_json") or ""))
            self._seen(True)
        elif kind in _GROWING:
            key, source = _GROWING[kind]
            block[key] = (block.get(key) or "") + str(delta.get(source) or "")
            self._seen(kind in ("text_delta", "thinking_delta"))
            if delta.get("encrypted_content") is not None:  # of a compaction; the last one holds
                block["encrypted_content"] = delta["encrypted_content"]
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or []), delta.get("citation")]

    def _block_ends(self, index: int) -> None:
        block = self._blocks.get(index)
        if block is None:
            return
        self._join(block, index)
        if block.get("type") != "tool_use":
            return
        call = tool_call(block)
        self.tool_calls.append(call)
        if self._on_call is not None:
            self._on_call(call)

    def _join(self, block: dict[str, Any], index: int) -> None:
        """Put the pieces of a call's input together; what is no JSON stays text, for all to see."""
        told = "".join(self._inputs.pop(index, ()))
        if told.strip():
            try:
                block["input"] = decode_json(told)
            except ValueError:
                block["input"] = told

    @property
    def whole(self) -> bool:
        """Whether a stop reason has come: what follows may be cut without harm."""
        return bool(self._message.get("stop_reason"))

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return "".join(str(block.get("text") or "") for _, block in sorted(self._blocks.items()))

    def result(self) -> Reply | Failure:
        """The reply, or the failure of a stream that ended without a stop reason."""
        self._take(self._lines.finish)
        if self.error is not None and not self.whole:
            return msgspec.structs.replace(self.error, text=self.text or None)
        if not self.whole:
            if self._lines.stray and not self.pieces:
                return read_message(self._lines.stray, "text/event-stream", {})
            failure = _broken("the stream ended without a stop reason")
            return msgspec.structs.replace(failure, text=self.text or None)
        for index in list(self._inputs):  # the end of their blocks was never reported
            self._join(self._blocks[index], index)
        ttft = None if self.first_token is None else (self.first_token - self._started) * 1000
        blocks = [block for _, block in sorted(self._blocks.items())]
        return reply_from_message(
            {**self._message, "content": blocks, "usage": self._usage}, ttft_ms=ttft
        )


def _broken(words: str) -> Failure:
    return Failure("bad_response", words, passing=True, status=200)
