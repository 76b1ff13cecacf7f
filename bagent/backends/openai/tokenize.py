"""Prompt token counts from the endpoint's ``/tokenize``.

Sources: vLLM's ``entrypoints/serve/tokenize`` (``prompt``, or ``messages`` with what the chat
template needs) and SGLang's route of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from bagent.backends.base import TOO_LONG, Ask, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.openai.errors import failure_from_status
from bagent.backends.profile import EndpointProfiles
from bagent.backends.request import Request, encode_payload
from bagent.text.json import json_or_none
from bagent.types import Failure, Json

_NOT_SERVED = frozenset({404, 405, 501})
_CUTS = "truncate_prompt_tokens"
_TEMPLATE_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")


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
