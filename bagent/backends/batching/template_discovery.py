"""Discovery of an endpoint's chat template.

``/tokenize`` with ``messages`` and ``/detokenize`` show the rendered sentinels. ``/tokenize`` with
the rendered text must return the same ids as with the messages. Nothing is generated: the first row
that is sent as a chat confirms that the chat route renders the same prompt and that the model does
not reason first. Source: vLLM's ``entrypoints/serve/tokenize``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from bagent.backends.base import Ask, Timeouts
from bagent.backends.batching.chat_template import (
    ChatTemplate,
    Shape,
    learn_template,
    proof_conversations,
    sentinel_messages,
    shows_reasoning,
    unusable_reason,
)
from bagent.backends.batching.routes import GroupRoutes
from bagent.backends.batching.wire import read_detokenized, read_prompt_ids, read_token_ids
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.failures import failure_from_status
from bagent.backends.profile import EndpointProfiles, LearnedRoute
from bagent.backends.request import Request, encode_payload
from bagent.text.json import decode_json
from bagent.types import Failure, Json, Message, Reply

Probe = Callable[[Endpoint, float], Awaitable[Capabilities | Failure]]

MOST_SAMPLES = 2
"""Real conversations of a shape that prove its template."""

SECONDS = 15.0
"""Limit of one question."""

_FIRST_IDS = 8
"""Maximal number of first ids that are compared with every answer's."""


class _NotNow(Exception):
    """The endpoint cannot be asked now, but may be later."""


class _NotProven(Exception):
    """The template does not hold, or cannot be proven; the message says why."""


class TemplateProber:
    """Learns, for :class:`GroupRoutes`, which groups endpoints accept.

    Args:
        model_of: the model name to send for a request; empty for none.
    """

    def __init__(
        self,
        groups: GroupRoutes,
        profiles: EndpointProfiles,
        ask: Ask,
        probe: Probe,
        model_of: Callable[[Endpoint, Request], str],
    ) -> None:
        self._groups = groups
        self._profile = profiles.of
        self._ask = ask
        self._probe = probe
        self._model_of = model_of
        self._locks: dict[str, asyncio.Lock] = {}

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """See :meth:`bagent.backends.base.Backend.learn`."""
        limits = _short(timeouts)
        async with self._locks.setdefault(endpoint.name, asyncio.Lock()):
            if self._profile(endpoint).engine is None:
                result = await self._probe(endpoint, limits.total or SECONDS)
                if isinstance(result, Failure):
                    self._groups.later(endpoint)
                    return
            by_shape: dict[Shape, list[Request]] = {}
            for request in samples:
                shape = self._groups.wants(endpoint, request)
                if shape is not None:
                    by_shape.setdefault(shape, []).append(request)
            for shape, rows in by_shape.items():
                if not await self._learn_shape(endpoint, shape, rows, limits):
                    self._groups.later(endpoint)
                    return

    async def _learn_shape(
        self, endpoint: Endpoint, shape: Shape, rows: Sequence[Request], limits: Timeouts
    ) -> bool:
        """Learn and prove a template; return False if the endpoint cannot be asked now."""
        asking = _Asking(self._ask, endpoint, self._model_of(endpoint, rows[0]), limits)
        profile = self._profile(endpoint)
        try:
            learned = await _learn(asking, shape, rows)
        except _NotNow:
            return False
        except _NotProven as why:
            learned = LearnedRoute(off=str(why))
        if profile is self._profile(endpoint):  # else it was forgotten
            self._groups.learn(endpoint, rows[0], shape, learned)
        return True

    async def check_sample(
        self,
        endpoint: Endpoint,
        request: Request,
        learned: LearnedRoute,
        reply: Reply,
        raw: bytes,
        timeouts: Timeouts,
    ) -> None:
        """Compare a chat's reply and body with the template."""
        why = ""
        if reply.reasoning or shows_reasoning(reply.text):
            why = "the model thinks before it answers"
        ids = read_prompt_ids(raw)
        if not why and ids is not None and learned.template and request.messages:
            model = self._model_of(endpoint, request)
            asking = _Asking(self._ask, endpoint, model, _short(timeouts))
            try:
                if await asking.text_ids(learned.template.render(request.messages)) != ids:
                    why = "its chat route renders other prompts than /tokenize"
            except _NotNow:
                return
            except _NotProven as error:
                why = str(error)
        self._groups.sampled(endpoint, learned, why)


