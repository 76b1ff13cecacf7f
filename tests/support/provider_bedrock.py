"""Bedrock's Converse as a server speaks it; see :mod:`support.provider_protocols`."""

from __future__ import annotations

import json
import struct
import zlib
from typing import ClassVar

from support.provider_protocols import (
    SECRET,
    STOP_WORDS,
    Json,
    ModelAnswer,
    Wire,
    pieces,
    results_complaint,
)

_BEDROCK_STOP = {**STOP_WORDS, "refusal": "content_filtered"}


class BedrockWire(Wire):
    """Converse and ConverseStream; streams have the frames of Amazon's event streams."""

    content_type = "application/vnd.amazon.eventstream"
    BAD = "ValidationException"
    ERRORS: ClassVar = {
        "throttled": (429, "ThrottlingException", "Too many requests, please wait."),
        "overloaded": (503, "ServiceUnavailableException", "Try your request again."),
        "no_money": (429, "ThrottlingException", "Too many tokens per day, please wait."),
        "bad_key": (403, "ExpiredTokenException", f"The token {SECRET} is expired."),
        "too_long": (400, BAD, "Input is too long for requested model."),
    }

    def complaint(self, body: Json) -> str | None:
        """Alternating roles, no blank text, a result for each use of a tool."""
        roles = [message["role"] for message in body["messages"]]
        if roles != [("user", "assistant")[n % 2] for n in range(len(roles))]:
            return f"A conversation must alternate between user and assistant roles, got {roles}"
        for message in body["messages"]:
            if any("text" in block and not block["text"].strip() for block in message["content"]):
                return "The text field in the ContentBlock object is blank."
        flat = [
            {"role": message["role"], "content": [self._named(b) for b in message["content"]]}
            for message in body["messages"]
        ]
        return results_complaint(flat, "toolUse", "toolResult", "toolUseId", "toolUseId")

    @staticmethod
    def _named(block: Json) -> Json:
        (kind,) = block
        return {"type": kind, **block[kind]} if isinstance(block[kind], dict) else {"type": kind}

    def streamed(self, path: str, body: Json) -> bool:
        """By the path."""
        return path.endswith("/converse-stream")

    def whole(self, say: ModelAnswer) -> Json:
        """The answer of Converse."""
        return {
            "output": {"message": {"role": "assistant", "content": self._blocks(say)}},
            "stopReason": _BEDROCK_STOP.get(say.stop, say.stop),
            "usage": self._usage(say),
            "metrics": {"latencyMs": 5},
        }

    def events(self, say: ModelAnswer) -> list[bytes]:
        """The events of ConverseStream, framed."""
        events: list[tuple[str, Json]] = [("messageStart", {"role": "assistant"})]
        for index, block in enumerate(self._blocks(say)):
            if "toolUse" in block:
                used = dict(block["toolUse"])
                text = json.dumps(used.pop("input"))
                begin = {"contentBlockIndex": index, "start": {"toolUse": used}}
                events.append(("contentBlockStart", begin))
                deltas: list[Json] = [{"toolUse": {"input": p}} for p in (text[:3], text[3:])]
            elif "reasoningContent" in block:
                told = block["reasoningContent"]["reasoningText"]
                deltas = [{"reasoningContent": {key: told[key]}} for key in ("text", "signature")]
            else:
                deltas = [{"text": piece} for piece in pieces(block["text"])]
            events += [
                ("contentBlockDelta", {"contentBlockIndex": index, "delta": delta})
                for delta in deltas
            ]
            events.append(("contentBlockStop", {"contentBlockIndex": index}))
        events.append(("messageStop", {"stopReason": _BEDROCK_STOP.get(say.stop, say.stop)}))
        events.append(("metadata", {"usage": self._usage(say), "metrics": {"latencyMs": 5}}))
        return [event_frame(name, fields) for name, fields in events]

    @staticmethod
    def _blocks(say: ModelAnswer) -> list[Json]:
        blocks: list[Json] = []
        if say.thought:
            told = {"text": say.thought, "signature": "s1g=="}
            blocks.append({"reasoningContent": {"reasoningText": told}})
        if say.text is not None:
            blocks.append({"text": say.text})
        blocks += [
            {"toolUse": {"toolUseId": call_id, "name": name, "input": arguments}}
            for call_id, name, arguments in say.calls
        ]
        return blocks

    @staticmethod
    def _usage(say: ModelAnswer) -> Json:
        return {
            "inputTokens": say.prompt - say.cached - say.written,
            "outputTokens": say.completion,
            "totalTokens": say.prompt + say.completion,
            "cacheReadInputTokens": say.cached,
            "cacheWriteInputTokens": say.written,
        }

    def error(self, kind: str) -> tuple[int, dict[str, str], Json]:
        """Bedrock names an error in a header."""
        status, name, message = self.refusal(kind)
        return status, {"x-amzn-ErrorType": str(name)}, {"message": message}

    def inner_error(self) -> bytes:
        """An exception among the events."""
        name = "serviceUnavailableException"
        heads = {":exception-type": name, ":message-type": "exception"}
        return frame(json.dumps({"message": "Overloaded"}).encode(), heads)


def event_frame(name: str, fields: Json) -> bytes:
    """One event of an Amazon event stream."""
    heads = {":event-type": name, ":message-type": "event", ":content-type": "application/json"}
    return frame(json.dumps(fields).encode(), heads)


def frame(payload: bytes, headers: dict[str, str]) -> bytes:
    """A message of ``application/vnd.amazon.eventstream``: lengths, CRC, headers, payload, CRC."""
    head = b"".join(
        bytes([len(name)])
        + name.encode()
        + b"\x07"
        + struct.pack("!H", len(value))
        + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack("!II", 16 + len(head) + len(payload), len(head))
    body = prelude + struct.pack("!I", zlib.crc32(prelude)) + head + payload
    return body + struct.pack("!I", zlib.crc32(body))
