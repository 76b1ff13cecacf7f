"""Failures from HTTP statuses and error bodies, for every provider and engine.

Sources: the error bodies of OpenAI and vLLM (``{"error": {...}}``), SGLang and NVIDIA Dynamo (flat
``{"message", "type", "code"}``), Anthropic (``{"type": "error", "error": {...}}``), Google (the
same in a list), FastAPI (``{"detail": ...}``) and gateways that put an error behind status 200.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import msgspec

from bagent.backends.http.retry_after import retry_after, retry_after_in_text
from bagent.text.json import decode_json, encode_json
from bagent.types import Failure, Json

TEXT_LIMIT = 500
"""Characters kept of a server's message."""

_OVERFLOW = re.compile(
    r"maximum context length|context[ _]length|context window|exceeds? the (available )?context"
    r"|prompt is too long|input is too long|too many (input )?tokens|max_model_len"
    r"|longer than the model|exceed_context|context_?window_?exceeded"
    r"|(input|prompt)( tokens?)? (count|length)\b.{0,60}\bexceed|maximum (input|prompt) length"
    r"|`?max_new_tokens`? must be <=|reduce the length of the (messages|prompt|input)",
    re.IGNORECASE,
)
_FILTERED = re.compile(r"content[ _](filter|policy|management)|safety (system|filter)", re.I)
_NO_QUOTA = re.compile(
    r"insufficient[_ ](quota|balance|credit|fund)|exceeded your current quota|credit balance"
    r"|billing[_ ](hard[_ ])?limit|billing[_ ]not[_ ]active|account is not active"
    r"|spend(ing)?[_ ]limit|usage limits? .*reached|reached your specified .*limit"
    r"|(monthly|total) (usage|spend(ing)?|budget) (limit|quota)|check your plan and billing"
    r"|out of (credits?|funds|budget|call volume quota)|billing (must|needs to) be enabled"
    r"|credits? (has|have|are|is)( been)? (depleted|exhausted|expired|used up)|billing_error"
    r"|payment required|key limit exceeded|budget (has been )?exceeded",
    re.I,
)
# A 400 may repeat the user's text, so only the beginning of its message is matched.
_NO_QUOTA_400 = re.compile(
    r"\s*(your credit balance|you have reached your (specified|spend)|insufficient[_ ]quota"
    r"|billing hard limit|(this|the) request would exceed your [\w']+ (monthly )?spend)",
    re.I,
)
# Code and type follow the message.
_NO_QUOTA_TYPE = re.compile(
    r"\s(billing_error|insufficient_quota|billing_(hard_)?limit_\w+|billing_not_active)\s*\S*\s*$",
    re.I,
)
_TOO_LARGE = re.compile(r"request too large|must be reduced in order to run", re.I)
_BUSY = re.compile(
    r"busy|overload|queue (is )?full|too many requests|at capacity|exhausted|backlog"
    r"|try again later|throttl",
    re.I,
)
_RATE = re.compile(r"rate[ _-]?limit|too many requests|resource[ _]?exhausted|throttl", re.I)
_BODY_STATUS = (
    (re.compile(r"authenticat|unauthori[sz]ed|invalid[ _]api[ _]key", re.I), 401),
    (re.compile(r"permission|forbidden", re.I), 403),
    (re.compile(r"not[ _]?found", re.I), 404),
    (re.compile(r"invalid|bad[ _]?request|unsupported|validation|content[ _]filter", re.I), 400),
    (re.compile(r"time[ _-]?out|timed out|deadline", re.I), 504),
)
"""Status by the code or type of an error behind HTTP 200, if it is no number."""


