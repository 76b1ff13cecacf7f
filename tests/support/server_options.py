"""How a scripted server behaves besides its script."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Json = Any
Order = Literal["given", "reversed"] | list[int]


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The behaviour of a server; every field is a keyword of ``FakeServer``.

    ``flavour``: ``openai`` serves models, chat, completions and embeddings; ``vllm`` serves
    ``/version``, ``/health``, ``/metrics``, ``/tokenize``, ``/detokenize`` and
    ``/v1/chat/completions/batch`` besides.
    ``row_pattern``: the regular expression whose first group is the row id in a prompt.
    ``rate``: requests per second, above it 429.
    ``capacity``: requests in flight, above it 503.
    ``order``: the order of ``choices`` in the answer to a list call.
    ``refuse``: parameter -> the one to use instead; a request with it is a 400.
    ``schema``: what answers fit where the request names no schema.
    ``strict``: a malformed body is a 400 and a fault of the client.
    ``metrics``: values of ``/metrics`` by name, in place of the server's own.
    """

    model: str = "fake-model"
    models: list[dict[str, Json]] | None = None
    max_model_len: int | None = 32768
    flavour: Literal["openai", "vllm"] = "openai"
    version: str = "0.33.0"
    row_pattern: str = r"\bid=([^\s<>]+)"
    api_key: str | None = None
    rate: float | None = None
    capacity: int | None = None
    order: Order = "given"
    refuse: dict[str, str] = {}
    schema: Json = None
    strict: bool = True
    models_status: int = 200
    metrics: dict[str, float] = {}
