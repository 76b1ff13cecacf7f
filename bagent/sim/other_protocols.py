"""OpenAI's responses and Anthropic's messages, converted to and from chats.

Requests become chat requests; replies and streams are written in the protocol's own form.
Sources: https://platform.openai.com/docs/api-reference/responses-streaming and
https://docs.claude.com/en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from bagent.backends.openai.chat import read_usage
from bagent.backends.openai.responses_server import ResponseEvents, chat_request
from bagent.sim import tokens
from bagent.sim.replies import IncrementalText, ReplyHead, ReplySample, encode, make_usage
from bagent.sim.requests import ApiError
from bagent.types import Json

Body = dict[str, Any]


class Protocol:
    """One reply in a protocol's own form.

    Args:
        head: what all parts of the reply share.
        sample: the answer.
    """

    def __init__(self, head: ReplyHead, sample: ReplySample) -> None:
        self.head = head
        self.sample = sample
        self._sent = 0
        self._text = IncrementalText(sample.answer)

    def body(self) -> Body:
        """Return the body of the whole reply."""
        raise NotImplementedError

    def begin(self) -> Iterator[Body]:
        """Yield the events before the first token."""
        raise NotImplementedError

    def delta_events(self, text: str) -> Iterator[Body]:
        """Yield the events for a piece of the answer's text, or of its call's arguments."""
        raise NotImplementedError

    def end(self) -> Iterator[Body]:
        """Yield the events after the last token."""
        raise NotImplementedError

    def opening(self) -> list[bytes]:
        """Return the same as :meth:`bagent.sim.replies.ChunkWriter.opening`."""
        return [*map(_event, self.begin())]

    def tokens_until(self, sample: ReplySample, generated: int) -> bytes:
        """Return the same as :meth:`bagent.sim.replies.ChunkWriter.tokens_until`."""
        if generated <= self._sent:
            return b""
        done = generated >= tokens.count(sample.answer.packed)
        text = self._text.part(self._sent, generated, done=done)
        self._sent = generated
        return b"".join(map(_event, self.delta_events(text)))

    def closing(self, *, usage: bool) -> bytes:
        """Return the same as :meth:`bagent.sim.replies.ChunkWriter.closing`; usage is always
        reported."""
        return b"".join(map(_event, self.end()))


class Responses(Protocol):
    """``/v1/responses``."""

    def __init__(self, head: ReplyHead, sample: ReplySample) -> None:
        super().__init__(head, sample)
        self._events = ResponseEvents(f"resp_{head.id}", head.created, head.model)

    def body(self) -> Body:
        """Return a response object."""
        answer = self.sample.answer
        text = answer.text if answer.tool is None else answer.tool.arguments
        response: Body = [*self.begin(), *self.delta_events(text), *self.end()][-1]["response"]
        return response

    def begin(self) -> Iterator[Body]:
        """Yield the events up to the first delta."""
        tool = self.sample.answer.tool
        yield from self._events.begin()
        if tool is None:
            yield from self._events.open("text")
        else:
            yield from self._events.open_call(tool.id, tool.name)

    def delta_events(self, text: str) -> Iterator[Body]:
        """Yield a delta."""
        kind = "text" if self.sample.answer.tool is None else "arguments"
        yield from self._events.piece(kind, text)

    def end(self) -> Iterator[Body]:
        """Yield the events from the end of the text to that of the response."""
        usage = read_usage(make_usage([self.sample], 1))
        yield from self._events.end(self.sample.answer.finish_reason, usage)


class Messages(Protocol):
    """``/v1/messages``."""

    def body(self) -> Body:
        """Return a message."""
        answer = self.sample.answer
        block: Body = {"type": "text", "text": answer.text}
        if answer.tool is not None:
            block = {**self._tool_use(), "input": _object(answer.tool.arguments)}
        return {**self._message(done=True), "content": [block]}

    def _message(self, *, done: bool) -> Body:
        usage = make_usage([self.sample], 1)
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return {
            "id": f"msg_{self.head.id}",
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": [],
            **(self._stop() if done else {"stop_reason": None, "stop_sequence": None}),
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"] if done else 0,
            },
        }

    def _stop(self) -> Body:
        answer = self.sample.answer
        reason = "end_turn"
        if answer.finish_reason == "length":
            reason = "max_tokens"
        elif answer.tool is not None:
            reason = "tool_use"
        elif answer.stop_reason is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": answer.stop_reason}

    def _tool_use(self) -> Body:
        call = self.sample.answer.tool
        assert call is not None
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}

    def begin(self) -> Iterator[Body]:
        """Yield the events up to the first delta."""
        yield {"type": "message_start", "message": self._message(done=False)}
        tool = self.sample.answer.tool
        block = {"type": "text", "text": ""} if tool is None else self._tool_use()
        yield {"type": "content_block_start", "index": 0, "content_block": block}

    def delta_events(self, text: str) -> Iterator[Body]:
        """Yield a delta."""
        delta: Body = {"type": "text_delta", "text": text}
        if self.sample.answer.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}

    def end(self) -> Iterator[Body]:
        """Yield the events from the end of the block to that of the message."""
        yield {"type": "content_block_stop", "index": 0}
        usage = self._message(done=True)["usage"]
        yield {"type": "message_delta", "delta": self._stop(), "usage": usage}
        yield {"type": "message_stop"}


def _event(body: Body) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (body["type"].encode(), encode(body))


def _object(text: str) -> Json:
    """Return the value of JSON text; an empty object for a call that was cut off."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}


