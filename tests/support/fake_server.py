"""A small scripted LLM server on 127.0.0.1, in a thread of the test.

::

    with FakeServer({"r1": [status(503), ok("yes")], "*": [echo()]}) as fs:
        ...  # send requests to fs.url
        assert fs.count("r1") == 2
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from support.http_servers import in_thread, refusing_port
from support.replies import Script
from support.server_handler import Options, ScriptServer
from support.server_requests import ReceivedRequest


class FakeServer:
    """The scripted server in a thread with its own event loop.

    Args:
        script: row id, or ``*`` for every other row -> replies, the last one repeating;
            default: an answer made from the prompt's hash for every row.
        ssl_context: serve HTTPS.
        allow_faults: do not mind requests that a strict server would refuse.
        options: the fields of :class:`support.server_handler.Options`.

    Attributes:
        server: the handler: ``server.edit`` and ``server.check`` may be set.
        faults: what the client did wrong so far.

    Leaving the ``with`` block well fails the test where the client sent a malformed request or
    a row that the script does not know, unless ``allow_faults``.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        ssl_context: ssl.SSLContext | None = None,
        allow_faults: bool = False,
        **options: Any,
    ) -> None:
        self.server = ScriptServer(script, msgspec.convert(options, Options))
        self.faults = self.server.ledger.faults
        self._ssl = ssl_context
        self.scheme = "https" if ssl_context else "http"
        self._allow_faults = allow_faults
        self.port = 0
        self._port_held = ExitStack()
        self._listening = ExitStack()

    @property
    def address(self) -> str:
        """``127.0.0.1:PORT``, a hostfile line."""
        return f"127.0.0.1:{self.port}"

    @property
    def base(self) -> str:
        """The URL without a path."""
        return f"{self.scheme}://{self.address}"

    @property
    def url(self) -> str:
        """The base URL of an OpenAI-compatible API."""
        return f"{self.base}/v1"

    @property
    def requests(self) -> list[ReceivedRequest]:
        """The requests for answers so far, in the order of arrival."""
        return list(self.server.ledger.requests)

    @property
    def probes(self) -> list[ReceivedRequest]:
        """Every other request so far: models, health, metrics, tokens, unknown paths."""
        return list(self.server.ledger.probes)

    @property
    def peak_in_flight(self) -> int:
        """How many requests for answers were in flight at once, at most."""
        return self.server.ledger.peak

    @property
    def connections(self) -> int:
        """How many connections have carried a request."""
        return len(self.server.connections)

    def count(self, row_id: str) -> int:
        """Return how many requests carried the row."""
        return self.server.ledger.counts[row_id]

    def of(self, row_id: str) -> list[ReceivedRequest]:
        """Return the requests that carried the row, in the order of arrival."""
        return [seen for seen in self.requests if row_id in seen.rows]

    def wait_for(self, count: int, what: str = "received", timeout: float = 20.0) -> None:
        """Block until ``count`` requests are ``received``, ``finished`` or ``in_flight``."""
        self.wait_until(lambda: getattr(self.server.ledger, what) >= count, timeout)

    def wait_until(self, done: Callable[[], bool], timeout: float = 20.0) -> None:
        """Block until ``done``, which looks at requests, is true.

        Raises:
            AssertionError: it took longer than ``timeout`` seconds.
        """
        changed = self.server.ledger.changed
        with changed:
            assert changed.wait_for(done, timeout), [seen.rows for seen in self.requests]

    def release(self, gate: str = "gate") -> None:
        """Let go the replies that ``gated(reply, gate)`` holds back."""
        self._call(self.server.release, gate)

    def set_script(self, script: Script) -> None:
        """Use another script from now on."""
        self._call(self.server.set_script, script)

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        async def call() -> None:
            function(argument)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)

    def start(self) -> Self:
        """Listen, on the port of the last time if there was one."""
        self.port = self._port_held.enter_context(refusing_port(self.port))
        self.restart()
        return self

    def stop(self) -> None:
        """Refuse connections and close every one; what was seen stays readable."""
        self._listening.close()

    def restart(self) -> None:
        """Listen again on the same port; counts and script go on."""
        self._loop = self._listening.enter_context(in_thread(self._listen()))

    @asynccontextmanager
    async def _listen(self) -> AsyncIterator[asyncio.AbstractEventLoop]:
        self.server.reopen()
        server = web.Server(self.server.handle, handler_cancellation=True, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=0.2)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", self.port, backlog=4096, ssl_context=self._ssl)
            await site.start()
            yield asyncio.get_running_loop()
        finally:
            self.server.shut()
            await runner.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._port_held.close()
        if kind is None and not self._allow_faults:
            assert not self.faults, self.faults
