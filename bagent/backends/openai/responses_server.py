"""OpenAI's ``/v1/responses`` as a server sees it: requests as chats, and answers as responses.

For servers that have only chats. Sources:
https://platform.openai.com/docs/api-reference/responses/create and
https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagent.backends.openai.chat import content_text
from bagent.backends.request import encode_payload
from bagent.types import Json, Message, Reply, Usage

_NO_FORM = ("previous_response_id", "conversation", "background", "prompt")
"""Fields that need a provider's memory of earlier responses."""

_CONVERTED = frozenset(
    (
        *("input", "instructions", "text", "tools", "tool_choice", "reasoning", "stream"),
        *("max_output_tokens", *_NO_FORM),
    )
)
_LEFT_OUT = frozenset(
    (
        *("store", "include", "truncation", "metadata", "max_tool_calls", "prompt_cache_key"),
        *("safety_identifier", "stream_options", "include_reasoning", "top_logprobs"),
    )
)
"""Fields without which the answer is of the same kind."""

Body = dict[str, Any]

_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a response is incomplete, by finish reason."""


def chat_request(body: Mapping[str, Json]) -> dict[str, Json]:
    """Return the chat request for a body of ``/v1/responses``.

    Raises:
        ValueError: chat completions have no form for something in it; the text names it.
    """
    for name in _NO_FORM:
        if body.get(name):
            raise ValueError(f"chat completions have no {name}")
    messages = _messages(body.get("input"))
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    hidden = _CONVERTED | _LEFT_OUT
    chat = {name: value for name, value in body.items() if name not in hidden and value is not None}
    chat["messages"] = messages
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    text, reasoning = body.get("text"), body.get("reasoning")
    if isinstance(text, dict):
        form = _response_format(text.get("format"))
        if form is not None:
            chat["response_format"] = form
        if text.get("verbosity"):
            chat["verbosity"] = text["verbosity"]
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        chat["reasoning_effort"] = reasoning["effort"]
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _objects(body["tools"], "tools")]
        if body.get("tool_choice") is not None:
            chat["tool_choice"] = _tool_choice(body["tool_choice"])
    return chat


def _response_format(form: Json) -> Json:
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return None
    if form["type"] != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}


def _tool(tool: dict[str, Any]) -> Json:
    if tool.get("type") != "function":
        raise ValueError(f"chat completions have no tool of the type {tool.get('type')}")
    function = {k: v for k, v in tool.items() if k != "type" and v is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Json) -> Json:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise ValueError(f"chat completions have no tool_choice of the type {choice.get('type')}")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _messages(items: Json) -> list[Message]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    thought = ""
    for item in _objects(items, "input"):
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _reasoning(item)
            continue
        message = _message(item, kind)
        if message["role"] == "assistant":
            if thought:
                message["reasoning_content"] = thought
            _add_assistant(messages, message)
        else:
            messages.append(message)
        thought = ""
    return messages


def _message(item: dict[str, Any], kind: str) -> Message:
    if kind == "function_call_output":
        output = _content(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind != "message":
        raise ValueError(f"chat completions have no input item of the type {kind}")
    role = item.get("role") or "user"
    content = item.get("content")
    return {
        "role": role,
        "content": content_text(content) if role == "assistant" else _content(content),
    }


def _add_assistant(messages: list[Message], message: Message) -> None:
    """Append an assistant's message; text and calls of one turn are one message."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    else:
        messages.append(message)


def _reasoning(item: dict[str, Any]) -> str:
    lists = [_objects(item.get(name) or [], name) for name in ("content", "summary")]
    return "".join(str(part.get("text") or "") for parts in lists for part in parts)


def _content(content: Json) -> Json:
    """Return a text, or parts where some are images."""
    if not isinstance(content, list):
        return "" if content is None else content
    parts = [_part(part) for part in _objects(content, "content")]
    if all(part["type"] == "text" for part in parts):
        return "".join(str(part.get("text") or "") for part in parts)
    return parts


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "refusal"):
        return {"type": "text", "text": part.get("text") or part.get("refusal")}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise ValueError(f"chat completions have no content of the type {kind}")


def _objects(value: Json, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} must be a list of objects")
    return value


