"""Assembly of streamed chat answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from bagent.backends.failures import failure_from_body, shorten
from bagent.backends.http.sse import normalize_newlines
from bagent.backends.openai.chat import (
    REASONING_KEYS,
    PlainEvent,
    choice_error,
    content_text,
    decode_plain_event,
    normalize_finish_reason,
    optional_text,
    raw_tool_calls,
    read_reply,
    read_usage,
    reasoning_text,
    server_ttft,
)
from bagent.text.json import decode_json, encode_json
from bagent.types import Failure, Json, Reply, ToolCall, Usage


class ToolCallAssembler:
    """Assembles streamed tool calls by index; a new id starts a new call.

    From servers without useful indexes or ids, a name starts a new call once the arguments of the
    previous one are complete. Empty names and ids never overwrite earlier ones.

    Args:
        on_call: gets each call once, as soon as its arguments are a whole JSON object: nothing
            that follows could change it.
    """

    def __init__(self, on_call: Callable[[ToolCall], None] | None = None) -> None:
        self._calls: list[dict[str, str]] = []
        self._by_index: dict[int, int] = {}
        self._on_call = on_call
        self._reported: set[int] = set()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, entries: Json) -> None:
        """Apply the ``tool_calls`` of one delta, one entry or several."""
        if isinstance(entries, dict):
            entries = [entries]
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                function = entry.get("function")
                self._add(entry, function if isinstance(function, dict) else entry)

    def _add(self, entry: dict[str, Any], function: dict[str, Any]) -> None:
        index = entry.get("index")
        if not isinstance(index, int):
            index = 0
        call_id, name = str(entry.get("id") or ""), str(function.get("name") or "")
        arguments = function.get("arguments")
        if not (call_id or name or arguments):
            return
        position = self._by_index.get(index)
        if position is None or self._is_new(self._calls[position], call_id, name, bool(arguments)):
            position = self._by_index[index] = len(self._calls)
            self._calls.append({"id": "", "name": "", "arguments": ""})
        call = self._calls[position]
        call["id"] = call_id or call["id"]
        call["name"] = _joined_name(call, name)
        if isinstance(arguments, str):
            if arguments != call["arguments"] or not self._is_whole(position):
                call["arguments"] += arguments  # else the whole is repeated at the end
        elif arguments:
            call["arguments"] = encode_json(arguments)
        if self._on_call is not None and arguments and call["arguments"].rstrip().endswith("}"):
            self._report_if_complete(position)

    def _report_if_complete(self, position: int) -> None:
        """Report a call if its arguments are complete."""
        if self._is_whole(position):
            self._report(position)

    def _is_whole(self, position: int) -> bool:
        try:
            return isinstance(decode_json(self._calls[position]["arguments"]), dict)
        except ValueError:
            return False

    def _report(self, position: int) -> None:
        if (
            self._on_call is not None
            and position not in self._reported
            and self._calls[position]["name"]
        ):
            self._reported.add(position)
            self._on_call(self._call(position))

    def report_remaining(self) -> None:
        """Report the remaining calls: the answer is complete."""
        for position in range(len(self._calls)):
            self._report(position)

    @staticmethod
    def _is_new(call: dict[str, str], call_id: str, name: str, more: bool) -> bool:
        if call_id:
            return call["id"] not in ("", call_id)
        if not name or not call["name"] or not (more or name != call["name"]):
            return False
        try:
            decode_json(call["arguments"])
        except ValueError:
            return False
        return True

    def result(self) -> tuple[ToolCall, ...]:
        """Return the calls in the order in which they began."""
        return tuple(self._call(position) for position in range(len(self._calls)))

    def _call(self, position: int) -> ToolCall:
        call = self._calls[position]
        return ToolCall(call["id"] or f"call_{position}", call["name"], call["arguments"] or "{}")


def _joined_name(call: dict[str, str], piece: str) -> str:
    """Append a piece to the name: some servers send pieces, others repeat the whole name."""
    before = call["name"]
    if not piece or piece == before:
        return before
    if call["arguments"] or piece.startswith(before):
        return piece
    return before + piece


_LASTING_ENDS = ("length", "content_filter")
"""Finish reasons that a later "stop" does not replace: some servers end every stream with one."""

STRAY_LIMIT = 1 << 20
"""Bytes kept of a body that is no event stream."""


class StreamReader:
    """Assembles a streamed chat or text answer from server-sent events.

    Only a finish reason completes an answer, not the end of the stream or ``[DONE]``. A body of
    plain JSON is read as a response. Source: WHATWG HTML, section 9.2 (event streams). Some servers
    omit the empty line between events, so an event ends where its JSON is complete.

    Args:
        started: when the request was sent, on ``clock`` (seconds).
        on_call: gets every tool call once its arguments are whole.
        heard: gets each piece, ``text`` or ``reasoning``.

    ``first_token`` is when the first piece of an answer came, ``first_answer`` the first that is
    no thinking. ``pieces`` counts the events that showed life: comments do not, a proxy sends them
    for a server that is long gone. ``deltas`` counts those that held a piece of an answer.
    """

    def __init__(
        self,
        started: float,
        clock: Callable[[], float],
        on_call: Callable[[ToolCall], None] | None = None,
        heard: Callable[[str, str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._heard = heard
        self.first_token: float | None = None
        self.first_answer: float | None = None
        self.pieces = 0
        self.deltas = 0
        self.done = False
        self.error: Failure | None = None
        self._started = started
        self._parts: list[bytes] = []
        self._open = b""
        self._stray: list[bytes] = []
        self._stray_bytes = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._logprobs: list[Json] = []
        self._reasoning_fields: dict[str, Json] = {}
        self._calls = ToolCallAssembler(on_call)
        self._finish: str | None = None
        self._model: str | None = None
        self._id: str | None = None
        self._usage: Json = None
        self._server_ttft: float | None = None
        self._seen_content = False

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body."""
        if b"\n" not in data and b"\r" not in data:
            self._parts.append(data)
            return
        if self._parts:
            self._parts.append(data)
            data = b"".join(self._parts)
            self._parts.clear()
        data = normalize_newlines(data)
        lines = data.split(b"\n")
        remainder = lines.pop()
        if remainder:
            self._parts.append(remainder)
        for line in lines:
            if line.startswith(b"data:"):
                self._data(line[5:].strip())
            elif len(line) < 2 and not line.strip():
                if self._open:
                    self._end_event()
            else:
                self._other(line)

    def _data(self, data: bytes) -> None:
        if self.done or self.error is not None or not data:
            return
        if self._open:
            if data == b"[DONE]":
                self._end_event()
                self.done = True
                return
            data = self._open + b"\n" + data
        else:
            piece = decode_plain_event(data)
            text = piece.text if piece is not None else None
            if piece is not None and text is not None:
                self._piece(piece, text)
                return
            if data == b"[DONE]":
                self.done = True
                return
        try:
            body = decode_json(data, strict=True)
        except UnicodeDecodeError:
            self._open = b""
            self.error = _broken_event("not UTF-8", data)
            return
        except ValueError:
            self._open = data
            return
        self._open = b""
        for event in body if isinstance(body, list) else [body]:
            if isinstance(event, dict) and self.error is None:
                self._event(event)

    def _piece(self, event: PlainEvent, text: str) -> None:
        """Apply an event that holds only a piece of text."""
        if event.usage is not None:
            self._usage = event.usage
        if not self._model:
            self._model = event.model
        if not self._id:
            self._id = event.id
        self.pieces += 1
        self._seen_content = True
        if not text:
            return
        self.deltas += 1
        if self.first_answer is None:
            self.first_answer = self._clock()
            if self.first_token is None:
                self.first_token = self.first_answer
        self._text.append(text)
        self._hear("text", text)

    def _hear(self, kind: str, piece: str | None) -> None:
        if self._heard is not None and piece:
            self._heard(kind, piece)

    def _end_event(self) -> None:
        """Handle an empty line: an event that is not JSON by now is an error."""
        if self._open and self.error is None:
            self.error = _broken_event("not JSON", self._open)
        self._open = b""

    def _other(self, line: bytes) -> None:
        """Handle a line without data: a comment, another field, or no event stream."""
        if line.startswith(b"\xef\xbb\xbfdata:"):
            self._data(line[8:].strip())
        elif (
            not self.pieces
            and self._stray_bytes < STRAY_LIMIT
            and not line.startswith((b":", b"event:", b"id:", b"retry:"))
        ):
            self._stray.append(line)
            self._stray_bytes += len(line)

    def _event(self, body: dict[str, Any]) -> None:
        choices = body.get("choices")
        if choices is None or "error" in body:
            failure = failure_from_body(body, {})
            if failure is not None:
                self.error = self.error or failure
                return
        # The last chunk has usage and an empty list of choices.
        usage = body.get("usage")
        if usage is not None:
            self._usage = usage  # parsed at the end: some servers send it with every chunk
        if "metrics" in body:
            self._server_ttft = self._server_ttft or server_ttft(body)
        if not self._model:
            self._model = optional_text(body.get("model"))
        if not self._id:
            self._id = optional_text(body.get("id"))
        if choices is None:
            return
        self.pieces += 1
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and not choice.get("index"):
                self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or choice.get("message")
        if not isinstance(delta, dict):
            delta = {"content": choice.get("text")}
        content = content_text(delta.get("content"))
        reasoning = reasoning_text(delta)
        refusal = delta.get("refusal")
        calls = raw_tool_calls(delta)
        if content or reasoning or refusal or calls:
            self.deltas += 1
            if self.first_token is None:
                self.first_token = self._clock()
            if self.first_answer is None and (content or refusal or calls):
                self.first_answer = self._clock()
        if content is not None:
            self._seen_content = True
            self._text.append(content)
        self._hear("reasoning", reasoning)
        self._hear("text", content)
        if reasoning:
            self._reasoning.append(reasoning)
            self._keep(delta)
        if refusal and isinstance(refusal, str):
            self._refusal.append(refusal)
        if calls:
            self._calls.add(calls)
        logprobs = choice.get("logprobs")
        if logprobs and isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            self._logprobs.extend(logprobs["content"])
        if "error" in choice:
            self.error = self.error or choice_error(choice)
        if choice.get("finish_reason"):
            self._ends(choice["finish_reason"])

    def _ends(self, reason: Json) -> None:
        if self._finish not in _LASTING_ENDS:
            self._finish = normalize_finish_reason(reason)
        if self._finish in ("tool_calls", "stop"):
            self._calls.report_remaining()

    def _keep(self, delta: dict[str, Any]) -> None:
        """Append reasoning under its original field names."""
        fields = self._reasoning_fields
        for name in REASONING_KEYS:
            piece = delta.get(name)
            if isinstance(piece, str):
                fields[name] = str(fields.get(name, "")) + piece
            elif isinstance(piece, list):
                fields[name] = [*fields.get(name, ()), *piece]

    @property
    def whole(self) -> bool:
        """Whether a finish reason was received: losing the rest does no harm."""
        return self._finish is not None

    @property
    def usage(self) -> Usage:
        """The last token counts that the server sent."""
        return read_usage(self._usage)

    @property
    def text(self) -> str:
        """The text received so far."""
        return "".join(self._text)

    def result(self) -> Reply | Failure:
        """Return the reply, or the failure of a stream without a finish reason."""
        self.feed(b"\n")  # the last line may lack its end
        if self.error is not None and (not self.whole or self._finish == "error"):
            return msgspec.structs.replace(self.error, text=self.text or None)
        if not self.whole:
            return self._unfinished()
        ttft = self._server_ttft
        if self.first_token is not None:
            ttft = (self.first_token - self._started) * 1000
        return Reply(
            text=self.text if self._seen_content else None,
            finish_reason=self._finish,
            model=self._model or None,
            reasoning="".join(self._reasoning) or None,
            refusal="".join(self._refusal) or None,
            tool_calls=self._calls.result(),
            message=(self._reasoning_fields or None) if self._calls else None,
            usage=self.usage,
            ttft_ms=ttft,
            logprobs={"content": self._logprobs} if self._logprobs else None,
            request_id=self._id or None,
        )

    def _unfinished(self) -> Reply | Failure:
        if self._stray and not self.pieces and not self.done:
            return read_reply(b"\n".join(self._stray), "text/event-stream", {})
        return Failure(
            "bad_response",
            "the stream ended without a finish reason",
            passing=True,
            status=200,
            text=self.text or None,
        )


def _broken_event(problem: str, data: bytes) -> Failure:
    """Return the failure of an event that cannot be read, with its beginning."""
    excerpt = shorten(data[:800].decode("utf-8", "replace"), 200)
    message = f"{problem} in the stream: {excerpt}"
    return Failure("bad_response", message, passing=True, status=200)
