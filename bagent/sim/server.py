"""The HTTP server of simulated endpoints: the routes of a vLLM server over one engine each."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from aiohttp import web

from bagent import __version__
from bagent.errors import UsageError
from bagent.sim import requests as protocol
from bagent.sim import tokens
from bagent.sim.config import EngineConfig, FaultConfig, Faults, InjectedFault, SimConfig
from bagent.sim.driver import Driver, GenerationCall, PendingCall, RequestParser
from bagent.sim.engine import SimEngine, SimRequest
from bagent.sim.metrics import render_metrics
from bagent.sim.other_protocols import (
    Messages,
    Protocol,
    Responses,
    messages_to_chat,
    responses_to_chat,
)
from bagent.sim.replies import ChunkWriter, ReplyHead, ReplySample, encode, reply_body
from bagent.sim.requests import ApiError
from bagent.sim.text import seeded, unit_vector

VERSION = "0.33.0+bagent.sim"
"""The simulated vLLM release for ``/version``."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_JSON = {"Content-Type": "application/json"}
_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_BROKEN_EVENT = b'data: {"id": "broken", "choices": [{"ind\n\n'


def scaled_engine(config: SimConfig, faults: FaultConfig) -> EngineConfig:
    """Return the engine's config at the speed that ``speedup`` and ``slow`` give."""
    factor = config.speedup / faults.slow
    engine = config.engine
    return replace(engine, prefill=engine.prefill * factor, decode=engine.decode * factor)


