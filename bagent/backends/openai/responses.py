"""Responses of OpenAI's ``/v1/responses``.

Source: https://platform.openai.com/docs/api-reference/responses/object; served alike by vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagent.backends.openai.chat import read_tool_calls, read_usage
from bagent.backends.openai.errors import failure_from_body, shorten, unexpected_body
from bagent.text.json import decode_json
from bagent.types import Failure, Json, Reply

PATH = "/responses"
_CUT = "max_output_tokens"


def read_response(raw: bytes, headers: Mapping[str, str]) -> Reply | Failure:
    """Parse the body of an HTTP 200 response.

    An answer that ended early has the finish reason ``length`` or ``content_filter``. One that is
    still in progress (``background``) is a failure.
    """
    try:
        body = decode_json(raw)
    except ValueError:
        body = None
    items = body.get("output") if isinstance(body, dict) else None
    failure = None
    if not isinstance(items, list) or body.get("error"):
        failure = failure_from_body(body, headers)
    if failure is not None:
        return failure
    if not isinstance(body, dict) or not isinstance(items, list):
        return unexpected_body("no response object", raw)
    status = body.get("status", "completed")
    if status not in ("completed", "incomplete"):
        message = f"the response has not ended: its status is {shorten(str(status), 40)}"
        return Failure("bad_response", message, passing=status == "failed", status=200)
    parts = [part for item in items for part in _parts(item, "message", "content")]
    calls = read_tool_calls(
        [_call(item) for item in items if _type(item) == "function_call"],
    )
    thinking = [
        part
        for item in items
        for name in ("summary", "content")
        for part in _parts(item, "reasoning", name)
    ]
    return Reply(
        text=_joined(parts, "text"),
        finish_reason=_finish(body)
        if status == "incomplete"
        else "tool_calls"
        if calls
        else "stop",
        model=body["model"] if isinstance(body.get("model"), str) else None,
        reasoning=_joined(thinking, "text") or None,
        refusal=_joined(parts, "refusal") or None,
        tool_calls=calls,
        usage=read_usage(_chat_usage(body.get("usage"))),
        request_id=body["id"] if isinstance(body.get("id"), str) else None,
    )


def _type(item: Json) -> str:
    return str(item.get("type")) if isinstance(item, dict) else ""


def _parts(item: Json, kind: str, name: str) -> list[dict[str, Any]]:
    """Return the parts under ``name`` of an item of this kind."""
    parts = item.get(name) if _type(item) == kind else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _joined(parts: list[dict[str, Any]], name: str) -> str | None:
    texts = [part[name] for part in parts if isinstance(part.get(name), str)]
    return "".join(texts) if texts else None


def _call(item: dict[str, Any]) -> dict[str, Any]:
    """Convert a function call to the form of a chat message."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id") or item.get("id"), "function": function}


def _finish(body: dict[str, Any]) -> str:
    details = body.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    return "length" if reason in (_CUT, None) else str(reason)


def _chat_usage(usage: Json) -> Json:
    """Rename the usage to the names of chat completions."""
    if not isinstance(usage, dict):
        return None
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
        "completion_tokens_details": usage.get("output_tokens_details"),
    }
