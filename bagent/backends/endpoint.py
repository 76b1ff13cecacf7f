"""One address that answers model calls, and what is known of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

_NO_TAGS: Mapping[str, str] = MappingProxyType({})
_SECRET_HEADER = re.compile(r"authorization|key|token|secret|cookie", re.IGNORECASE)
_SHORTEST_SECRET = 6


class Endpoint(msgspec.Struct, frozen=True, eq=False):
    """One server address.

    ``name`` is what people see and tables hold (``host:port``, or the host of a hosted API);
    ``url`` is the base to which ``/chat/completions`` is added. ``headers`` carry the key and
    are never shown. ``proxy`` is decided once, here, and never by the transport. ``account``
    names what rate limits are counted against. ``own`` is True for engines of the user's own.
    """

    name: str
    url: str
    headers: Mapping[str, str] = _NO_TAGS
    query: Mapping[str, str] = _NO_TAGS
    proxy: str | None = None
    ca_file: str | None = None
    account: str = ""
    own: bool = False
    tags: Mapping[str, str] = _NO_TAGS

    @property
    def root(self) -> str:
        """The address without the ``/v1`` at its end: where /health, /version, /tokenize are."""
        return self.url.removesuffix("/v1")

    def without_secrets(self, words: str) -> str:
        """A server's words with the keys that it was sent as ``***``: some servers repeat them."""
        for name, value in self.headers.items():
            secret = value.rpartition(" ")[2]
            if len(secret) >= _SHORTEST_SECRET and _SECRET_HEADER.search(name):
                words = words.replace(secret, "***")
        return words


class Capabilities(msgspec.Struct, frozen=True):
    """What an endpoint told of itself; None where it did not tell, or was not asked.

    Attributes:
        models: the names it serves, its own first.
        context: the model's context length in tokens, prompt and answer together.
        version: the server's own word.
        engine: the server's own word for who it is; ``vllm``, ``sglang``, ``dynamo``,
            ``llama.cpp`` or ``unknown`` once its routes were looked at.
        tokenize: ``/tokenize`` takes texts and conversations as vLLM's does.
        models_route: ``/models`` answers with a list, be it empty.
        lists: ``/completions`` takes a list of prompts.
        chat_batch: ``/chat/completions/batch`` is served.
        metrics: ``/metrics`` holds the load of a known engine.
        load: a route tells the number of requests that are served.
        cached_tokens: usage tells how much of a prompt was cached; seen only in answers.
    """

    models: tuple[str, ...] = ()
    context: int | None = None
    version: str | None = None
    engine: str | None = None
    tokenize: bool | None = None
    models_route: bool | None = None
    lists: bool | None = None
    chat_batch: bool | None = None
    metrics: bool | None = None
    load: bool | None = None
    cached_tokens: bool | None = None