def shorten(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return ``text`` on one line of at most ``limit`` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def unexpected_body(problem: str, raw: bytes) -> Failure:
    """Return the failure of a body behind status 200 that holds no answer, with its beginning."""
    excerpt = shorten(raw[:800].decode("utf-8", "replace"), 200) or "nothing"
    message = f"{problem} behind HTTP 200: {excerpt}"
    return Failure("bad_response", message, passing=True, status=200)


def not_json(raw: bytes, content_type: str, error: ValueError) -> Failure:
    """Return the failure of a body behind status 200 that is not JSON, by the decoder's error."""
    if isinstance(error, UnicodeDecodeError):
        return unexpected_body(f"JSON that is not UTF-8 ({error.reason})", raw)
    return unexpected_body(f"not JSON ({content_type.split(';')[0] or 'no content type'})", raw)


def find_error(body: Json) -> tuple[str, Json, str] | None:
    """Return the error in a JSON body as (message, code, type), None if there is none.

    Handles ``{"error": {...}}``, ``{"error": "text"}``, ``{"errors": [...]}``, ``{"detail": ...}``,
    flat bodies, and each of them in a list or in another error.
    """
    if isinstance(body, list) and body:
        body = body[0]
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict) and (error or "choices" not in body):
        inner = _inner(error)
        if inner is not None:
            return inner
        code = error.get("code") or error.get("status")
        return _message_of(error), code, str(error.get("type") or error.get("status") or "")
    if error:
        return _as_text(error), body.get("code") or body.get("status_code"), ""
    return None if "choices" in body else _flat_error(body)


def _flat_error(body: dict[str, Json]) -> tuple[str, Json, str] | None:
    """Return the error of a body without ``error``."""
    if body.get("object") == "error" or "message" in body:
        inner = find_error(body.get("message")) if isinstance(body.get("message"), dict) else None
        flat = _as_text(body.get("message")), body.get("code"), str(body.get("type") or "")
        return inner or flat
    for name in ("detail", "errors"):
        if body.get(name):
            return _details(body[name]), body.get("code"), ""
    for name in ("Message", "error_message", "errorMessage", "msg"):
        code = body.get("code") or body.get("error_code") or body.get("status_code")
        if isinstance(body.get(name), str) and (code or name != "msg"):
            return str(body[name]), code, str(body.get("type") or body.get("__type") or "")
    fault = body.get("fault")
    if isinstance(fault, dict) and isinstance(fault.get("faultstring"), str):
        detail = fault.get("detail")
        return fault["faultstring"], None, _as_text(detail) if detail else ""
    for name in ("response", "body"):
        if isinstance(body.get(name), dict) and body[name].get("error"):
            return find_error(body[name])
    return None


def _inner(error: dict[str, Json]) -> tuple[str, Json, str] | None:
    """Return the error inside an error, completed from the outer one."""
    message = error.get("message")
    if isinstance(error.get("error"), dict):
        inner = find_error({"error": error["error"]})
    elif isinstance(message, dict):
        inner = find_error(message) or None
    else:
        return None
    if inner is None:
        return None
    text, code, kind = inner
    return (
        text,
        code or error.get("code") or error.get("status"),
        kind or str(error.get("type") or ""),
    )


def _message_of(error: dict[str, Json]) -> str:
    message = _as_text(error.get("message") or error.get("detail") or error)
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, dict) else None
    # Gateways put the upstream server's message here.
    return f"{message}: {raw}" if isinstance(raw, str) and raw else message


def _details(value: Json) -> str:
    """Return FastAPI's validation errors as text, without the input that they repeat."""
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        return str(value["message"])
    if not isinstance(value, list):
        return _as_text(value)
    messages = []
    for entry in value:
        message = (entry.get("msg") or entry.get("message")) if isinstance(entry, dict) else None
        location = entry.get("loc") if message else None
        where = ".".join(map(str, location)) + ": " if isinstance(location, list) else ""
        messages.append(where + _as_text(message or entry))
    return "; ".join(messages)


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else encode_json(value)


def failure_from_status(status: int, text: str, headers: Mapping[str, str]) -> Failure:
    """Convert an HTTP response with an error status."""
    try:
        error = find_error(decode_json(text))
    except ValueError:
        error = None
    full_text = f"{error[0]} {error[1] or ''} {error[2]}" if error else text
    summary = shorten(error[0] if error else text) or "no text"
    if 300 <= status < 400:
        to = headers.get("Location")
        summary += f" (a redirect{f' to {to}' if to else ''}; give the address where it leads)"
    wait = retry_after(headers, time.time())
    if wait is None and status in (429, 503):
        wait = retry_after_in_text(full_text)
    return _as_advised(classify(status, summary, full_text, wait), headers.get("x-should-retry"))


