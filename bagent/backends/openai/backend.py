"""Backend for OpenAI-compatible APIs: OpenAI, vLLM, SGLang, NVIDIA Dynamo, llama.cpp, gateways.

Prompt tokens are counted by the endpoint's ``/tokenize``. Sources: vLLM's
``entrypoints/serve/tokenize`` (``prompt``, or ``messages`` with what the chat template needs) and
SGLang's route of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bagent.backends.base import TOO_LONG, Ask, Exchange, SentCall, Timeouts
from bagent.backends.batching.routes import ROUTE_PATHS, GroupRoutes, group_body, group_results
from bagent.backends.batching.template_discovery import TemplateProber
from bagent.backends.batching.wire import read_group
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.failures import failure_from_status
from bagent.backends.http.client import NETWORK_ERRORS, Transport, network_failure
from bagent.backends.http.request import (
    EVENTS,
    SSE,
    HttpExchange,
    HttpRequest,
    read_body,
    redact_failure,
)
from bagent.backends.openai.chat import BodyWriter, read_reply
from bagent.backends.openai.models import fetch_models
from bagent.backends.openai.raw_request import read_line_reply
from bagent.backends.openai.responses import (
    LEAST_LIMIT,
    WANTS_RESPONSES,
    ResponsesStream,
    ResponsesWriter,
    goes_to_responses,
    read_response,
)
from bagent.backends.openai.responses import (
    PATH as RESPONSES,
)
from bagent.backends.openai.stream import StreamReader
from bagent.backends.profile import (
    EndpointForms,
    EndpointProfile,
    EndpointProfiles,
    Form,
    OptionalFeatures,
)
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.clocks import unix
from bagent.text.json import json_or_none
from bagent.types import Failure, Json, Reply

_NOT_SERVED = frozenset({404, 405, 501})
_CUTS = "truncate_prompt_tokens"
_TEMPLATE_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")

NO_RESPONSES = "if the server has no /v1/responses, write backend: {url: ..., api: chat}"


class PromptCounter:
    """Counts the tokens of prompts.

    Args:
        ask: how a question is posted.
        model_of: the model name to send for a request; empty for none.
    """

    def __init__(
        self, profiles: EndpointProfiles, ask: Ask, model_of: Callable[[Endpoint, Request], str]
    ) -> None:
        self._profile = profiles.of
        self._ask = ask
        self._model_of = model_of

    async def count(self, endpoint: Endpoint, request: Request, seconds: float) -> int | None:
        """Return the tokens of the prompt as the endpoint renders it, within ``seconds``.

        TOO_LONG if they exceed its context. None if it does not report them, or for prompts that it
        would count wrongly: those with images and those that the server truncates.
        """
        fields = _question(request)
        if fields is None or not endpoint.own or not self._profile(endpoint).tokenizes:
            return None
        if model := self._model_of(endpoint, request):
            fields["model"] = model
        root = msgspec.structs.replace(endpoint, url=endpoint.root)
        limits = Timeouts(connect=seconds, total=seconds)
        answer = await self._ask(root, "/tokenize", encode_payload(fields), limits)
        if isinstance(answer, Failure):
            return None
        status, raw = answer
        if status == 400:  # some servers count only up to their context
            kind = failure_from_status(status, raw.decode("utf-8", "replace"), {}).kind
            return TOO_LONG if kind == "context_overflow" else None
        body = json_or_none(raw) if status == 200 else None
        count = body.get("count") if isinstance(body, dict) else None
        if status in _NOT_SERVED or (isinstance(body, dict) and "count" not in body):
            # llama.cpp's route of that name takes other fields.
            self._profile(endpoint).tokenizes = False
        return count if type(count) is int and count > 0 else None


def _question(request: Request) -> dict[str, Any] | None:
    """Return the fields for ``/tokenize``, None if its answer would be wrong."""
    settings = request.settings
    parameters = {**settings.sampling, **settings.extra}
    if request.body is not None or parameters.get(_CUTS) is not None:
        return None
    if request.prompt is not None:
        special = parameters.get("add_special_tokens", True)
        return {"prompt": request.prompt, "add_special_tokens": special}
    messages = request.messages
    if not messages or not all(_is_text(message.get("content")) for message in messages):
        return None
    fields: dict[str, Any] = {"messages": messages, "add_generation_prompt": True}
    fields.update({name: parameters[name] for name in _TEMPLATE_FIELDS if name in parameters})
    if settings.tools:
        fields["tools"] = list(settings.tools)
    return fields


def _is_text(content: Json) -> bool:
    return content is None or isinstance(content, str)


class _Wire(msgspec.Struct, frozen=True):
    """How the calls of the same settings go to an endpoint."""

    settings: CallSettings
    """Kept, so that no others get its id."""
    profile: EndpointProfile
    form: Form
    by_responses: bool
    """They go to ``/responses``."""
    writer: BodyWriter


MOST_WIRES = 32768
"""Wires that are kept, one for each endpoint and kind of call."""


class OpenAIBackend:
    """Sends calls to ``/chat/completions`` or ``/responses``, and raw text to ``/completions``.

    Without a model in the settings it sends the endpoint's own: its tag ``model``, else the first
    that a probe found, else none.

    Args:
        enforce: ``auto`` asks for the schema by ``response_format`` until the endpoint refuses
            it, ``native`` asks always, ``prompt`` never.
        batching: how calls may share requests: ``single`` never, ``completions`` as lists of
            prompts, ``chat`` as batches of chats, ``auto`` as what the endpoint is known to do.
        api: ``chat`` or ``responses``; ``auto`` takes chats, and responses for models that are
            known to need them or whose endpoint says so.
        clock: Unix seconds.
        notice: called with a line for people when something is learned of an endpoint.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        enforce: str = "auto",
        batching: str = "auto",
        api: str = "auto",
        clock: Callable[[], float] = unix,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._transport = transport
        self._api = api
        self._clock = clock
        self._notice = notice
        self._profiles = EndpointProfiles()
        self._http = HttpExchange(transport, self._profiles, clock)
        self._forms = EndpointForms(self._profiles, enforce, notice)
        self._features = OptionalFeatures(self._profiles)
        self._writers: dict[tuple[str, Form, bool], BodyWriter] = {}
        self._wires: dict[tuple[Endpoint, int, bool, bool], _Wire] = {}
        mode = "single" if api == "responses" else batching
        self._groups = GroupRoutes(self._profiles, mode, clock, notice)
        self.group_key = self._groups.key
        """Returns the settings, limits and shape of a call: :meth:`GroupRoutes.key`."""
        self._learner = TemplateProber(
            self._groups, self._profiles, self._ask, self.probe, self._model
        )
        self._counter = PromptCounter(self._profiles, self._ask, self._model)

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """Return the limit by what is known of the endpoint."""
        limit = self._groups.limit(endpoint, request)
        return 1 if limit == 1 or self._wire(endpoint, request).by_responses else limit

    def _wire(self, endpoint: Endpoint, request: Request) -> _Wire:
        """Return how a call goes to an endpoint, by all that was learned of it."""
        settings = request.settings
        key = endpoint, id(settings), request.tool_choice == "none", request.prompt is None
        wire = self._wires.get(key) if request.body is None else None
        if wire is None:
            profile = self._profiles.of(endpoint)
            model = self._model(endpoint, request)
            api = "responses" if model in profile.responses_models else self._api
            by_responses = self._api != "chat" and goes_to_responses(request, api, model)
            form = self._forms.of(endpoint, request)
            writer = self._writer(endpoint, request, form, by_responses)
            wire = _Wire(settings, profile, form, by_responses, writer)
            if request.body is None:
                if len(self._wires) >= MOST_WIRES:
                    self._wires.clear()
                self._wires[key] = wire
        return wire

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Probe the endpoint if it was not, and prove the samples' chat templates."""
        await self._learner.learn(endpoint, samples, timeouts)

    def forget(self, endpoint: Endpoint) -> None:
        """Discard what was learned of the endpoint."""
        self._profiles.forget(endpoint)
        self._wires.clear()

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """Count by ``/tokenize``."""
        return await self._counter.count(endpoint, request, seconds)

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send one call or a group."""
        request = group[0]
        wire = self._wire(endpoint, request)
        form, by_responses = wire.form, len(group) == 1 and wire.by_responses
        exchange = Exchange(results=[], sent=self._clock())
        result: list[Reply | Failure] | Reply | Failure
        if len(group) > 1:
            result = await self._send_group(endpoint, group, form, timeouts, exchange)
        elif not (request.returning or request.settings.schema_excludes_tools):
            result = await self._send_one(endpoint, request, form, timeouts, exchange, by_responses)
        else:
            result = await self._send_able(
                endpoint, request, form, timeouts, exchange, by_responses
            )
        return self._ended(endpoint, group, form, exchange, result, by_responses)

    def send_now(
        self,
        endpoint: Endpoint,
        request: Request,
        timeouts: Timeouts,
        on_end: Callable[[], None],
    ) -> SentCall | None:
        """Send one plain call over an idle connection; None for other calls, and without one."""
        wire = self._wire(endpoint, request)
        form = wire.form
        if (
            endpoint.url.startswith("https")
            or request.returning
            or request.settings.schema_excludes_tools
            or wire.profile.awaits_sample
            or wire.by_responses
            or (request.stream and form.stream)
        ):
            return None
        pooled = self._transport.reserve(endpoint, request.path, timeouts)
        if pooled is None:
            return None
        exchange = Exchange(results=[], sent=self._clock())
        key = "prompt" if request.prompt is not None else None
        body = wire.writer.body(request, key=key, stream=form.stream)
        http_request = HttpRequest(endpoint, request.path, body, timeouts)
        pooled.start(body, on_end)

        def finish() -> Exchange:
            answer = self._http.finish(pooled, http_request, exchange)
            result = self._read_whole(request, answer, exchange)
            return self._ended(endpoint, (request,), form, exchange, result)

        return SentCall(pooled.cancel, finish)

    def _ended(
        self,
        endpoint: Endpoint,
        group: Sequence[Request],
        form: Form,
        exchange: Exchange,
        result: list[Reply | Failure] | Reply | Failure,
        by_responses: bool = False,
    ) -> Exchange:
        """Complete the exchange of a request that has ended; learn from a failure."""
        exchange.done = self._clock()
        if isinstance(result, Failure) and exchange.status is not None:
            request = group[0]
            if not exchange.learned:
                exchange.learned = (
                    not by_responses and self._learn_api(endpoint, request, result)
                ) or self._forms.learn(endpoint, request, result, form)
            if exchange.learned:
                self._wires.clear()
            result = redact_failure(result, endpoint, exchange)
            if result.status == 404 and by_responses:
                message = f"{result.message}; {NO_RESPONSES}"
                result = msgspec.structs.replace(result, message=message)
        exchange.results = result if isinstance(result, list) else [result] * len(group)
        return exchange

    def _learn_api(self, endpoint: Endpoint, request: Request, failure: Failure) -> bool:
        """Take ``/responses`` for a model that chats are refused for; return whether to resend."""
        model = self._model(endpoint, request)
        if (
            self._api != "auto"
            or failure.status not in (400, 403, 404)
            or not WANTS_RESPONSES.search(failure.message)
            or not goes_to_responses(request, "responses", model)
        ):
            return False
        models = self._profiles.of(endpoint).responses_models
        if model not in models:  # else a call that was sent meanwhile is refused alike
            models.add(model)
            self._notice(f"{endpoint.name} serves {model} by /responses only; it is called there")
        return True

    async def _send_able(
        self,
        endpoint: Endpoint,
        request: Request,
        form: Form,
        timeouts: Timeouts,
        exchange: Exchange,
        by_responses: bool,
    ) -> Reply | Failure:
        """Send one call with an optional feature that the endpoint has or may have."""
        able, tries = self._features.form(endpoint, request, form)
        try:
            result = await self._send_one(endpoint, request, able, timeouts, exchange, by_responses)
            if not (tries or able.hints):
                return result
            return self._features.learn(endpoint, able, tries, result, exchange)
        finally:
            self._features.leave(endpoint, tries)

    async def _send_one(
        self,
        endpoint: Endpoint,
        request: Request,
        form: Form,
        timeouts: Timeouts,
        exchange: Exchange,
        by_responses: bool,
    ) -> Reply | Failure:
        stream = request.stream and form.stream
        body = self._writer(endpoint, request, form, by_responses).body(
            request, key="prompt" if request.prompt is not None else None, stream=form.stream
        )
        path = RESPONSES if by_responses else request.path
        http_request = HttpRequest(endpoint, path, body, timeouts)
        if stream or by_responses:
            reader = None
            if stream:
                on_call = request.watch() if request.watch else None
                make_reader = ResponsesStream if by_responses else StreamReader
                reader = make_reader(exchange.sent, self._clock, on_call)
                http_request.began = request.began
            read = _read_response if by_responses else read_reply
            return await self._http.send(http_request, exchange, read, reader)
        waits = self._profiles.of(endpoint).awaits_sample
        sample = self._groups.awaits_sample(endpoint, request) if waits else None
        if sample is None:
            return self._read_whole(
                request, await self._http.post(http_request, exchange), exchange
            )
        sample.sampling = True
        try:
            http_request.body = http_request.body[:-1] + b',"return_token_ids":true}'
            answer = await self._http.post(http_request, exchange)
            result = self._read_whole(request, answer, exchange)
            if isinstance(result, Reply) and not isinstance(answer, Failure):
                await self._learner.check_sample(
                    endpoint, request, sample, result, answer[0], timeouts
                )
        finally:
            sample.sampling = False
        return result

    async def _send_group(
        self,
        endpoint: Endpoint,
        group: Sequence[Request],
        form: Form,
        timeouts: Timeouts,
        exchange: Exchange,
    ) -> list[Reply | Failure] | Failure:
        groups, request = self._groups, group[0]
        way = groups.way(endpoint, request)
        if way is None:  # learned after the group was formed
            exchange.withheld, exchange.connected = True, False
            return Failure("overloaded", f"{endpoint.name} takes no such group any more", True)
        learned = groups.learned(endpoint, request) if way == "templated" else None
        writer = self._writer(endpoint, request, form)
        token_ids = self._profiles.of(endpoint).takes_all
        body = group_body(writer, way, group, learned, token_ids)
        answer = await self._http.post(
            HttpRequest(endpoint, ROUTE_PATHS[way], body, timeouts), exchange
        )
        if not isinstance(answer, Failure):
            first_ids = learned.first_ids if learned is not None else ()
            group_answer = read_group(*answer, len(group), first_ids)
            if not isinstance(group_answer, Failure):
                results, exchange.learned = group_results(
                    groups, endpoint, way, request, group_answer
                )
                return results
            answer = group_answer
        exchange.learned = groups.refused(endpoint, way, answer)
        return answer

    def _read_whole(
        self,
        request: Request,
        answer: tuple[bytes, Mapping[str, str]] | Failure,
        exchange: Exchange,
    ) -> Reply | Failure:
        """Return the reply in the body of a response that was not streamed, or the failure."""
        if isinstance(answer, Failure):
            return answer
        raw, headers = answer
        if request.body is not None and raw.lstrip()[:1] == b"{":
            return read_line_reply(request, raw, headers)
        content_type = headers.get("Content-Type", "")
        if content_type.startswith(SSE) or (raw[:1] != b"{" and EVENTS.match(raw)):
            reader = StreamReader(exchange.sent, self._clock)
            reader.feed(raw)
            return reader.result()
        return read_reply(raw, content_type, headers)

    async def _ask(
        self, endpoint: Endpoint, path: str, body: bytes, timeouts: Timeouts
    ) -> tuple[int, bytes] | Failure:
        """Post a body that is not a call; see ``Ask``."""
        try:
            async with self._transport.post(endpoint, path, body, timeouts) as response:
                return response.status, await read_body(response)
        except NETWORK_ERRORS as error:
            return network_failure(error, endpoint, timeouts)

    def _writer(
        self, endpoint: Endpoint, request: Request, form: Form, by_responses: bool = False
    ) -> BodyWriter:
        model = self._model(endpoint, request)
        key = (model, form, by_responses)
        writer = self._writers.get(key)
        if writer is None:
            fields = msgspec.structs.asdict(form)
            del fields["stream"]
            if by_responses:
                least = 1 if endpoint.own else LEAST_LIMIT
                writer = ResponsesWriter(model, least_limit=least, **fields)
            else:
                writer = BodyWriter(model, **fields)
            self._writers[key] = writer
        return writer

    def _model(self, endpoint: Endpoint, request: Request) -> str:
        """Return the model to send, empty for none."""
        model = request.settings.model or ""
        if not model and not (request.body and request.body.get("model")):
            model = endpoint.tags.get("model") or self._profiles.of(endpoint).model
        return model

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """GET ``/models``. A missing route is not a failure."""
        capabilities = await fetch_models(self._transport, endpoint, seconds)
        if isinstance(capabilities, Capabilities):
            self._profiles.of(endpoint).update(capabilities)
            self._wires.clear()
        return capabilities

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()


def _read_response(raw: bytes, content_type: str, headers: Mapping[str, str]) -> Reply | Failure:
    """Parse a response; see :data:`bagent.backends.http.request.WholeReader`."""
    return read_response(raw, headers)