class ResponseEvents:
    """Writes one answer: the events of a stream, and the whole response at its end.

    Args:
        response_id: begins with ``resp_``; the items' ids are made of the rest.
        created: in Unix seconds.
        model: the name that the answer gives.
    """

    def __init__(self, response_id: str, created: int, model: str) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._number = 0
        self._items: list[Body] = []
        self._open: Body | None = None
        self._pieces: list[str] = []

    def begin(self) -> list[Body]:
        """Return the events before the first item."""
        return [
            self._event(kind, response=self._response("in_progress", None))
            for kind in ("created", "in_progress")
        ]

    def piece(self, kind: str, text: str) -> list[Body]:
        """Return the events for a piece of ``text`` or ``reasoning``, or of a call's arguments."""
        events = [] if kind == "arguments" else self.open(kind)
        self._pieces.append(text)
        name = {
            "text": "output_text.delta",
            "reasoning": "reasoning_text.delta",
            "arguments": "function_call_arguments.delta",
        }[kind]
        more: Body = {"logprobs": []} if kind == "text" else {}
        return [*events, self._item_event(name, delta=text, **more)]

    def open(self, kind: str) -> list[Body]:
        """Return the events that begin a text or reasoning, unless one of the kind is open."""
        item_type = "message" if kind == "text" else "reasoning"
        if self._open is not None and self._open["type"] == item_type:
            return []
        if kind == "text":
            return self._begin_item({"type": "message", "role": "assistant", "content": []}, "msg")
        return self._begin_item({"type": "reasoning", "summary": [], "content": []}, "rs")

    def open_call(self, call_id: str, name: str) -> list[Body]:
        """Return the events that begin a function call."""
        call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
        return self._begin_item(call, "fc")

    def end(self, finish_reason: str | None, usage: Usage) -> list[Body]:
        """Return the events from the end of the last item to that of the response."""
        events = self._end_item()
        reason = _INCOMPLETE_REASONS.get(finish_reason or "")
        response = self._response("incomplete" if reason else "completed", usage)
        response["incomplete_details"] = {"reason": reason} if reason else None
        return [*events, self._event(response["status"], response=response)]

    def fail(self, code: str, message: str) -> list[Body]:
        """Return the event of a response that failed."""
        response = self._response("failed", None)
        response["error"] = {"code": code, "message": message}
        return [self._event("failed", response=response)]

    def finish(self, reply: Reply, *, streamed: bool = False) -> list[Body]:
        """Return the events of a whole answer, or of what follows its streamed text."""
        events: list[Body] = []
        for kind, text in (("reasoning", reply.reasoning), ("text", reply.text or reply.refusal)):
            if text and not streamed:
                events += self.piece(kind, text)
        for call in reply.tool_calls:
            events += self.open_call(call.id, call.name)
            events += self.piece("arguments", call.arguments)
        return events + self.end(reply.finish_reason, reply.usage)

    def _begin_item(self, item: Body, prefix: str) -> list[Body]:
        events = self._end_item()
        name = f"{prefix}_{self._id.removeprefix('resp_')}"
        item_id = f"{name}_{len(self._items)}" if self._items else name
        self._open = {**item, "id": item_id, "status": "in_progress"}
        events.append(self._event("output_item.added", output_index=self._index, item=self._open))
        if item["type"] == "message":
            events.append(self._item_event("content_part.added", part=_text_part("")))
        return events

    def _end_item(self) -> list[Body]:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return []
        item = {**item, "status": "completed"}
        if item["type"] == "message":
            part = _text_part(text)
            item["content"] = [part]
            events = [
                self._item_event("output_text.done", text=text, logprobs=[]),
                self._item_event("content_part.done", part=part),
            ]
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            events = [self._item_event("reasoning_text.done", text=text)]
        else:
            item["arguments"] = text
            kind = "function_call_arguments.done"
            events = [self._item_event(kind, name=item["name"], arguments=text)]
        events.append(self._event("output_item.done", output_index=self._index, item=item))
        self._items.append(item)
        self._open = None
        self._pieces.clear()
        return events

    @property
    def _index(self) -> int:
        return len(self._items)

    def _item_event(self, kind: str, **fields: Json) -> Body:
        """Return an event of the open item; those of its text name the part as well."""
        assert self._open is not None
        location: Body = {"item_id": self._open["id"], "output_index": self._index}
        if self._open["type"] != "function_call":
            location["content_index"] = 0
        return self._event(kind, **location, **fields)

    def _event(self, kind: str, **fields: Json) -> Body:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _response(self, status: str, usage: Usage | None) -> Body:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "incomplete_details": None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: Usage) -> Json:
    prompt, completion = usage.prompt or 0, usage.completion or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.cached or 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": prompt + completion,
    }


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def event_bytes(events: list[Body]) -> bytes:
    """Return events as they are sent."""
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), encode_payload(event))
        for event in events
    )
