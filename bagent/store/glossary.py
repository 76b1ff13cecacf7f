"""What every column of the tables and views of a run means, in a few words.

Times are Unix seconds, or milliseconds where the name ends in ``_ms``; what nobody told is null.
"""

from __future__ import annotations

_PLACE: dict[str, str] = {
    "row": "number of the input row, from 0",
    "stage": "name of the stage; `main` where the job has one",
    "answer": "number of the answer to the row, from 0",
}
_ID = "id of the stage's row, as in results; null in runs begun before it was kept"
_TOKENS: dict[str, str] = {
    "prompt_tokens": "tokens of the prompt, cached ones too",
    "cached_tokens": "those that the server's prefix cache knew",
    "completion_tokens": "tokens of the answer, reasoning too",
}


def _spread(prefix: str, words: str) -> dict[str, str]:
    names = (("p50", "median"), ("p90", "90th percentile"), ("p99", "99th"), ("max", "longest"))
    return {f"{prefix}_{name}": f"{words}, {share}" for name, share in names}


GLOSSARY: dict[str, dict[str, str]] = {
    "results": {
        "id": "the row's id as text",
        "row": _PLACE["row"],
        "source": "file that the row came from",
        "line": "its line there, from 1",
        "stage": _PLACE["stage"],
        "answer": _PLACE["answer"],
        "status": "how it ended, see below",
        "output": "the validated answer, JSON",
        "text": "the answer as it came",
        "reasoning": "the model's reasoning, where it is told apart",
        "error_kind": "why it is not ok, see below",
        "error": "the same in words",
        "finish_reason": "why the model stopped: stop, length, tool_calls ...",
        "model": "the model that answered",
        "endpoint": "the endpoint that answered last",
        "attempts": "tries of all its turns",
        "turns": "requests of its conversation",
        **_TOKENS,
        "reasoning_tokens": "those of the reasoning",
        "cost_usd": "US dollars; null where a price or a count is unknown",
        "queue_ms": "waiting before it was sent",
        "ttft_ms": "from sending to the first token, where something streamed",
        "latency_ms": "from the first sending to the whole answer",
        "started_at": "when it was sent first",
        "finished_at": "when it ended",
        "input": "the input row, JSON",
        "parents": "what it was made of: STAGE:ID:ANSWER",
        "parents_failed": "how many rows behind it had failed",
        "copied_from": "the id of the equal request whose answer this is",
        "prompt_sha256": "hash of what was sent",
        "output_sha256": "hash of the answer",
        "logprobs": "log probabilities, where asked for, JSON",
    },
    "answers": {
        "id": "the row's id as text",
        "stage": _PLACE["stage"],
        "answer": _PLACE["answer"],
    },
    "attempts": {
        **_PLACE,
        "turn": "number of the request in its conversation, from 1",
        "try": "number of the try of that turn, from 1",
        "endpoint": "where it was sent",
        "sent": "when it was sent",
        "first_byte": "when the answer began",
        "first_token": "when its first token came, where it streamed",
        "done": "when it was whole, or had failed",
        "status_code": "HTTP status",
        "error_kind": "why it failed; null: it did not",
        "error": "the same in words",
        **_TOKENS,
        "group_id": "the HTTP request that carried it",
        "group_size": "rows in that request",
        "request_id": "the server's own name of the request",
        "id": _ID,
    },
    "tool_calls": {
        **_PLACE,
        "turn": "number of the turn that asked for it",
        "name": "the tool",
        "arguments": "its arguments as the model wrote them",
        "shared": "whether it was answered by an equal call in flight",
        "cached": "whether it was answered from the cache",
        "started": "when it began",
        "latency_ms": "how long it took",
        "error": "why it failed, with the line of its code; null: it did not",
        "id": _ID,
    },
    "endpoints": {
        "endpoint": "the endpoint",
        "at": "when it was looked at",
        "healthy": "whether it takes requests",
        "in_flight": "rows of this run in flight there",
        "limit": "how many may be",
        "reason": "why the limit is what it is",
        "waiting": "requests in its own queue",
        "running": "requests that it works on",
        "kv_usage": "share of its KV cache in use, 0 to 1",
        "cache_hits": "tokens that its prefix cache knew, since it started",
        "cache_queries": "tokens that were looked for",
    },
    "errors": {
        "error_kind": "why the rows are not ok",
        "status": "how they ended",
        "rows": "how many",
        "percent": "their share of all results",
        "endpoints": "of how many endpoints",
        "first_id": "id of the first",
        "pattern": "what their errors have in common: less numbers and quoted values",
        "example": "the error of the first",
        "stage": _PLACE["stage"],
    },
    "latency": {
        "stage": _PLACE["stage"],
        "answers": "answers that were given",
        **_spread("latency", "ms to the whole answer"),
        **_spread("ttft", "ms to the first token"),
        **_spread("queue", "ms of waiting"),
    },
    "by_endpoint": {
        "endpoint": "the endpoint",
        "tries": "rows' parts in its requests",
        "requests": "HTTP requests",
        "ok": "tries that went well",
        "failed": "those that did not",
        "throttled": "those that were told to slow down",
        "most_error": "commonest error kind",
        **_spread("ms", "ms of a try"),
        "first_token_p50": "ms to the first token, median",
        "prompt_tokens": "tokens of all prompts",
        "completion_tokens": "tokens of all answers",
        "completion_tokens_per_s": "those a second, from the first to the last",
    },
    "turns": {
        **_PLACE,
        "turn": "number of the turn, from 1",
        "tries": "how often it was sent",
        "endpoint": "where the last time",
        "error_kind": "why a try failed",
        "prompt_tokens": _TOKENS["prompt_tokens"],
        "completion_tokens": _TOKENS["completion_tokens"],
        "ms": "from the first sending to the last answer",
        "tool_calls": "tools that it called",
        "tools": "their names, in order",
        "id": _ID,
    },
}
"""For each table and view its columns in order; ``answers`` has one more for each property."""

STATUSES: dict[str, str] = {
    "ok": "a valid answer",
    "invalid": "an answer that the schema refuses, after all re-asks",
    "truncated": "an answer that was cut off at the token limit",
    "refused": "the model declined",
    "failed": "no answer",
    "bad_input": "the row cannot be used",
}
"""What each status of a result means."""

ERROR_KINDS: dict[str, str] = {
    "bad_input": "the line cannot be read",
    "template": "the prompt cannot be made of the row",
    "context_overflow": "the prompt is longer than the model's context",
    "rejected": "the server refused the request",
    "auth": "the key is not accepted",
    "rate_limited": "told to slow down, after all tries",
    "overloaded": "the server is full, after all tries",
    "timeout": "no answer in time",
    "connect": "no connection",
    "bad_response": "an answer that is no answer",
    "empty": "an answer without text",
    "truncated": "cut off at the token limit",
    "refused": "the model declined",
    "schema": "the answer does not fit the schema",
    "tool": "a tool failed, and the agent with it",
    "max_turns": "more turns than allowed",
    "budget": "the money that was allowed is spent",
    "internal": "a fault of this program",
    "client_closed": "whoever asked the proxy hung up before the end of the answer",
}
"""What each error kind means."""
