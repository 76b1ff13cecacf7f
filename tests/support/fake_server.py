"""A small scripted LLM server on 127.0.0.1, in a thread of the test.

::

    with FakeServer({"r1": [status(503), ok("yes")], "*": [echo()]}) as fs:
        ...  # send requests to fs.url
        assert fs.count("r1") == 2
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from support.http_servers import refusing_port
from support.replies import Script
from support.request_log import ReceivedRequest
from support.server_handler import ScriptServer
from support.server_options import Options

Json = Any


class FakeServer:
    """The scripted server in a thread with its own event loop.

    Args:
        script: row id, or ``*`` for every other row -> replies, the last one repeating;
            default: an answer made from the prompt's hash for every row.
        ssl_context: serve HTTPS.
        allow_faults: do not mind requests that a strict server would refuse.
        options: the fields of :class:`support.server_options.Options`.

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
        self._script = script
        self._options = msgspec.convert(options, Options)
        self._ssl = ssl_context
        self.scheme = "https" if ssl_context else "http"
        self._allow_faults = allow_faults
        self.port = 0
        self._up: Listening | None = None
        self._held = ExitStack()

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
    def server(self) -> ScriptServer:
        """The handler: ``server.edit`` and ``server.check`` may be set."""
        assert self._up is not None, "the server is not started"
        return self._up.server

    @property
    def requests(self) -> list[ReceivedRequest]:
        """The requests for answers so far, in the order of arrival."""
        return list(self.server.ledger.requests)

    @property
    def probes(self) -> list[ReceivedRequest]:
        """Every other request so far: models, health, metrics, tokens, unknown paths."""
        return list(self.server.ledger.probes)

    @property
    def faults(self) -> list[str]:
        """What the client did wrong so far."""
        return self.server.ledger.faults

    @property
    def peak_in_flight(self) -> int:
        """How many requests for answers were in flight at once, at most."""
        return self.server.ledger.peak

    @property
    def connections(self) -> int:
        """How many connections have carried a request."""
        return self.server.connections

    def count(self, row_id: str) -> int:
        """Return how many requests carried the row."""
        return self.server.ledger.counts[row_id]

    def of(self, row_id: str) -> list[ReceivedRequest]:
        """Return the requests that carried the row, in the order of arrival."""
        return [seen for seen in self.requests if row_id in seen.rows]

    def wait_for(self, count: int, what: str = "received", timeout: float = 20.0) -> None:
        """Block until ``count`` requests are ``received``, ``finished`` or ``in_flight``.

        Raises:
            AssertionError: it took longer than ``timeout`` seconds.
        """
        self.server.ledger.wait_until(count, what, timeout)

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
        self._call(lambda: self.server.release(gate))

    def set_script(self, script: Script) -> None:
        """Use another script from now on."""
        self._call(lambda: self.server.set_script(script))

    def start(self) -> Self:
        """Listen, on the port of the last time if there was one."""
        self.port = self._held.enter_context(refusing_port(self.port))
        self._up = Listening(self._script, self._options, self.port, self._ssl)
        return self

    def stop(self) -> None:
        """Refuse connections and close every one; what was seen stays readable."""
        assert self._up is not None
        self._up.close()

    def restart(self) -> None:
        """Listen again on the same port; counts and script go on."""
        assert self._up is not None
        self._up = Listening(None, self._options, self.port, self._ssl, self._up.server)

    def _call(self, function: Callable[[], None]) -> None:
        assert self._up is not None
        self._up.call(function)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._held.close()
        if kind is None and not self._allow_faults:
            assert not self.faults, self.faults


class Listening:
    """A thread with an event loop that serves until :meth:`close`."""

    def __init__(
        self,
        script: Script | None,
        options: Options,
        port: int,
        ssl_context: ssl.SSLContext | None,
        server: ScriptServer | None = None,
    ) -> None:
        self.port = port
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.server = server or ScriptServer(script, options)
        self.server.reopen()
        self._serve = serve(self.server, port, self._up, self._stop, ssl_context)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fake-server", daemon=True)
        self._thread.start()
        if not self._ready.wait(10) or self._error is not None:
            raise RuntimeError("the fake server did not start") from self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except OSError as error:
            self._error = error
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._serve

    def _up(self, port: int) -> None:
        self.port = port
        self._ready.set()

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the server's loop and wait for its end."""
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10)

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            assert not self._thread.is_alive()


async def serve(
    server: ScriptServer,
    port: int,
    up: Callable[[int], None],
    stop: asyncio.Event,
    ssl_context: ssl.SSLContext | None = None,
) -> None:
    """Serve on 127.0.0.1 until ``stop`` is set.

    Args:
        port: 0 takes a free one.
        up: called with the port once connections are accepted.
    """
    web_server = web.Server(
        server.handle,
        handler_cancellation=True,
        access_log=None,
    )
    runner = web.ServerRunner(web_server, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=4096, ssl_context=ssl_context)
    try:
        await site.start()
        up(runner.addresses[0][1])
        await stop.wait()
    finally:
        server.shut()
        await runner.cleanup()
