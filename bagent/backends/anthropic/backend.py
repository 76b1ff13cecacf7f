"""Backend for Anthropic's Messages API: Anthropic itself, gateways, vLLM's ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Callable

from bagent.backends.anthropic.wire import (
    IGNORED_SAMPLING,
    AnthropicStream,
    AnthropicWriter,
    read_message,
)
from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.http.request import HttpExchange, HttpRequest
from bagent.backends.openai.models import fetch_models
from bagent.backends.openai.raw_request import ChatRequests
from bagent.backends.prefix_cache import SharedPrefix
from bagent.backends.profile import Form
from bagent.backends.request import CallSettings, Request
from bagent.backends.wrappers import SingleRequestBackend
from bagent.clocks import unix
from bagent.types import Failure, Reply

VERSION = "2023-06-01"
"""Value of the header ``anthropic-version``."""

MAX_WRITERS = 64


class AnthropicBackend(SingleRequestBackend):
    """Sends one call per request to ``/messages``.

    The endpoint's headers hold the key (``x-api-key``, or what a gateway requires) and the version.

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
        clock: Callable[[], float] = unix,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(enforce, clock, notice)
        self._transport = transport
        self._http = HttpExchange(transport, self._profiles, clock)
        self._chats = ChatRequests("Anthropic's API", IGNORED_SAMPLING, notice)
        self._writers: dict[tuple[str, Form, int], tuple[CallSettings, AnthropicWriter]] = {}

    async def _send(
        self, endpoint: Endpoint, request: Request, timeouts: Timeouts, exchange: Exchange
    ) -> Reply | Failure:
        try:
            chat = self._chats.unpack(request)
            form = self._forms.of(endpoint, chat)
            stream = chat.stream and form.stream
            body = self._writer(endpoint, chat, form).body(chat, stream=stream)
        except ValueError as error:
            return Failure("rejected", f"not sent to {endpoint.name}: {error}")
        reader = None
        if stream:
            on_call = chat.watch() if chat.watch else None
            reader = AnthropicStream(exchange.sent, self._clock, on_call)
        http_request = HttpRequest(endpoint, "/messages", body, timeouts, chat.began)
        result = await self._http.send(http_request, exchange, read_message, reader)
        if isinstance(result, Failure) and exchange.status is not None:
            exchange.learned = self._forms.learn(endpoint, chat, result, form)
        return result

    def _writer(self, endpoint: Endpoint, request: Request, form: Form) -> AnthropicWriter:
        settings = request.settings
        model = settings.model or endpoint.tags.get("model") or self._profiles.of(endpoint).model
        key = (model, form, id(settings))
        cached = self._writers.get(key)
        if cached is None:
            if len(self._writers) >= MAX_WRITERS:
                self._writers.clear()
            # Keep a reference to the settings, so that their id is not reused.
            cached = settings, AnthropicWriter(model, form, SharedPrefix())
            self._writers[key] = cached
        return cached[1]

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """GET ``/models``. A missing route is not a failure.

        A list of several models selects none of them: the job has to name one.
        """
        capabilities = await fetch_models(self._transport, endpoint, seconds)
        if isinstance(capabilities, Failure) or not capabilities.models_route:
            return capabilities
        if len(capabilities.models) == 1:
            self._profiles.of(endpoint).update(capabilities)
            return capabilities
        return Capabilities(engine=capabilities.engine, models_route=True)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()