def _as_advised(failure: Failure, advice: str | None) -> Failure:
    """Apply ``x-should-retry``, by which OpenAI and Anthropic steer their SDKs."""
    if advice == "false" and failure.passing:
        return msgspec.structs.replace(failure, passing=False, busy=False)
    if advice == "true" and failure.kind == "rejected":
        return msgspec.structs.replace(failure, kind="overloaded", passing=True)
    return failure


def failure_from_body(body: Json, headers: Mapping[str, str]) -> Failure | None:
    """Convert an error in a body behind status 200; None if there is none."""
    error = find_error(body)
    if error is None:
        return None
    message, code, kind = error
    full_text = f"{message} {code or ''} {kind}"
    wait = retry_after(_inner_headers(body) or headers, time.time()) or retry_after_in_text(
        full_text
    )
    status = _body_status(code, kind, full_text)
    failure = classify(status, shorten(message), full_text, wait)
    return msgspec.structs.replace(failure, message=f"error behind HTTP 200: {failure.message}")


def _inner_headers(body: Json) -> Mapping[str, str]:
    """Return the upstream server's headers, which OpenRouter puts into the body."""
    error = body.get("error") if isinstance(body, dict) else None
    metadata = error.get("metadata") if isinstance(error, dict) else None
    headers = metadata.get("headers") if isinstance(metadata, dict) else None
    return {str(k): str(v) for k, v in headers.items()} if isinstance(headers, dict) else {}


def _body_status(code: Json, kind: str, text: str) -> int:
    """Return the HTTP status of an error: its number, else by its text."""
    number = str(code)
    if re.fullmatch(r"[45]\d\d", number):
        return int(number)
    if _NO_QUOTA.search(text) or _RATE.search(text):
        return 429
    if _OVERFLOW.search(text):
        return 400
    names = f"{code or ''} {kind}"
    for pattern, status in _BODY_STATUS:
        if pattern.search(names):
            return status
    return 503 if _BUSY.search(text) else 502


def classify(status: int, summary: str, text: str, wait: float | None = None) -> Failure:
    """Classify ``status`` by the server's ``text``; ``summary`` goes into the message.

    ``wait`` is the server's Retry-After in seconds, None if it sent none.
    """
    message = f"HTTP {status}: {summary}"
    if _out_of_budget(status, text, wait):
        return Failure("budget", message, status=status)
    if status == 429:
        if _TOO_LARGE.search(text):
            return Failure("rejected", message, status=status)
        return Failure("rate_limited", message, True, status, wait, busy=True)
    if status in (408, 499, 504):
        return Failure("timeout", message, True, status, wait)
    if status in (409, 425) or (status >= 500 and status != 501):
        if status == 500 and _OVERFLOW.search(text):
            return Failure("context_overflow", message, status=status)
        full = status == 503 and (wait is not None or bool(_BUSY.search(text)))
        return Failure("overloaded", message, True, status, wait, busy=full or status == 529)
    if status in (401, 403, 407):
        return Failure("auth", message, status=status)
    if _OVERFLOW.search(text):
        return Failure("context_overflow", message, status=status)
    if _FILTERED.search(text):
        return Failure("refused", message, status=status)
    return Failure("rejected", message, status=status)


def _out_of_budget(status: int, text: str, wait: float | None) -> bool:
    """Return whether money or quota is exhausted, so that a retry cannot help."""
    if status == 400:
        return bool(_NO_QUOTA_400.match(text) or _NO_QUOTA_TYPE.search(text))
    if status == 429 and wait is not None and "insufficient_quota" not in text:
        return False  # Google calls a limit per minute a quota too, but names a time.
    return status == 402 or (status in (403, 429) and bool(_NO_QUOTA.search(text)))
