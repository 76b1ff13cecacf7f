"""Streamed answers of Bedrock's ConverseStream put together from its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bagent.backends.bedrock_wire import parsed_input, read_converse, tool_call
from bagent.types import Failure, Reply, ToolCall


class BedrockStream:
    """Puts a streamed answer together; :meth:`take` it one decoded event after the other.

    An answer is whole only with its stop reason. Written by one thread at a time; others may
    read ``first_token`` and ``heard``, both seconds on ``clock`` (``heard``: the last event).

    Args:
        started: when the request was sent.
        model: named in the reply, since events name none.
        on_call: gets every tool call once its arguments are whole, in the thread that reads.
        on_piece: gets every piece of text and reasoning there, after the word for which it is;
            and ``first`` with no text when an answer begins.
    """

    def __init__(
        self,
        started: float,
        clock: Callable[[], float],
        model: str,
        on_call: Callable[[ToolCall], None] | None = None,
        on_piece: Callable[[str, str], None] | None = None,
    ) -> None:
        self._on_call = on_call
        self._on_piece = on_piece
        self._clock = clock
        self._started = started
        self._model = model
        self.heard = started
        self.first_token: float | None = None
        self.abandoned = False
        """Set by who no longer waits: the rest of the stream is then not read."""
        self.tool_calls: list[ToolCall] = []
        """Calls whose arguments are whole: each may be run before the stream ends."""
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, list[str]] = {}
        self._stop: str | None = None
        self._usage: Any = None

    def take(self, event: dict[str, Any]) -> None:
        """Take the next event, ``{name: fields}`` as boto3 gives it."""
        self.heard = self._clock()
        for name, fields in event.items():
            if name == "contentBlockStart":
                start = fields.get("start") or {}
                if "toolUse" in start:
                    self._seen()
                    self._blocks[fields["contentBlockIndex"]] = {"toolUse": {**start["toolUse"]}}
            elif name == "contentBlockDelta":
                self._delta(fields["contentBlockIndex"], fields.get("delta") or {})
            elif name == "contentBlockStop":
                self._block_ends(fields["contentBlockIndex"])
            elif name == "messageStop":
                self._stop = fields.get("stopReason")
            elif name == "metadata":
                self._usage = fields.get("usage")

    def _seen(self) -> None:
        if self.first_token is None:
            self.first_token = self._clock()
            if self._on_piece is not None:
                self._on_piece("first", "")

    def _delta(self, index: int, delta: dict[str, Any]) -> None:
        if "text" in delta:
            self._seen()
            block = self._blocks.setdefault(index, {"text": ""})
            block["text"] = block.get("text", "") + delta["text"]
            self._tell("text", delta["text"])
        elif "toolUse" in delta:
            self._seen()
            self._inputs.setdefault(index, []).append(delta["toolUse"].get("input") or "")
        elif "reasoningContent" in delta:
            self._reasoning(index, delta["reasoningContent"])

    def _reasoning(self, index: int, delta: dict[str, Any]) -> None:
        self._seen()
        block = self._blocks.setdefault(index, {"reasoningContent": {}})["reasoningContent"]
        if "redactedContent" in delta:
            block["redactedContent"] = block.get("redactedContent", b"") + delta["redactedContent"]
            return
        told = block.setdefault("reasoningText", {"text": ""})
        for name in ("text", "signature"):
            if name in delta:
                told[name] = told.get(name, "") + delta[name]
        self._tell("reasoning", delta.get("text") or "")

    def _tell(self, kind: str, text: str) -> None:
        if text and self._on_piece is not None:
            self._on_piece(kind, text)

    def _block_ends(self, index: int) -> None:
        used = self._join(index)
        if used is not None:
            call = tool_call(used)
            self.tool_calls.append(call)
            if self._on_call is not None:
                self._on_call(call)

    def _join(self, index: int) -> dict[str, Any] | None:
        """The tool use of a block with its input put together; None where it is another block."""
        used: dict[str, Any] | None = self._blocks.get(index, {}).get("toolUse")
        if used is not None:
            used["input"] = parsed_input("".join(self._inputs.pop(index, ())))
        return used

    @property
    def whole(self) -> bool:
        """Whether a stop reason has come."""
        return self._stop is not None

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return "".join(block.get("text", "") for _, block in sorted(self._blocks.items()))

    def result(self) -> Reply | Failure:
        """The reply, or the failure of a stream that ended without a stop reason."""
        if self._stop is None:
            words = "the stream ended without a stop reason"
            return Failure("bad_response", words, True, 200, text=self.text or None)
        for index in list(self._inputs):  # their blocks were never told to have ended
            self._join(index)
        ttft = None if self.first_token is None else (self.first_token - self._started) * 1000
        content = [block for _, block in sorted(self._blocks.items())]
        return read_converse(content, self._stop, self._usage, self._model, ttft)
