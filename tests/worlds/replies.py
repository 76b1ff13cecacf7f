"""Replies of simulated servers: their bodies, as those of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from worlds.network import Sent

MODEL = "world-model"
MAX_TOKENS = 64
"""Tokens that an answer may have."""
PROMPT_TOKENS, ANSWER_TOKENS = 10, 5
"""What a server counts for one prompt and its answer."""
ANSWER_USD = float(ANSWER_TOKENS)
"""What an answer costs in worlds with a budget: a dollar for each of its tokens."""

COUNTED = frozenset(
    {"500", "502", "504", "408", "cut", "junk", "error200", "blank", "nochoice", "html"}
)
"""Replies that cost a row an attempt, each one once."""
LASTING = {
    "400": "rejected", "422": "rejected", "overflow": "context_overflow", "filter": "refused",
    "length": "truncated",
}  # fmt: skip
"""Replies that end a row, and the kind of its failure."""
USED = frozenset(
    {"ok", "slow", "late", "stall", "length", "short", "filter", "blank", "invalid", "tools"}
)
"""Replies that tell how many tokens they took."""
GOOD = frozenset({"ok", "usage", "slow", "late", "stall", "length", "filter"})
"""Replies that an answer to several rows can have for one of them."""

SCHEMA = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "n": {"type": "integer", "minimum": 0}},
    "required": ["label", "n"],
}


def is_good(reply: str) -> bool:
    """Return whether a reply is the right answer."""
    return base_kind(reply) in ("ok", "usage", "slow", "late", "stall")


def base_kind(reply: str) -> str:
    """Return a reply without its Retry-After or seconds."""
    return reply.partition("+")[0].partition(":")[0]


def answer_text(row: int, version: int, kind: str = "single") -> str:
    """Return the one right answer to a row of a kind of job, after so many edits."""
    if kind == "schema":
        return msgspec.json.encode({"label": f"l{version}", "n": row}).decode()
    return f"answer {row}.{version} \u00e9\u4e2d {row * 7919 % 104729}"


def tokens_of(request: dict[str, Any]) -> int:
    """Return what servers count for the prompt of a request."""
    return 8 + sum(len(text.encode()) for text in texts_of(request)) // 4


def answer_limit(request: dict[str, Any]) -> int | None:
    return request.get("max_tokens", request.get("max_completion_tokens"))


def texts_of(request: dict[str, Any]) -> list[str]:
    """Return the texts of a request, one for each row that it may carry."""
    texts = request.get("input", request.get("prompt"))
    if texts is None:
        return [msgspec.json.encode(request["messages"]).decode()]
    return list(texts) if isinstance(texts, list) else [texts]


def head_of(status: int, size: int, headers: dict[str, str]) -> bytes:
    fields = {"Content-Type": "application/json", **headers, "Content-Length": size}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode()


_FINISH = {"length": "length", "short": "length", "filter": "content_filter"}


def status_of(kind: str | None) -> int:
    text = base_kind(kind or "")
    return int(text) if text.isdigit() else 200


def error_body(status: int, message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": "x", "code": status}})


def body_of(kind: str, request: dict[str, Any], text: str) -> tuple[int, bytes]:
    """Return status and body of a reply."""
    if kind == "html":
        return 502, b"<html><body>Bad Gateway</body></html>"
    if kind == "lost-model":
        return 404, error_body(404, f"The model `{MODEL}` does not exist.")
    if kind == "overflow":
        message = (
            "This model's maximum context length is 4096 tokens. However, you requested 9000 "
            "tokens in the messages, Please reduce the length of the messages."
        )
        return 400, error_body(400, message)
    if kind == "refuses-max_tokens":
        message = "Unsupported parameter: 'max_tokens' is not supported with this model. Use"
        return 400, error_body(400, f"{message} 'max_completion_tokens' instead.")
    if kind == "refuses-temperature":
        message = "Unsupported value: 'temperature' does not support 0.7 with this model. Only the"
        return 400, error_body(400, f"{message} default (1) value is supported.")
    if kind == "quota":
        message = "You exceeded your current quota, please check your plan and billing details."
        error = {"message": message, "type": "insufficient_quota", "code": "insufficient_quota"}
        return 429, msgspec.json.encode({"error": error})
    if kind == "400":
        return 400, error_body(400, "the image in this message cannot be decoded")
    if kind == "error200":
        return 200, error_body(500, "internal error")
    if kind == "junk":
        return 200, b'{"id": "x", "choices": [{"ind'
    status = status_of(kind)
    if status != 200:
        return status, error_body(status, "try again later")
    content = {"blank": "", "invalid": '{"label": 7}'}.get(kind, text)
    finish = _FINISH.get(kind, "stop")
    message = {"role": "assistant", "content": content}
    choices: list[Any] = [{"index": 0, "message": message, "finish_reason": finish}]
    if "messages" not in request:
        choices = [{"index": 0, "text": content, "finish_reason": finish}]
    body = {
        "id": "c1",
        "object": "chat.completion",
        "model": request.get("model"),
        "choices": [] if kind == "nochoice" else choices,
        "usage": _usage(kind),
    }
    return 200, msgspec.json.encode(body)


def list_body(request: dict[str, Any], sent: Sent) -> bytes:
    """Return the answers to a list of prompts."""
    choices = [
        {
            "index": number,
            "text": answer_text(row, version, "lists"),
            "finish_reason": _FINISH.get(base_kind(reply), "stop"),
        }
        for number, (row, version, reply) in enumerate(
            zip(sent.rows, sent.versions, sent.replies or ("ok",) * len(sent.rows), strict=True)
        )
    ]
    body = {"id": "c1", "object": "text_completion", "model": MODEL, "choices": choices}
    return msgspec.json.encode({**body, "usage": _counts(len(choices))})


def _usage(kind: str) -> Any:
    if kind == "usage":
        return {"prompt_tokens": -5, "completion_tokens": 10**30, "total_tokens": "many"}
    return _counts(1)


def _counts(answers: int) -> dict[str, int]:
    prompt, answer = PROMPT_TOKENS * answers, ANSWER_TOKENS * answers
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def streamed(body: dict[str, Any]) -> tuple[bytes, int]:
    """Return a chat completion as server-sent events, and the bytes up to the last tool call."""
    events, first = [], 0
    for choice in body["choices"]:
        if "text" in choice:
            events.append({**body, "choices": [choice]})
            continue
        message = dict(choice["message"])
        calls = message.pop("tool_calls", None) or ()
        deltas = [message]
        deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(calls)]
        for delta in deltas:
            part = {"index": 0, "delta": delta, "finish_reason": None}
            events.append({**body, "choices": [part]})
        first = len(events) if calls else 0
        last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
        events.append({**body, "choices": [last]})
    events.append({**body, "choices": []})
    chunks = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
    return b"".join(chunks) + b"data: [DONE]\n\n", len(b"".join(chunks[:first]))
