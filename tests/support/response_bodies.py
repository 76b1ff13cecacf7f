"""Response bodies in OpenAI's forms, made from replies."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from email.utils import formatdate
from typing import Any

import msgspec

from support.replies import ABSENT, AUTO, Reply
from support.request_checks import encode_tokens, message_text, render
from support.request_log import ReceivedRequest
from support.schema_values import instance

Json = Any

_DATE = re.compile(r"\{http_date([+-]\d+)\}")
_encoder = msgspec.json.Encoder()


def encode(value: Json) -> bytes:
    """Return ``value`` as JSON; lone surrogates and NaN as Python's own encoder writes them."""
    try:
        return _encoder.encode(value)
    except (UnicodeEncodeError, ValueError):
        return json.dumps(value).encode()


def encode_reply(value: Json) -> bytes:
    """Like :func:`encode`, but NaN and infinities stay as words, as lax servers send them."""
    data = encode(value)
    return json.dumps(value).encode() if _has_odd_number(value) else data


def _has_odd_number(value: Json) -> bool:
    if isinstance(value, float):
        return value != value or value in (float("inf"), float("-inf"))
    if isinstance(value, dict):
        return any(map(_has_odd_number, value.values()))
    return isinstance(value, list) and any(map(_has_odd_number, value))


def headers(reply: Reply) -> dict[str, str]:
    """Return the headers of ``reply`` with dates filled in, counted from now."""

    def date(match: re.Match[str]) -> str:
        return formatdate(time.time() + int(match[1]), usegmt=True)

    return {name: _DATE.sub(date, value) for name, value in reply.headers.items()}


def seed(prompt: str) -> int:
    """Return a number that names ``prompt``."""
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def wanted_schema(body: Json, default: Json) -> Json:
    """Return the JSON Schema that the request asks for, else ``default``."""
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") == "json_schema":
        return response_format["json_schema"].get("schema", default)
    structured = body.get("structured_outputs")
    if isinstance(structured, dict) and "json" in structured:
        return structured["json"]
    return default


def answer_text(reply: Reply, body: Json, prompt: str, schema: Json) -> str | None:
    """Return the text of ``reply`` to ``prompt``; None where it has no content.

    Args:
        schema: the JSON Schema that a made-up answer has to fit where the request names none.
    """
    if reply.action == "echo":
        messages = body.get("messages")
        if isinstance(messages, list) and messages and isinstance(messages[0], dict):
            users = [message for message in messages if message.get("role") == "user"]
            return message_text(users[-1]) if users else prompt
        return prompt
    if reply.action in ("canned", "fits"):
        wanted = wanted_schema(body, schema if reply.action == "fits" else None)
        if wanted is not None:
            return msgspec.json.encode(instance(wanted, seed(prompt))).decode()
        return f"answer {seed(prompt):016x}"
    return reply.text


