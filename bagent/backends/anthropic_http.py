"""Anthropic's Messages API as a backend: Anthropic itself, gateways, vLLM's ``/v1/messages``."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

from bagent.backends.anthropic_stream import AnthropicStream
from bagent.backends.anthropic_wire import LEFT_OUT, AnthropicWriter, read_message
from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.failures import from_status
from bagent.backends.forms import Form, Forms
from bagent.backends.http_exchange import HttpExchange, Posted
from bagent.backends.json_text import decode_json
from bagent.backends.openai_http import read_models
from bagent.backends.own_body import unpacked
from bagent.backends.prefix_cache import SharedPrefix
from bagent.backends.request import CallSettings, Request
from bagent.backends.transport import NETWORK_ERRORS, Transport, network_failure
from bagent.types import Failure, Reply

VERSION = "2023-06-01"
"""The version of the API that is spoken: the value of its header ``anthropic-version``."""

MOST_WRITERS = 64


class AnthropicBackend:
    """Speaks ``/messages`` below an endpoint's address, one call a request.

    The endpoint's headers hold the key (``x-api-key``, or what a gateway wants) and the version.

    Args:
        enforce: ``auto`` asks for the schema by ``output_config`` until the endpoint refuses it,
            ``native`` asks always, ``prompt`` never.
        clock: Unix seconds.
        notice: called with a line for people when something is learned or left out.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        enforce: str = "auto",
        clock: Callable[[], float] = time.time,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._transport = transport
        self._http = HttpExchange(transport, clock)
        self._enforce = enforce
        self._clock = clock
        self._notice = notice
        self._forms = Forms(enforce, notice)
        self._writers: dict[tuple[str, Form, int], tuple[CallSettings, AnthropicWriter]] = {}
        self._served: dict[str, str] = {}
        self._told: set[str] = set()

    def group_key(self, request: Request) -> Hashable | None:
        """None: every call goes alone."""
        return None

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """One call a request."""
        return 1

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Nothing is to be found out: calls go alone."""

    def forget(self, endpoint: Endpoint) -> None:
        """Ask the endpoint in the usual form again."""
        self._forms.forget(endpoint)

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send one call and wait for its end; see :class:`bagent.backends.base.Backend`."""
        exchange = Exchange(results=[], sent=self._clock())
        found = await self._send(endpoint, group[0], timeouts, exchange)
        exchange.done = self._clock()
        exchange.results = [found]
        return exchange

    async def _send(
        self, endpoint: Endpoint, asked: Request, timeouts: Timeouts, exchange: Exchange
    ) -> Reply | Failure:
        try:
            request = self._as_chat(asked)
            form = self._forms.of(endpoint, request)
            stream = request.stream and form.stream
            body = self._writer(endpoint, request, form).body(request, stream=stream)
        except ValueError as error:
            return Failure("rejected", f"not sent to {endpoint.name}: {error}")
        reader = None
        if stream:
            on_call = request.watch() if request.watch else None
            reader = AnthropicStream(exchange.sent, self._clock, on_call)
        post = Posted(endpoint, "/messages", body, timeouts)
        found = await self._http.send(post, exchange, read_message, reader)
        if isinstance(found, Failure) and exchange.status is not None:
            exchange.learned = self._forms.learn(endpoint, request, found, form)
        return found

    def _as_chat(self, request: Request) -> Request:
        if request.prompt is not None:
            raise ValueError("the API has no raw prompts, only messages")
        request = unpacked(request)
        for name in LEFT_OUT & request.settings.sampling.keys() - self._told:
            self._told.add(name)
            self._notice(f"Anthropic's API has no {name}: it is left out")
        return request

    def _writer(self, endpoint: Endpoint, request: Request, form: Form) -> AnthropicWriter:
        settings = request.settings
        model = settings.model or endpoint.tags.get("model") or self._served.get(endpoint.name, "")
        if self._enforce == "prompt":
            form = Form(False, form.completion_limit, form.stream, form.without)
        key = (model, form, id(settings))
        found = self._writers.get(key)
        if found is None:
            if len(self._writers) >= MOST_WRITERS:
                self._writers.clear()
            # The settings are kept with it, so that their id stays theirs.
            found = settings, AnthropicWriter(model, form, SharedPrefix())
            self._writers[key] = found
        return found[1]

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """GET ``/models``. Of a list of several models none is the endpoint's own: the job has to
        choose. A missing route is no failure."""
        try:
            status, raw, headers = await self._transport.get(
                endpoint, f"{endpoint.url}/models", seconds
            )
        except NETWORK_ERRORS as error:
            return network_failure(error, endpoint, Timeouts(connect=seconds, total=seconds))
        if status in (404, 405, 501):
            return Capabilities(models_route=False)
        if status != 200:
            return from_status(status, raw.decode("utf-8", "replace"), headers)
        try:
            found = read_models(decode_json(raw))
        except ValueError:
            return Capabilities(models_route=False)
        if len(found.models) == 1:
            self._served[endpoint.name] = found.models[0]
            return found
        return Capabilities(engine=found.engine, models_route=True)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()