def responses_to_chat(raw: bytes) -> bytes:
    """Return the chat request for a body of ``/v1/responses``."""
    try:
        return encode(chat_request(_decoded(raw)))
    except ValueError as error:
        raise ApiError(400, f"{error}.") from None


def messages_to_chat(raw: bytes) -> bytes:
    """Return the chat request for a body of ``/v1/messages``."""
    body = _decoded(raw)
    messages = _system(_text(body.get("system")))
    for turn in _list(body.get("messages"), "messages"):
        messages += _turn_messages(turn)
    tools = [_tool(tool, "input_schema") for tool in body.get("tools") or () if "name" in tool]
    tool_choice = body.get("tool_choice") if tools else None
    choice: Json = None
    if isinstance(tool_choice, dict):
        named = {"type": "function", "function": {"name": tool_choice.get("name")}}
        choices = {"any": "required", "tool": named, "none": "none"}
        choice = choices.get(str(tool_choice.get("type")), "auto")
    form = (body.get("output_config") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return _chat(body, messages, tools, choice, form, body.get("max_tokens"))


def _turn_messages(turn: Body) -> list[Body]:
    """Return the messages of one turn; tool results are messages of their own."""
    content = turn.get("content")
    if isinstance(content, str):
        return [{"role": turn.get("role"), "content": content}]
    blocks = _list(content, "content")
    messages: list[Body] = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _text(block.get("content")),
        }
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {
                "name": block.get("name"),
                "arguments": encode(block.get("input")).decode(),
            },
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    text = _text([block for block in blocks if block.get("type") == "text"])
    if text or calls:
        message: Body = {"role": turn.get("role"), "content": text}
        messages.append({**message, "tool_calls": calls} if calls else message)
    return messages


def _chat(
    body: Body, messages: list[Body], tools: list[Body], choice: Json, form: Body, max_tokens: Json
) -> bytes:
    chat: Body = {"model": body.get("model"), "messages": messages, "max_tokens": max_tokens}
    chat |= {"stream": bool(body.get("stream")), "temperature": body.get("temperature")}
    if tools:
        chat |= {"tools": tools, "tool_choice": choice or "auto"}
    if form.get("type") not in (None, "text"):
        chat["response_format"] = form
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    return encode(chat)


def _tool(tool: Body, key: str) -> Body:
    return {
        "type": "function",
        "function": {"name": tool["name"], "parameters": tool.get(key) or {}},
    }


def _system(text: Json) -> list[Body]:
    return [{"role": "system", "content": text}] if text else []


def _text(content: Json) -> str:
    """Return the text of a content: a text, or the texts of its parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _list(value: Json, name: str) -> list[Body]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ApiError(400, f"{name} must be a list of objects.", param=name)
    return value


def _decoded(raw: bytes) -> Body:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError):
        body = None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object.")
    return body