def usage(replies: Sequence[Reply], prompts: Sequence[str], texts: Sequence[str | None]) -> Json:
    """Return the ``usage`` of a call; the first reply decides, ``auto`` counts words."""
    given = replies[0].usage
    if given != AUTO:
        return given
    prompt = sum(len(text.split()) for text in prompts)
    completion = sum(len((text or "").split()) for text in texts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def response(
    kind: str, seen: ReceivedRequest, replies: Sequence[Reply], schema: Json, model: str
) -> Json:
    """Return the body of a good answer that is not streamed.

    Args:
        kind: ``chat``, ``batch`` or ``completions``.
        replies: one per prompt, each of them good.
        schema: see :func:`answer_text`.
        model: the name to answer where the reply has none.
    """
    body = seen.body
    count = body.get("n") or 1
    choices, texts = [], []
    for reply, prompt in zip(replies, seen.prompts, strict=True):
        text = answer_text(reply, body, prompt, schema)
        for sample in range(count):
            if reply.texts is not None:
                text = reply.texts[sample % len(reply.texts)]
            texts.append(text)
            choices.append(_choice(kind, len(choices), reply, text))
    result = {
        "id": f"{'cmpl' if kind == 'completions' else 'chatcmpl'}-{seen.number}",
        "object": "text_completion" if kind == "completions" else "chat.completion",
        "created": 1_700_000_000,
        "model": replies[0].model or body.get("model") or model,
        "choices": choices,
    }
    counts = usage(replies, seen.prompts, texts)
    if counts != ABSENT:
        result["usage"] = counts
    for reply in replies:
        result.update(reply.extra)
    return result


def _choice(kind: str, index: int, reply: Reply, text: str | None) -> dict[str, Json]:
    choice: dict[str, Json] = {"index": index, "finish_reason": reply.finish_reason}
    if kind == "completions":
        choice["text"] = text
    else:
        choice["message"] = {"role": "assistant", "content": text, **reply.message}
    if reply.logprobs is not None:
        choice["logprobs"] = reply.logprobs
    return choice


def add_token_ids(kind: str, answer: Json, seen: ReceivedRequest) -> None:
    """Add the token ids of answers, and of prompts where vLLM has a place for them."""
    count = seen.body.get("n") or 1
    for place, choice in enumerate(answer["choices"]):
        text = choice["text"] if kind == "completions" else choice["message"]["content"]
        choice["token_ids"] = encode_tokens(text or "")
        if kind == "completions":
            choice["prompt_token_ids"] = encode_tokens(seen.prompts[place // count])
    if kind == "chat":
        answer["prompt_token_ids"] = encode_tokens(render(seen.body["messages"]))


def streamed(kind: str, whole: Json, body: Json) -> list[Json]:
    """Return a good answer as the chunks of a stream, one word of text each.

    Args:
        whole: the answer as :func:`response` makes it.
        body: the request, for ``stream_options.include_usage``.
    """
    chunks: list[Json] = []
    head = {key: whole[key] for key in ("id", "created", "model")}
    head["object"] = "text_completion" if kind == "completions" else "chat.completion.chunk"
    for choice in whole["choices"]:
        index, reason = choice["index"], choice["finish_reason"]
        if kind == "completions":
            pieces: list[Json] = [{"text": piece} for piece in _pieces(choice["text"])]
            last: Json = {"text": ""}
        else:
            pieces = [{"delta": piece} for piece in _deltas(choice["message"])]
            last = {"delta": {}}
        for piece in pieces:
            chunks.append({**head, "choices": [{"index": index, **piece, "finish_reason": None}]})
        chunks.append({**head, "choices": [{"index": index, **last, "finish_reason": reason}]})
    if (body.get("stream_options") or {}).get("include_usage") and "usage" in whole:
        chunks.append({**head, "choices": [], "usage": whole["usage"]})
    return chunks


def _pieces(text: str | None) -> list[str]:
    return re.findall(r"\s*\S+|\s+", text) if text else []


def _deltas(message: dict[str, Json]) -> list[Json]:
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning", "reasoning_content", "content", "refusal"):
        deltas += [{name: piece} for piece in _pieces(message.get(name))]
    for index, call in enumerate(message.get("tool_calls") or []):
        function = {"name": call["function"]["name"], "arguments": ""}
        entry = {"index": index, "id": call["id"], "type": "function", "function": function}
        deltas.append({"tool_calls": [entry]})
        for piece in _pieces(call["function"]["arguments"]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    return deltas


def embeddings(seen: ReceivedRequest, model: str) -> Json:
    """Return the body of an answer to ``/v1/embeddings``: eight numbers per text."""
    data = []
    for index, prompt in enumerate(seen.prompts):
        digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()
        vector = [byte / 255 for byte in digest[:8]]
        data.append({"object": "embedding", "index": index, "embedding": vector})
    counts = {"prompt_tokens": sum(len(p.split()) for p in seen.prompts)}
    counts["total_tokens"] = counts["prompt_tokens"]
    return {"object": "list", "data": data, "model": model, "usage": counts}


def sse(chunk: Json) -> bytes:
    """Return ``chunk`` as the bytes of a stream: a dict as an event, text and bytes as they are."""
    if isinstance(chunk, bytes):
        return chunk
    if isinstance(chunk, str):
        return chunk.encode("utf-8", "surrogatepass")
    return b"data: " + encode_reply(chunk) + b"\n\n"
