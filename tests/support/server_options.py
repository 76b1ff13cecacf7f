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
    ``rate``: requests per second, above it 429 with ``rate_headers``.
    ``capacity``: requests in flight, above it ``overload_status``.
    ``order``: the order of ``choices`` in the answer to a list call.
    ``refuse``: parameter -> the one to use instead; a request with it is a 400.
    ``schema``: what answers fit where the request names no schema.
    ``keepalive``: seconds after which an idle connection is closed.
    ``drop_reused``: drop the second request of a connection, unanswered.
    ``strict``: a malformed body is a 400 and a fault of the client.
    ``metrics``: values of ``/metrics`` by name, in place of the server's own.
    ``ignore_response_format``: made-up answers are prose even where a schema is asked for.
    """

    model: str = "fake-model"
    models: list[dict[str, Json]] | None = None
    max_model_len: int | None = 32768
    flavour: Literal["openai", "vllm"] = "openai"
    version: str = "0.33.0"
    row_pattern: str = r"\bid=([^\s<>]+)"
    api_key: str | None = None
    rate: float | None = None
    rate_headers: dict[str, str] = {}
    capacity: int | None = None
    overload_status: int = 503
    order: Order = "given"
    refuse: dict[str, str] = {}
    schema: Json = None
    keepalive: float = 75.0
    drop_reused: bool = False
    strict: bool = True
    health_status: int = 200
    models_status: int = 200
    metrics: dict[str, float] = {}
    ignore_response_format: bool = False
    keep_requests: bool = True
