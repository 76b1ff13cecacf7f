"""Outcomes as lines of an OpenAI batch's output and error files (OpenAI's Batch API reference).

An error response is inside ``response.body``; a request without a response has ``response: null``
and a top-level ``error``. The answer to a line of a batch file is the body as received; other
answers are written as chat completions.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from bagent.types import Json, Outcome

_STATUS = re.compile(r"HTTP (\d{3})")
_LINE_ID = "batch_req_"


def batch_line(outcome: Outcome) -> bytes:
    """Return one output line with its newline: ``{"id", "custom_id", "response", "error"}``."""
    name = outcome.id if isinstance(outcome.id, str) else msgspec.json.encode(outcome.id).decode()
    line: dict[str, Any] = {
        "id": f"{_LINE_ID}{outcome.key}-{outcome.answer}",
        "custom_id": name,
        "response": None,
        "error": None,
    }
    code = _STATUS.search(outcome.error or "")
    if outcome.response is not None:
        line["response"] = _response(200, outcome, outcome.response)
    elif _is_answered(outcome):
        line["response"] = _response(200, outcome, _completion(outcome))
    elif code is not None:
        error = {"message": outcome.error, "type": outcome.error_kind, "code": outcome.error_kind}
        line["response"] = _response(int(code[1]), outcome, {"error": error})
    else:
        line["error"] = {"code": outcome.error_kind or outcome.status, "message": outcome.error}
    return msgspec.json.encode(line) + b"\n"


def _is_answered(outcome: Outcome) -> bool:
    """Return whether a model answered; a filtered answer has no text."""
    if outcome.finish_reason is None:
        return False
    return outcome.text is not None or outcome.status == "refused" or bool(_calls(outcome))


def _response(status: int, outcome: Outcome, body: dict[str, Any] | msgspec.Raw) -> dict[str, Any]:
    return {"status_code": status, "request_id": outcome.group or outcome.key, "body": body}


def _calls(outcome: Outcome) -> list[Json]:
    """Return the tool calls that are a row's answer; empty for other answers."""
    if outcome.output is None or b'"tool_calls"' not in bytes(outcome.output):
        return []
    value = msgspec.json.decode(outcome.output)
    calls = value.get("tool_calls") if isinstance(value, dict) and len(value) == 1 else None
    return calls if isinstance(calls, list) else []


def _completion(outcome: Outcome) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": outcome.text}
    calls = _calls(outcome)
    if calls:
        message["tool_calls"] = calls
    if outcome.reasoning is not None:
        message["reasoning"] = outcome.reasoning
    if outcome.status == "refused":
        message["refusal"] = outcome.error
    prompt, completion = outcome.prompt_tokens, outcome.completion_tokens
    usage = None
    if prompt is not None or completion is not None:
        complete = prompt is not None and completion is not None
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": (prompt or 0) + (completion or 0) if complete else None,
        }
    choice = {"index": 0, "message": message, "finish_reason": outcome.finish_reason}
    if outcome.logprobs is not None:
        choice["logprobs"] = outcome.logprobs
    return {
        "id": f"chatcmpl-{outcome.key}",
        "object": "chat.completion",
        "created": int(outcome.finished_at or 0),
        "model": outcome.model,
        "choices": [choice],
        "usage": usage,
    }
