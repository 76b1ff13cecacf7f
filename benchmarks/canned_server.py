"""A fast server of one canned answer: what is measured against it is the client.

    python benchmarks/canned_server.py --port-file F [--chunks N] [--cpu K]

Speaks HTTP/1.1 by httptools on uvloop; takes about 25 µs a request. The answer is a chat completion
whose content is valid for ``SCHEMA`` (five findings); with ``"stream": true`` in the body it comes
as N chunks of server-sent events. ``/v1/completions`` answers a list of prompts with a choice each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path

import httptools
import uvloop

FINDING = {"line": 12, "severity": "low", "message": "a name that says little about its value"}
CONTENT = json.dumps({"verdict": "accept", "findings": [FINDING] * 5})
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["verdict", "findings"],
    "properties": {
        "verdict": {"enum": ["accept", "reject"]},
        "findings": {
            "type": "array",
            "maxItems": 20,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["line", "severity", "message"],
                "properties": {
                    "line": {"type": "integer", "minimum": 1},
                    "severity": {"enum": ["low", "medium", "high"]},
                    "message": {"type": "string", "maxLength": 400},
                },
            },
        },
    },
}
USAGE = {"prompt_tokens": 120, "completion_tokens": 90, "total_tokens": 210}
ID = "chatcmpl-0"


def chat_answer() -> bytes:
    """The body of the canned chat completion."""
    message = {"role": "assistant", "content": CONTENT}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps(
        {
            "id": ID,
            "object": "chat.completion",
            "created": 1,
            "model": "canned",
            "choices": [choice],
            "usage": USAGE,
        }
    ).encode()


def stream_answer(chunks: int) -> list[bytes]:
    """The same answer as server-sent events, its content cut into ``chunks`` pieces."""
    step = max(1, -(-len(CONTENT) // chunks))
    pieces = [CONTENT[i : i + step] for i in range(0, len(CONTENT), step)]
    events = []
    for piece in pieces:
        choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
        events.append({"id": ID, "model": "canned", "choices": [choice]})
    events.append(
        {
            "id": ID,
            "model": "canned",
            "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        }
    )
    events.append({"id": ID, "model": "canned", "choices": [], "usage": USAGE})
    return [b"data: " + json.dumps(e).encode() + b"\n\n" for e in events] + [b"data: [DONE]\n\n"]


class Connection(asyncio.Protocol):
    """One kept-open connection."""

    chat = b""
    events: list[bytes] = []  # noqa: RUF012
    models = json.dumps({"data": [{"id": "canned", "max_model_len": 32768}]}).encode()
    separate_writes = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.body: list[bytes] = []
        self.url = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        body, self.body = b"".join(self.body), []
        if self.url.startswith(b"/v1/models"):
            self.reply(self.models)
        elif self.url.startswith(b"/v1/completions"):
            self.reply(self.lists(json.loads(body)))
        elif b'"stream":true' in body or b'"stream": true' in body:
            self.streaming = asyncio.get_running_loop().create_task(self.stream())
        else:
            self.reply(self.chat)

    def lists(self, body: dict) -> bytes:
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        choices = [
            {"index": i, "text": CONTENT, "finish_reason": "stop"} for i in range(len(prompts))
        ]
        return json.dumps(
            {"id": ID, "model": "canned", "choices": choices, "usage": USAGE}
        ).encode()

    def reply(self, body: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )

    async def stream(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for event in self.events:
            self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            # Each chunk goes out by itself, as from an engine that makes one token after another.
            await asyncio.sleep(0)
        self.transport.write(b"0\r\n\r\n")


async def serve(port_file: Path, chunks: int) -> None:
    """Serve until killed; the port is written to ``port_file``."""
    Connection.chat = chat_answer()
    Connection.events = stream_answer(chunks)
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    temporary = port_file.with_suffix(".tmp")
    temporary.write_text(str(server.sockets[0].getsockname()[1]))
    temporary.rename(port_file)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--cpu", type=int)
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    uvloop.run(serve(options.port_file, options.chunks))