def _short(timeouts: Timeouts) -> Timeouts:
    total = SECONDS if timeouts.total is None else min(SECONDS, timeouts.total)
    return msgspec.structs.replace(timeouts, total=total)


async def _learn(asking: _Asking, shape: Shape, rows: Sequence[Request]) -> LearnedRoute:
    first = await asking.chat_ids(sentinel_messages(shape))
    template = learn_template(shape, await asking.text(first))
    if template is None:
        raise _NotProven("its chat template rewrites what it is given")
    reason = unusable_reason(template)
    if reason is not None:
        raise _NotProven(reason)
    awkward, *others = proof_conversations(shape, template)
    ids = await asking.chat_ids(awkward)
    seen = [first, ids]
    for candidate in (template, msgspec.structs.replace(template, trim=True)):
        if await asking.text_ids(candidate.render(awkward)) == ids:
            break
    else:
        raise _NotProven("its chat template rewrites what it is given")
    real = [row.messages for row in rows[:MOST_SAMPLES] if row.messages]
    seen += [await asking.proven(candidate, messages) for messages in others + real]
    return LearnedRoute(template=candidate, first_ids=_common(seen))


def _common(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ids with which all lists begin."""
    prefix: list[int] = []
    for ids in zip(*lists, strict=False):
        if len(set(ids)) > 1 or len(prefix) == _FIRST_IDS:
            break
        prefix.append(ids[0])
    return tuple(prefix)


class _Asking:
    """Token questions to one endpoint.

    Raises:
        _NotNow: it does not answer, or is too busy.
        _NotProven: it answers, but not with what was asked for.
    """

    def __init__(self, ask: Ask, endpoint: Endpoint, model: str, timeouts: Timeouts) -> None:
        self._ask = ask
        self._endpoint = msgspec.structs.replace(endpoint, url=endpoint.root)
        self._model = model
        self._timeouts = timeouts

    async def chat_ids(self, messages: list[Message]) -> list[int]:
        """Return the ids of a conversation as the server renders it."""
        return await self._ids({"messages": messages, "add_generation_prompt": True})

    async def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return await self._ids({"prompt": text, "add_special_tokens": False})

    async def text(self, ids: list[int]) -> str:
        """Return the text of ids."""
        text = read_detokenized(await self._post("/detokenize", {"tokens": ids}))
        if text is None:
            raise _NotProven("it has no /detokenize as vLLM's")
        return text

    async def proven(self, template: ChatTemplate, messages: list[Message]) -> list[int]:
        """Return the ids of a conversation if the template's text has the same."""
        ids = await self.chat_ids(messages)
        if await self.text_ids(template.render(messages)) != ids:
            raise _NotProven("its chat template writes other things around other texts")
        return ids

    async def _ids(self, fields: dict[str, Any]) -> list[int]:
        ids = read_token_ids(await self._post("/tokenize", fields))
        if ids is None:
            raise _NotProven("it has no /tokenize as vLLM's")
        return ids

    async def _post(self, path: str, fields: dict[str, Any]) -> Json:
        body = {"model": self._model, **fields} if self._model else fields
        answer = await self._ask(self._endpoint, path, encode_payload(body), self._timeouts)
        if isinstance(answer, Failure):
            raise _NotNow
        status, raw = answer
        if status != 200:
            failure = failure_from_status(status, raw.decode("utf-8", "replace"), {})
            if failure.passing:
                raise _NotNow
            raise _NotProven(f"{path}: {failure.message}")
        try:
            return decode_json(raw)
        except ValueError:
            raise _NotProven(f"{path} answers no JSON") from None
