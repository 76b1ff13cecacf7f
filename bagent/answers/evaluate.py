"""Evaluation of replies: finish reason, then text, then schema.

The finish reason comes first: a cut answer is never ok, whatever its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.answers.extract import (
    NOT_JSON,
    How,
    decode_strict,
    extract_json,
    why_not_json,
)
from bagent.answers.messages import shorten
from bagent.answers.reasoning import ReasoningSplit, may_have_reasoning, split_reasoning
from bagent.text.unicode import clean_text
from bagent.types import ErrorKind, Json, Reply, Status

if TYPE_CHECKING:
    from bagent.answers.schema.schema import OutputSchema

GOOD_ENDS = frozenset(
    (
        *("stop", "tool_calls", "function_call"),
        *("end_turn", "stop_sequence", "tool_use"),
        "eos",
    )
)
"""Finish reasons (lower case) that end an answer well; whatever is in no list is a failure."""

CUT_ENDS = frozenset(
    (
        *("length", "max_tokens", "model_context_window_exceeded"),
        *("max_output_tokens", "max_completion_tokens", "model_length"),
    )
)
"""Finish reasons of answers that were cut off at a token limit."""

REFUSED_ENDS = frozenset(
    (
        *("content_filter", "content_filtered", "refusal", "guardrail_intervened"),
        *("safety", "image_safety", "recitation", "blocklist", "prohibited_content", "spii"),
    )
)
"""Finish reasons of answers that the model or a filter in front of it refused."""


class AnswerResult(msgspec.Struct, frozen=True, gc=False):
    """The evaluation of a reply.

    ``status`` is ``ok``, ``invalid``, ``truncated``, ``refused`` or ``failed``; ``error_kind``,
    ``error`` (one line) and ``passing`` (the same request may do better) are set where it is not
    ``ok``. ``output`` is the validated value as compact JSON and ``value`` the same decoded: set
    only for ``ok`` with a schema, or with calls of tools that the request itself offered, as
    ``{"tool_calls": [...]}`` in OpenAI's form. ``text`` is the answer's text without leading
    thinking, valid UTF-8, None where there was none; ``reasoning`` is the thinking. ``how`` says
    how the value was found. ``violations`` are the validation messages for a retry prompt.
    """

    status: Status
    error_kind: ErrorKind | None = None
    error: str | None = None
    passing: bool = False
    output: msgspec.Raw | None = None
    value: Json = None
    text: str | None = None
    reasoning: str | None = None
    how: How | None = None
    violations: tuple[str, ...] = ()


def evaluate(reply: Reply, schema: OutputSchema | None, *, tools: bool = False) -> AnswerResult:
    """Evaluate ``reply`` with ``schema`` or, where that is None, as text.

    Args:
        reply: from the endpoint.
        schema: what the answer must fit.
        tools: whether the request offers tools of its own, whose calls are an answer. Who runs
            tools looks at ``reply.tool_calls`` first; nobody else asked for calls.
    """
    reason = (reply.finish_reason or "").lower()
    if reason in CUT_ENDS or (reply.refusal or "").strip() or reason not in GOOD_ENDS:
        return _bad_end(reply, reason)
    text = reply.text
    if schema is not None and text is not None and text[:1] in ("{", "["):
        # The usual answer: nothing but JSON.
        value = decode_strict(text)
        if value is not NOT_JSON and schema.accepts_clean(value):
            output = msgspec.Raw(msgspec.json.encode(value))
            reasoning = _clean(reply.reasoning) if reply.reasoning else None
            return AnswerResult(
                "ok", output=output, value=value, text=text, reasoning=reasoning, how="plain"
            )
    if schema is None and text and not (reply.reasoning or reply.tool_calls or text.isspace()):
        # The usual text: nothing but the answer.
        text = text if text.isascii() else clean_text(text)
        if not may_have_reasoning(text):
            return AnswerResult("ok", text=text)
    split = _split(reply)
    if not split.text:
        return _without_text(reply, schema, split, tools)
    if schema is None:
        if tools and reply.tool_calls:
            return _tool_calls(reply, split)
        return AnswerResult("ok", text=split.text, reasoning=split.reasoning)
    return _with_schema(clean_text(text or ""), schema, split)


def requested_object(body: Json, text: str) -> msgspec.Raw | None:
    """Return the JSON object of an answer to a request that asks for JSON; None if it has none.

    Args:
        body: the body of a batch line: a chat with ``response_format``, or a response with
            ``text.format``.
        text: the answer.
    """
    if not isinstance(body, dict):
        return None
    text_options = body.get("text")
    form = body.get("response_format") or (
        text_options.get("format") if isinstance(text_options, dict) else None
    )
    if not isinstance(form, dict) or form.get("type") not in ("json_object", "json_schema"):
        return None
    value = decode_strict(text)
    return msgspec.Raw(msgspec.json.encode(value)) if isinstance(value, dict) else None


def _with_schema(text: str, schema: OutputSchema, split: ReasoningSplit) -> AnswerResult:
    extracted = extract_json(text, schema.accepts_clean)
    if extracted is not None and extracted.accepted:
        return AnswerResult(
            "ok",
            output=msgspec.Raw(extracted.raw),
            value=extracted.value,
            text=split.text,
            reasoning=split.reasoning,
            how=extracted.how,
        )
    if extracted is None:
        violations = [why_not_json(text)]
        error = violations[0]
    else:
        violations = schema.explain(extracted.value) or ["/: not what the schema asks for"]
        error = f"not what the schema asks for: {violations[0]}"
    return _failure("invalid", "schema", error, split, violations=violations)


def _tool_calls(reply: Reply, split: ReasoningSplit) -> AnswerResult:
    """Return tool calls as the answer, in OpenAI's form."""
    value = {
        "tool_calls": [
            {
                "id": clean_text(call.id),
                "type": "function",
                "function": {
                    "name": clean_text(call.name),
                    "arguments": clean_text(call.arguments),
                },
            }
            for call in reply.tool_calls
        ]
    }
    output = msgspec.Raw(msgspec.json.encode(value))
    text = split.text or None
    return AnswerResult("ok", output=output, value=value, text=text, reasoning=split.reasoning)