class Replica:
    """One endpoint; needs a running event loop.

    Args:
        config: the fleet's config.
        number: number in the fleet, from 0.
        die: closes the replica's socket and all connections.
    """

    def __init__(self, config: SimConfig, number: int, die: Callable[[], None]) -> None:
        faulty = config.replicas if config.faults.faulty is None else config.faults.faulty
        faults = config.faults if number >= config.replicas - faulty else FaultConfig()
        self.config = config
        self.engine = SimEngine(scaled_engine(config, faults))
        self.faults = Faults(faults, config.seed, number)
        self.driver = Driver(self.engine)
        self._die = die
        self._ids = itertools.count()
        self._name = f"sim{number}"
        self._parser = RequestParser(config, self._new_id)
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._ok,
            ("GET", "/ping"): self._ok,
            ("GET", "/version"): self._version,
            ("GET", "/openapi.json"): self._openapi,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/chat/completions/batch"): self._chat_batch,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/responses"): self._responses,
            ("POST", "/v1/messages"): self._messages,
            ("POST", "/v1/embeddings"): self._embeddings,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
        }
        self._paths = {path for _, path in self._routes}

    def _new_id(self) -> str:
        return f"{self._name}-{next(self._ids):08x}"

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request."""
        path = request.path
        handler = self._routes.get((request.method, path))
        if handler is None:
            status, text = (
                (405, "Method Not Allowed") if path in self._paths else (404, "Not Found")
            )
            return _json({"detail": text}, status)
        key = self.config.api_key
        if (
            key
            and path.startswith("/v1")
            and request.headers.get("Authorization") != f"Bearer {key}"
            and not (path == "/v1/messages" and request.headers.get("x-api-key") == key)
        ):
            return _json({"error": "Unauthorized"}, 401)
        try:
            response = await handler(request)
        except ApiError as error:
            response = web.Response(body=error.body(), status=error.status, headers=_JSON)
        except ConnectionError:  # the client has gone
            response = web.Response()
        return response

    async def _ok(self, _request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    async def _version(self, _request: web.BaseRequest) -> web.StreamResponse:
        return _json({"version": VERSION})

    async def _openapi(self, _request: web.BaseRequest) -> web.StreamResponse:
        paths: dict[str, dict[str, object]] = {}
        for method, path in self._routes:
            paths.setdefault(path, {})[method.lower()] = {"responses": {"200": {"description": ""}}}
        info = {"title": "bagent simulated engine", "version": __version__}
        return _json({"openapi": "3.1.0", "info": info, "paths": paths})

    async def _metrics(self, _request: web.BaseRequest) -> web.StreamResponse:
        text = render_metrics(self.engine, self.config.model, self.faults.counts)
        return web.Response(text=text, content_type="text/plain")

    async def _models(self, _request: web.BaseRequest) -> web.StreamResponse:
        model = {
            "id": self.config.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "bagent-sim",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self.config.engine.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, self._parser.chat)

    async def _chat_batch(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, self._parser.chat_batch)

    async def _completions(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, self._parser.completion)

    async def _responses(self, request: web.BaseRequest) -> web.StreamResponse:
        def read(body: bytes, name: str | None) -> GenerationCall:
            return self._parser.chat(responses_to_chat(body), name)

        return await self._generate(request, read, Responses)

    async def _messages(self, request: web.BaseRequest) -> web.StreamResponse:
        def read(body: bytes, name: str | None) -> GenerationCall:
            return self._parser.chat(messages_to_chat(body), name)

        return await self._generate(request, read, Messages)

    async def _generate(
        self,
        request: web.BaseRequest,
        read: Callable[[bytes, str | None], GenerationCall],
        make_protocol: Callable[[ReplyHead, ReplySample], Protocol] | None = None,
    ) -> web.StreamResponse:
        fault = self.faults.next()
        body = await request.content.read()
        if fault.dead:
            return self._dead(request)
        if fault.limited:
            return self._limited()
        call = read(body, request.headers.get("X-Request-Id"))
        if fault.stall:
            self.faults.count("stall")
            await asyncio.sleep(self.faults.config.stall / self.config.speedup)
        self._check_queue(len(call.samples))
        pending = PendingCall(stream=call.stream)
        try:
            self.driver.start(pending, call.engine_requests(pending))
            for sample, sequence in zip(call.samples, pending.sequences, strict=True):
                sample.sequence = sequence
            reply = make_protocol(call.head, call.samples[0]) if make_protocol is not None else None
            if call.stream:
                return await self._stream(request, call, pending, fault, reply)
            await pending.wait()
        finally:
            if pending.remaining:
                self.driver.drop(pending)
        return await self._reply(request, call, fault, reply)

    def _dead(self, request: web.BaseRequest) -> web.StreamResponse:
        self.faults.count("dead")
        if request.transport is not None:
            request.transport.abort()
        self._die()
        return web.Response(status=503)

    def _limited(self) -> web.StreamResponse:
        self.faults.count("rate_429")
        wait = self.faults.config.retry_after
        headers: dict[str, str] = dict(_JSON)
        if wait is not None:
            headers["Retry-After"] = f"{wait:g}"
        error = ApiError(429, "Simulated rate limit: try again later.", "rate_limit_exceeded")
        return web.Response(body=error.body(), status=429, headers=headers)

    def _check_queue(self, count: int) -> None:
        """Refuse with 503 when too many wait, as vLLM with ``--max-num-queued-reqs``."""
        limit = self.faults.config.max_queue
        room = max(0, self.config.engine.max_num_seqs - self.engine.running)
        if limit is not None and self.engine.waiting + max(0, count - room) > limit:
            self.faults.count("overload")
            self.engine.stats.rejected += count
            message = "The engine is currently busy: its queue is full. Try again later."
            raise ApiError(503, message, "Service Unavailable")

    async def _reply(
        self,
        request: web.BaseRequest,
        call: GenerationCall,
        fault: InjectedFault,
        reply: Protocol | None,
    ) -> web.StreamResponse:
        disorder = fault.disorder and len(call.samples) > 1
        if disorder:
            self.faults.count("disorder")
        if reply is not None:
            body = encode(reply.body())
        else:
            body = reply_body(call.head, call.samples, call.prompts, disorder=disorder)
        if fault.cut:
            return await self._cut_body(request, body)
        if fault.malformed:
            self.faults.count("malformed")
            body = body[: len(body) // 2]
        return web.Response(body=body, headers=_headers(request))

    async def _cut_body(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        self.faults.count("cut")
        response = web.StreamResponse(headers={**_JSON, "Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        _close_connection(request)
        return response

    async def _stream(
        self,
        request: web.BaseRequest,
        call: GenerationCall,
        pending: PendingCall,
        fault: InjectedFault,
        reply: Protocol | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**_headers(request), **_STREAM})
        await response.prepare(request)
        writer = reply or ChunkWriter(
            call.head, call.samples, call.prompts, continuous=call.continuous
        )
        samples = {sample.sequence: sample for sample in call.samples}
        malformed = fault.malformed
        await response.write(b"".join(writer.opening()))
        while not pending.done:
            chunks: list[bytes] = []
            reached_half = False
            for sequence in await pending.wait():
                sample = samples[sequence]
                upto = self.engine.generated(sequence)
                half = tokens.count(sample.answer.packed) // 2
                reached_half = reached_half or upto >= half
                chunks.append(writer.tokens_until(sample, min(upto, half) if fault.cut else upto))
            if reached_half and fault.cut:
                self.faults.count("cut")
                await response.write(b"".join(chunks) + _BROKEN_EVENT[:12])
                _close_connection(request)
                return response
            if reached_half and malformed:
                malformed = False
                self.faults.count("malformed")
                # Before the tokens: in one step they may be the whole answer, which a client keeps.
                chunks.insert(0, _BROKEN_EVENT)
            await response.write(b"".join(chunks))
        await response.write(writer.closing(usage=call.include_usage))
        await response.write_eof()
        return response

    async def _embeddings(self, request: web.BaseRequest) -> web.StreamResponse:
        parameters = protocol.decode_request(
            await request.content.read(), protocol.EmbeddingRequest
        )
        protocol.check_model(parameters.model, self.config.model)
        prompts = protocol.pack_prompts(parameters.input, "input")
        size = parameters.dimensions or self.config.answers.embedding_size
        if size < 1 or parameters.encoding_format not in ("float", "base64"):
            raise ApiError(400, "dimensions must be positive, encoding_format float or base64.")
        for prompt in prompts:
            if tokens.count(prompt) > self.config.engine.max_model_len:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {self.config.engine.max_model_len} "
                    f"tokens. However, you requested {tokens.count(prompt)} tokens in the input "
                    "for embedding generation. Please reduce the length of the input.",
                )
        pending = PendingCall(stream=False)
        try:
            requests = [SimRequest(tokens.count(p), 0, tag=pending) for p in prompts]
            self.driver.start(pending, requests)
            await pending.wait()
        finally:
            if pending.remaining:
                self.driver.drop(pending)
        vectors = [unit_vector(seeded(p, self.config.seed, "embedding"), size) for p in prompts]
        encoding = parameters.encoding_format
        data = [
            {"index": i, "object": "embedding", "embedding": _encoded(vector, encoding)}
            for i, vector in enumerate(vectors)
        ]
        used = sum(tokens.count(prompt) for prompt in prompts)
        usage = {"prompt_tokens": used, "total_tokens": used, "completion_tokens": 0}
        return _json(
            {
                "id": f"embd-{self._new_id()}",
                "object": "list",
                "created": int(time.time()),
                "model": self.config.model,
                "data": data,
                "usage": usage,
            }
        )

    async def _tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        parameters = protocol.decode_request(await request.content.read(), protocol.TokenizeRequest)
        protocol.check_model(parameters.model, self.config.model)
        if (parameters.prompt is None) == (parameters.messages is None):
            raise ApiError(400, "Either prompt or messages must be given.")
        text = parameters.prompt
        if text is None:
            text = protocol.render_chat(parameters, parameters.messages)
        packed = tokens.pack(text)
        return _json(
            {
                "count": tokens.count(packed),
                "max_model_len": self.config.engine.max_model_len,
                "tokens": tokens.ids_of(packed),
                "token_strs": tokens.token_texts(packed) if parameters.return_token_strs else None,
            }
        )

    async def _detokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        parameters = protocol.decode_request(
            await request.content.read(), protocol.DetokenizeRequest
        )
        protocol.check_model(parameters.model, self.config.model)
        try:
            return _json({"prompt": tokens.text_of(tokens.pack_ids(parameters.tokens))})
        except ValueError as error:
            raise ApiError(400, str(error), param="tokens") from None


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(body), status=status, headers=_JSON)


def _headers(request: web.BaseRequest) -> dict[str, str]:
    """Return JSON headers with the client's request id."""
    name = request.headers.get("X-Request-Id")
    return {**_JSON, "X-Request-Id": name} if name else _JSON


