"""Writing of answers in the form of OpenAI's responses, for servers.

Source: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

from typing import Any

from bagent.backends.request import encode_payload
from bagent.types import Json, Reply, Usage

Body = dict[str, Any]

_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a response is incomplete, by finish reason."""


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
