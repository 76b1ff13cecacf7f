"""What the scripted server answers: one immutable :class:`Reply` and its builders.

A script maps a row id (or ``*`` for every other row) to a list of replies, one per request of
that row, the last one repeating.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Json = Any
Script = Mapping[str, Sequence["Reply"]]

AUTO = "auto"
ABSENT = "absent"

Action = Literal["answer", "echo", "canned", "raw", "stream", "hang", "close", "wire"]
End = Literal["done", "close", "cut"]


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reply. Use the builders below; fields that an action does not name are ignored.

    ``answer``, ``echo`` and ``canned`` are good answers in the form that the request
    asks for (chat, completions, batch; streamed or not). ``usage`` is ``auto`` (counted in
    words), ``absent`` (no key), None (null) or the object itself. ``delay`` and ``gap`` are
    seconds; ``gate`` names the gate that holds the reply back.
    """

    action: Action = "answer"
    text: str | None = None
    finish_reason: Json = "stop"
    usage: Json = AUTO
    model: str | None = None
    message: dict[str, Json] = {}
    status: int = 200
    body: Json = None
    content: bytes | None = None
    content_type: str = "application/json"
    headers: dict[str, str] = {}
    chunks: list[Json] = []
    end: End = "done"
    gap: float = 0.0
    delay: float = 0.0
    gate: str | None = None
    seconds: float | None = None
    reset: bool = False

    @property
    def good(self) -> bool:
        """Whether this is an answer that can share a list call with others."""
        return self.action in ("answer", "echo", "canned") and self.status == 200


def ok(text: str | None = "ok", finish_reason: Json = "stop", **fields: Any) -> Reply:
    """Build a good answer with ``text``; ``fields`` are those of :class:`Reply`."""
    return Reply(action="answer", text=text, finish_reason=finish_reason, **fields)


def ok_json(value: Json, **fields: Any) -> Reply:
    """Build a good answer whose text is ``value`` as JSON."""
    return ok(msgspec.json.encode(value).decode(), **fields)


def ok_reasoning(text: str, reasoning: str, field: str = "reasoning", **fields: Any) -> Reply:
    """Build an answer with reasoning in ``field`` (``reasoning`` or ``reasoning_content``)."""
    return ok(text, message={field: reasoning}, **fields)


def ok_tools(*calls: dict[str, Json], text: str | None = None, **fields: Any) -> Reply:
    """Build an answer that asks for tool calls; see :func:`tool_call`."""
    fields.setdefault("finish_reason", "tool_calls")
    return ok(text, message={"tool_calls": list(calls)}, **fields)


def refused(why: str = "I cannot help with that.", **fields: Any) -> Reply:
    """Build an answer whose message carries a refusal and no content."""
    return ok(None, message={"refusal": why}, **fields)


def tool_call(name: str, arguments: Json, call_id: str = "call_1") -> dict[str, Json]:
    """Build one entry of ``tool_calls``; ``arguments`` goes out as it is, of any type."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def echo(**fields: Any) -> Reply:
    """Build an answer that repeats the last user message."""
    return Reply(action="echo", **fields)


def canned(**fields: Any) -> Reply:
    """Build an answer made from the prompt's hash: equal prompts get equal answers.

    Where the request asks for a JSON schema, the answer is valid under it.
    """
    return Reply(action="canned", **fields)


def status(code: int, body: Json = None, headers: Json = None, **fields: Any) -> Reply:
    """Build an answer with an HTTP status; without ``body`` an error object in OpenAI's form."""
    body = error_body(code) if body is None else body
    return Reply(action="raw", status=code, body=body, headers=headers or {}, **fields)


def error_body(code: int, message: str | None = None, kind: str | None = None) -> dict[str, Json]:
    """Return an error object in OpenAI's form for an HTTP status."""
    usual = {
        400: ("Bad request.", "BadRequestError"),
        401: ("Incorrect API key provided.", "invalid_request_error"),
        404: ("The model does not exist.", "NotFoundError"),
        429: ("Rate limit reached.", "rate_limit_error"),
        500: ("Internal server error.", "InternalServerError"),
        503: ("The engine is currently busy.", "Service Unavailable"),
    }
    words, name = usual.get(code, (f"Status {code}.", "error"))
    return {"error": {"message": message or words, "type": kind or name, "code": code}}


def context_overflow(limit: int = 4096, tokens: int = 5000) -> Reply:
    """Build the 400 that vLLM answers to a prompt longer than its context."""
    text = (
        f"This model's maximum context length is {limit} tokens. However, your request has "
        f"{tokens} input tokens. Please reduce the length of the input messages."
    )
    return status(400, error_body(400, text, "BadRequestError"))


def raw(
    content: bytes | str, content_type: str = "application/json", status: int = 200, **fields: Any
) -> Reply:
    """Build an answer with exactly these bytes."""
    data = content.encode() if isinstance(content, str) else content
    return Reply(action="raw", content=data, content_type=content_type, status=status, **fields)


def wire(content: bytes, **fields: Any) -> Reply:
    """Write these bytes to the socket in place of an HTTP response, then close it."""
    return Reply(action="wire", content=content, **fields)


def hang(seconds: float | None = None) -> Reply:
    """Take the request and answer nothing, for ``seconds`` or until the client goes away."""
    return Reply(action="hang", seconds=seconds)


def close(reset: bool = False) -> Reply:
    """Drop the connection without an answer; with ``reset`` as a TCP reset."""
    return Reply(action="close", reset=reset)


def slow(delay: float, reply: Reply) -> Reply:
    """Send ``reply`` after ``delay`` seconds."""
    return msgspec.structs.replace(reply, delay=delay)


def gated(reply: Reply, gate: str = "gate") -> Reply:
    """Hold ``reply`` back until the test calls ``release(gate)``."""
    return msgspec.structs.replace(reply, gate=gate)


def stream(chunks: Sequence[Json], end: End = "done", **fields: Any) -> Reply:
    """Build an SSE stream. A dict becomes a ``data:`` event, text and bytes go out as they are.

    ``end``: ``done`` sends ``[DONE]`` and ends well, ``close`` ends the body well without it,
    ``cut`` drops the connection. ``gap`` are seconds between chunks.
    """
    return Reply(action="stream", chunks=list(chunks), end=end, **fields)


def delta(
    content: str | None = None, finish_reason: Json = None, index: int = 0, **fields: Json
) -> dict[str, Json]:
    """Build one streamed chat chunk; ``fields`` go into its ``delta``."""
    inner: dict[str, Json] = dict(fields)
    if content is not None:
        inner["content"] = content
    choice = {"index": index, "delta": inner, "finish_reason": finish_reason}
    return {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "choices": [choice]}


def usage_chunk(prompt: int | None = 5, completion: int | None = 3) -> dict[str, Json]:
    """Build the last streamed chunk: no choices, the token counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {
        "id": "chatcmpl-fake", "object": "chat.completion.chunk", "choices": [], "usage": counts
    }  # fmt: skip
