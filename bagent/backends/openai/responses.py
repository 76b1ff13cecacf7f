"""Replies of OpenAI's ``/v1/responses``, whole and streamed.

Source: https://platform.openai.com/docs/api-reference/responses/object and
https://platform.openai.com/docs/api-reference/responses-streaming; served alike by vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bagent.backends.openai.chat import RESPONSE_ITEMS, read_tool_calls, read_usage
from bagent.backends.openai.errors import failure_from_body, shorten, unexpected_body
from bagent.backends.typed_stream import TypedEventStream
from bagent.text.json import decode_json
from bagent.types import Failure, Json, Reply, ToolCall, Usage

PATH = "/responses"

RESPONSES_ONLY = frozenset(
    (
        *("o1-pro", "o3-pro", "o3-deep-research", "o4-mini-deep-research", "computer-use-preview"),
        *("gpt-5-codex", "gpt-5-pro", "gpt-5.1-codex-max", "gpt-5.5-pro", "gpt-5.6-cyber"),
        *("gpt-6-cyber", "gpt-6-rosalind", "gpt-6.2-astra-law", "gpt-rosalind-research"),
        *("gpt-daybreak-blue-latest", "gpt-daybreak-red-latest"),
    )
)
"""Models that chat completions refuse. Source: ``types/shared/responses_model.py`` of the openai
SDK 3.57, without the names that end in a date."""

WANTS_RESPONSES = re.compile(r"\bv1/responses\b|\bresponses (api|endpoint)\b", re.IGNORECASE)
"""A refusal of a chat for a model that only ``/responses`` serves."""

_DATE = re.compile(r"-\d{4}-\d\d-\d\d$")
_CUT = "max_output_tokens"
_HEARD = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
}
_ENDS = ("response.completed", "response.incomplete", "response.failed")


def needs_responses(model: str) -> bool:
    """Return whether a model of OpenAI is served by ``/responses`` alone."""
    return _DATE.sub("", model) in RESPONSES_ONLY


def read_response(raw: bytes, headers: Mapping[str, str]) -> Reply | Failure:
    """Parse the body of an HTTP 200 response.

    An answer that ended early has the finish reason ``length`` or ``content_filter``. One that is
    still in progress (``background``) is a failure.
    """
    try:
        body = decode_json(raw)
    except ValueError:
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("output"), list):
        return failure_from_body(body, headers) or unexpected_body("no response object", raw)
    return _result(body, headers, None)


def _result(
    body: dict[str, Any], headers: Mapping[str, str], ttft_ms: float | None
) -> Reply | Failure:
    """Return the reply of a response object, or why it holds no answer."""
    failure = failure_from_body(body, headers) if body.get("error") else None
    if failure is not None:
        return failure
    status = body.get("status", "completed")
    if status not in ("completed", "incomplete"):
        message = f"the response has not ended: its status is {shorten(str(status), 40)}"
        return Failure("bad_response", message, passing=status == "failed", status=200)
    items = body["output"]
    parts = [part for item in items for part in _parts(item, "message", "content")]
    calls = read_tool_calls([_call(item) for item in items if _type(item) == "function_call"])
    thinking = [
        part
        for item in items
        for name in ("summary", "content")
        for part in _parts(item, "reasoning", name)
    ]
    logprobs = [entry for part in parts for entry in part.get("logprobs") or ()]
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
        usage=response_usage(body.get("usage")),
        ttft_ms=ttft_ms,
        logprobs={"content": logprobs} if logprobs else None,
        request_id=body["id"] if isinstance(body.get("id"), str) else None,
        blocks=_returned(items) if calls else None,
    )


def _type(item: Json) -> str:
    return str(item.get("type")) if isinstance(item, dict) else ""


def _returned(items: list[Json]) -> list[Json] | None:
    """Return the items that the next turn sends back, None if none is reasoning."""
    if not any(_type(item) == "reasoning" for item in items):
        return None
    return [
        {name: value for name, value in item.items() if value is not None}
        for item in items
        if isinstance(item, dict) and _type(item) in RESPONSE_ITEMS
    ]


def _parts(item: Json, kind: str, name: str) -> list[dict[str, Any]]:
    """Return the parts under ``name`` of an item of this kind."""
    parts = item.get(name) if _type(item) == kind else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _joined(parts: list[dict[str, Any]], name: str) -> str | None:
    texts = [part[name] for part in parts if isinstance(part.get(name), str)]
    return "".join(texts) if texts else None


def _call(item: Any) -> dict[str, Any]:
    """Convert a function call to the form of a chat message."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id") or item.get("id"), "function": function}


def _finish(body: dict[str, Any]) -> str:
    details = body.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    return "length" if reason in (_CUT, None) else str(reason)


def response_usage(usage: Json) -> Usage:
    """Return the token counts of a response; what is missing or null stays None."""
    if not isinstance(usage, dict):
        return Usage()
    return read_usage(
        {
            "prompt_tokens": usage.get("input_tokens"),
            "completion_tokens": usage.get("output_tokens"),
            "prompt_tokens_details": usage.get("input_tokens_details"),
            "completion_tokens_details": usage.get("output_tokens_details"),
        }
    )


class ResponsesStream(TypedEventStream):
    """Assembles a streamed response, whose last event holds the whole of it.

    Args:
        heard: gets each piece, ``text`` or ``reasoning``.
    """

    last_event = "the event response.completed"

    def __init__(
        self,
        started: float,
        clock: Callable[[], float],
        on_call: Callable[[ToolCall], None] | None = None,
        heard: Callable[[str, str], None] | None = None,
    ) -> None:
        super().__init__(started, clock, on_call)
        self._heard = heard
        self._text: list[str] = []
        self._items: list[Json] = []
        self._response: dict[str, Any] | None = None

    def _event(self, kind: str, event: dict[str, Any]) -> None:
        self.pieces += 1
        if kind.endswith(".delta"):
            self._seen()
            heard_kind = _HEARD.get(kind)
            piece = str(event.get("delta") or "")
            if heard_kind == "text":
                self._text.append(piece)
            if heard_kind is not None and self._heard is not None:
                self._heard(heard_kind, piece)
        elif kind == "response.output_item.done":
            item = event.get("item")
            self._items.append(item)
            if self._on_call is not None and _type(item) == "function_call":
                for call in read_tool_calls([_call(item)]):
                    self._on_call(call)
        elif kind in _ENDS and isinstance(event.get("response"), dict):
            self._response = event["response"]
            self.done = True

    @property
    def whole(self) -> bool:
        """Whether the last event was received."""
        return self._response is not None

    @property
    def text(self) -> str:
        """The text received so far."""
        return "".join(self._text)

    def _reply(self, ttft_ms: float | None) -> Reply | Failure:
        assert self._response is not None
        # Some servers leave the items out of the last event.
        return _result(
            {**self._response, "output": self._response.get("output") or self._items}, {}, ttft_ms
        )

    def _read_whole(self, raw: bytes) -> Reply | Failure:
        return read_response(raw, {})