def _close_connection(request: web.BaseRequest) -> None:
    """Send what is written, then close the connection without an end mark."""
    if request.transport is not None:
        request.transport.close()


def _encoded(vector: list[float], form: str) -> list[float] | str:
    if form == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


_BACKLOG = 4096
"""Connections that may wait to be accepted; a load test opens thousands at once."""

_GRACE = 0.1
"""Seconds for requests in flight when the fleet is closed."""


class _Listener:
    """One replica with its HTTP server and socket."""

    def __init__(self, config: SimConfig, number: int) -> None:
        self.replica = Replica(config, number, self.die)
        self._http = web.Server(
            self.replica.handle,
            handler_cancellation=True,
            keepalive_timeout=config.keep_alive,
            access_log=None,
        )
        self._socket: asyncio.Server | None = None
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._socket = await loop.create_server(self._http, host, port, backlog=_BACKLOG)
        self.port = self._socket.sockets[0].getsockname()[1]

    def die(self) -> None:
        """Close the socket and abort every connection."""
        if self._socket is not None:
            self._socket.close()
        self.replica.driver.close()
        for connection in list(self._http.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def close(self) -> None:
        self.replica.driver.close()
        if self._socket is not None:
            self._socket.close()
        self._http.pre_shutdown()
        await self._http.shutdown(_GRACE)
        if self._socket is not None:
            await self._socket.wait_closed()


class RunningSim:
    """A fleet of simulated endpoints on this event loop; use it with ``async with``.

    Attributes:
        config: its settings.
        urls: base addresses (``http://host:port``), one for each replica, once started.
        replicas: the endpoints, with their ``engine`` and ``faults``, once started.
    """

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.urls: tuple[str, ...] = ()
        self.replicas: tuple[Replica, ...] = ()
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> RunningSim:
        """Open the sockets.

        Raises:
            UsageError: an address or a port cannot be had.
        """
        listeners: list[_Listener] = []
        try:
            for number in range(self.config.replicas):
                listener = _Listener(self.config, number)
                self._exits.push_async_callback(listener.close)
                port = self.config.port + number if self.config.port else 0
                await listener.open(self.config.host, port)
                listeners.append(listener)
        except OSError as error:
            await self._exits.aclose()
            where = f"{self.config.host}:{port}"
            raise UsageError(
                f"cannot listen on {where}: {error.strerror or error}",
                hint="choose another --port, or 0 for a free one",
            ) from None
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        self.urls = tuple(f"http://{host}:{listener.port}" for listener in listeners)
        self.replicas = tuple(listener.replica for listener in listeners)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the sockets and all connections."""
        await self._exits.aclose()


def start_sim(config: SimConfig) -> RunningSim:
    """Return simulated endpoints, which run during an ``async with``.

    ::

        async with start_sim(parse_sim_url("sim://?replicas=2")) as sim:
            print(sim.urls)
    """
    return RunningSim(config)