def _without_text(
    reply: Reply, schema: OutputSchema | None, split: ReasoningSplit, tools: bool
) -> AnswerResult:
    """Evaluate a reply that ended well but has no text."""
    if reply.tool_calls and schema is None:
        if tools:
            return _tool_calls(reply, split)
        names = ", ".join(dict.fromkeys(call.name for call in reply.tool_calls))
        error = f"a call of a tool that was not offered ({shorten(clean_text(names), 60)})"
        return _failure("failed", "bad_response", error, split, passing=True)
    if reply.tool_calls:
        error = "a tool call in place of the JSON answer"
        return _failure("invalid", "schema", error, split, violations=[error])
    if schema is not None and not split.closed:
        error = why_not_json(reply.text or "")
        return _failure("invalid", "schema", error, split, violations=[error])
    error = "the answer is empty"
    if split.reasoning:
        error += ": there is only reasoning"
    return _failure("failed", "empty", error, split, passing=True)


def _bad_end(reply: Reply, reason: str) -> AnswerResult:
    split = _split(reply)
    finish = f"finish_reason {shorten(clean_text(reply.finish_reason or ''), 60)}"
    if reason in CUT_ENDS:
        error = f"the answer was cut off at a token limit ({finish})"
        return _failure("truncated", "truncated", error, split)
    refusal = clean_text(reply.refusal or "").strip()
    if refusal or reason in REFUSED_ENDS:
        error = f"refused: {shorten(refusal)}" if refusal else f"refused ({finish})"
        return _failure("refused", "refused", error, split)
    error = f"the answer did not end well ({finish})"
    if reply.finish_reason is None:
        error = "the answer has no end (finish_reason is missing)"
    return _failure("failed", "bad_response", error, split, passing=True)


def _failure(
    status: Status,
    kind: ErrorKind,
    error: str,
    split: ReasoningSplit,
    *,
    passing: bool = False,
    violations: Sequence[str] = (),
) -> AnswerResult:
    return AnswerResult(
        status,
        error_kind=kind,
        error=error,
        passing=passing,
        text=split.text or None,
        reasoning=split.reasoning,
        violations=tuple(violations),
    )


def _split(reply: Reply) -> ReasoningSplit:
    """Return the reply's text and thinking as valid UTF-8; blank text and thinking are none."""
    text = clean_text(reply.text or "")
    reasoning = _clean(reply.reasoning)
    split = split_reasoning(text) if reasoning is None else ReasoningSplit(reasoning, text)
    if split.reasoning is None and split.text.strip():
        return split
    return split._replace(
        text=split.text if split.text.strip() else "", reasoning=split.reasoning or None
    )


def _clean(text: Any) -> str | None:
    return clean_text(text) if text and text.strip() else None
