"""OpenAI's responses and Anthropic's messages, converted to and from chats.

Requests become chat requests; replies and streams are written in the protocol's own form.
Sources: https://platform.openai.com/docs/api-reference/responses-streaming and
https://docs.claude.com/en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

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
        self._number = 0

    def body(self) -> Body:
        """Return a response object."""
        return self._response([self._item(done=True)], done=True)

    def _response(self, output: list[Body], *, done: bool) -> Body:
        cut = done and self.sample.answer.finish_reason == "length"
        usage = make_usage([self.sample], 1)
        details = usage["prompt_tokens_details"] or {}
        usage_fields = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": details.get("cached_tokens") or 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            "id": f"resp_{self.head.id}",
            "object": "response",
            "created_at": self.head.created,
            "status": "incomplete" if cut else "completed" if done else "in_progress",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "model": self.head.model,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": usage_fields if done else None,
        }

    def _item(self, *, done: bool) -> Body:
        answer = self.sample.answer
        status = "completed" if done else "in_progress"
        if answer.tool is not None:
            return {
                "type": "function_call",
                "id": f"fc_{self.head.id}",
                "call_id": answer.tool.id,
                "name": answer.tool.name,
                "arguments": answer.tool.arguments if done else "",
                "status": status,
            }
        content = [self._part(answer.text)] if done else []
        return {
            "type": "message",
            "id": f"msg_{self.head.id}",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    @staticmethod
    def _part(text: str) -> Body:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item_event(self, kind: str, **fields: Json) -> Body:
        """Return an event of the only item; those of a message's text name its part as well."""
        location: Body = {"item_id": self._item(done=False)["id"], "output_index": 0}
        if self.sample.answer.tool is None:
            location["content_index"] = 0
        return self._event_body(kind, **location, **fields)

    def _event_body(self, kind: str, **fields: Json) -> Body:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def begin(self) -> Iterator[Body]:
        """Yield the events up to the first delta."""
        for kind in ("created", "in_progress"):
            yield self._event_body(kind, response=self._response([], done=False))
        item = self._item(done=False)
        yield self._event_body("output_item.added", output_index=0, item=item)
        if self.sample.answer.tool is None:
            yield self._item_event("content_part.added", part=self._part(""))

    def delta_events(self, text: str) -> Iterator[Body]:
        """Yield a delta."""
        if self.sample.answer.tool is not None:
            yield self._item_event("function_call_arguments.delta", delta=text)
        else:
            yield self._item_event("output_text.delta", delta=text, logprobs=[])

    def end(self) -> Iterator[Body]:
        """Yield the events from the end of the text to that of the response."""
        answer, item = self.sample.answer, self._item(done=True)
        if answer.tool is not None:
            name, arguments = answer.tool.name, answer.tool.arguments
            kind = "function_call_arguments.done"
            yield self._item_event(kind, name=name, arguments=arguments)
        else:
            yield self._item_event("output_text.done", text=answer.text, logprobs=[])
            yield self._item_event("content_part.done", part=self._part(answer.text))
        yield self._event_body("output_item.done", output_index=0, item=item)
        response = self._response([item], done=True)
        yield self._event_body(response["status"], response=response)


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
    body = _decoded(raw)
    messages = _system(body.get("instructions"))
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in _list(items, "input"):
        messages.append(_item_event(item))
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    tools = [_tool(tool, "parameters") for tool in body.get("tools") or () if "name" in tool]
    choice = body.get("tool_choice") if tools else None
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return _chat(body, messages, tools, choice, form, body.get("max_output_tokens"))


def _item_event(item: Body) -> Body:
    kind = item.get("type")
    if kind == "function_call_output":
        content = _text(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": item.get("role", "user"), "content": _text(item.get("content"))}


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
