"""Simulated endpoints: each has so many slots, and an answer takes one of them for a given time.

    python benchmarks/timed_server.py --port-file F --endpoints 4 --slots 32 --seconds a=0.3,b=0.1

Nothing is computed: a request waits for a slot, holds it for the seconds of its model, and is
answered with a canned sentence. What a fleet of such endpoints can do is known exactly: slots over
seconds. One process serves all of them; it takes about 60 µs a request. ``/held`` tells for how
many seconds the slots of an endpoint were held: more than was asked for where this process itself
had to wait for a processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httptools
import uvloop

WORDS = "The ledger of the harbour lists nine ships, two of them late, and one without a name."
MODEL = re.compile(rb'"model":\s*"([^"]+)"')


class Endpoint:
    """``slots`` requests at once, the others in the order in which they came."""

    def __init__(self, slots: int, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.held = 0.0
        self._free = slots
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def ask(self, seconds: float, answer: Callable[[], None]) -> None:
        """Call ``answer`` after a slot was held for so long."""
        self._waiting.append((seconds, answer))
        self._begin()

    def _begin(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            seconds, answer = self._waiting.popleft()
            loop = asyncio.get_running_loop()
            loop.call_later(seconds, self._end, answer, time.monotonic())

    def _end(self, answer: Callable[[], None], began: float) -> None:
        self._free += 1
        self.held += time.monotonic() - began
        answer()
        self._begin()


class Connection(asyncio.Protocol):
    """One kept-open connection to an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

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
            names = [{"id": name, "max_model_len": 32768} for name in self._endpoint.seconds]
            self.reply(json.dumps({"data": names}).encode())
        elif self.url == b"/held":
            self.reply(json.dumps(self._endpoint.held).encode())
        elif reply := MODEL.search(body):
            model = reply[1].decode()
            answer = partial(self.reply, chat_answer(model))
            self._endpoint.ask(self._endpoint.seconds[model], answer)
        else:
            self.reply(b"{}", b"404 Not Found")

    def reply(self, body: bytes, status: bytes = b"200 OK") -> None:
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (status, len(body), body)
            )


def chat_answer(model: str) -> bytes:
    """The body of the canned chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": WORDS},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 120, "completion_tokens": 22, "total_tokens": 142}
    reply = {"id": "0", "object": "chat.completion", "model": model, "choices": [choice]}
    return json.dumps(reply | {"usage": usage}).encode()


async def serve(options: argparse.Namespace) -> None:
    """Serve until killed; the ports are written to the port file, one a line."""
    pairs = (pair.partition("=") for pair in options.seconds.split(","))
    seconds = {name: float(number) for name, _, number in pairs}
    loop, ports = asyncio.get_running_loop(), []
    for _ in range(options.endpoints):
        endpoint = Endpoint(options.slots, seconds)
        server = await loop.create_server(partial(Connection, endpoint), "127.0.0.1", 0)
        ports.append(str(server.sockets[0].getsockname()[1]))
    temporary = options.port_file.with_suffix(".tmp")
    temporary.write_text("\n".join(ports))
    temporary.rename(options.port_file)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--endpoints", type=int, default=4)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--seconds", default="one=0.3")
    uvloop.run(serve(parser.parse_args()))
