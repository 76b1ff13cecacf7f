"""Response bodies in OpenAI's forms, made from replies."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from typing import Any

from bagent.sim.schema_values import SchemaSampler
from support.replies import ABSENT, AUTO, Reply
from support.server_requests import ReceivedRequest, encode_tokens, message_text, render

Json = Any


def encode(value: Json) -> bytes:
    """Return ``value`` as JSON: NaN and infinities stay words, lone surrogates are escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def _digest(prompt: str) -> bytes:
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:8]


def wanted_schema(body: Json) -> Json:
    """Return the JSON Schema that the request asks for, else None."""
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") == "json_schema":
        return response_format["json_schema"].get("schema")
    structured = body.get("structured_outputs")
    return structured.get("json") if isinstance(structured, dict) else None


def answer_text(reply: Reply, body: Json, prompt: str) -> str | None:
    """Return the text of ``reply`` to ``prompt``; None where it has no content."""
    if reply.action == "echo":
        messages = body.get("messages")
        if isinstance(messages, list) and messages and isinstance(messages[0], dict):
            users = [message for message in messages if message.get("role") == "user"]
            return message_text(users[-1]) if users else prompt
        return prompt
    if reply.action == "canned":
        schema, digest = wanted_schema(body), _digest(prompt)
        if schema is None:
            return f"answer {digest.hex()}"
        return encode(SchemaSampler(schema).make(random.Random(digest))).decode()
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


def response(kind: str, seen: ReceivedRequest, replies: Sequence[Reply], model: str) -> Json:
    """Return the body of a good answer that is not streamed.

    Args:
        kind: ``chat``, ``batch`` or ``completions``.
        replies: one per prompt, each of them good.
        model: the name to answer where the reply has none.
    """
    body = seen.body
    choices, texts = [], []
    for reply, prompt in zip(replies, seen.prompts, strict=True):
        text = answer_text(reply, body, prompt)
        for _ in range(body.get("n") or 1):
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
    return result if counts == ABSENT else result | {"usage": counts}


def _choice(kind: str, index: int, reply: Reply, text: str | None) -> dict[str, Json]:
    choice: dict[str, Json] = {"index": index, "finish_reason": reply.finish_reason}
    if kind == "completions":
        choice["text"] = text
    else:
        choice["message"] = {"role": "assistant", "content": text, **reply.message}
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
        vector = [byte / 255 for byte in _digest(prompt)]
        data.append({"object": "embedding", "index": index, "embedding": vector})
    counts = {"prompt_tokens": sum(len(p.split()) for p in seen.prompts)}
    counts["total_tokens"] = counts["prompt_tokens"]
    return {"object": "list", "data": data, "model": model, "usage": counts}


def sse(chunk: Json, name: str | None = None) -> bytes:
    """Return ``chunk`` as the bytes of a stream: a dict as an event, text and bytes as they are."""
    if isinstance(chunk, str):
        return chunk.encode("utf-8", "surrogatepass")
    head = f"event: {name}\n".encode() if name else b""
    return chunk if isinstance(chunk, bytes) else head + b"data: " + encode(chunk) + b"\n\n"
