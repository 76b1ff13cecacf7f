"""The kinds of backends (engines and providers), and what distinguishes the servers of each.

How to add a provider stands in :mod:`bagent.backends`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

BackendKind = Literal[
    "vllm", "sglang", "dynamo", "openai", "anthropic", "bedrock", "local", "sim", "compatible"
]
"""``compatible`` is any OpenAI-compatible server named by an http(s) URL."""

Protocol = Literal["openai", "anthropic", "bedrock"]
"""The wire protocols; a package of :mod:`bagent.backends` has each."""

RAW, LISTS, CHATS, EMBEDDINGS = "raw prompts", "lists of prompts", "batches of chats", "embeddings"
TEMPLATE, WAIT, LIMITS = "/tokenize", "Retry-After", "rate limits"


class BackendTraits(msgspec.Struct, frozen=True, kw_only=True):
    """What distinguishes the servers of one kind; the defaults are those of ``compatible``."""

    protocol: Protocol = "openai"
    own: bool = False
    """An engine of the user's own: no environment proxy, and the prompt describes the schema."""
    hosted: bool = False
    """Never runs on the user's own GPUs."""
    port: int | None = None
    """The usual port; None: the endpoints of a hostfile cannot be of this kind."""
    address: str | None = None
    """The provider's own address; None: the job names one."""
    address_variable: str | None = None
    """The variable that replaces ``address``."""
    gateways_versioned: bool = False
    """The API is below ``/v1`` also where the address has another path, as of a gateway."""
    keys: tuple[tuple[str, ...], ...] = ()
    """The variables that hold a key; the first group that is set counts."""
    key_required: bool = False
    """Refuse a job without a key before anything is sent."""
    key_header: str | None = None
    """The header of the key; None sends it as a bearer token, like keys of the second group."""
    headers: Mapping[str, str] = MappingProxyType({})
    """Headers of every request; they hold no secrets."""
    forwarded_headers: tuple[str, ...] = ()
    """Headers of a client that the proxy forwards."""
    signs_requests: bool = False
    """No request can be made without a key."""
    serves_chat_completions: bool = True
    """Serves OpenAI's ``/chat/completions`` below the same address, whatever its own protocol;
    where not, the proxy and load tests use :mod:`bagent.proxy.chat_bridge`."""
    groups_rows: bool = False
    """Rows share requests by default."""
    unsupported: tuple[str, ...] = ()
    """Features that the API lacks."""
    not_reported: tuple[str, ...] = ()
    """What the servers do not report."""
    engine: str | None = None
    """The name of the engine where it is not the kind."""
    native_schema_with_tools: bool = False
    """By its documentation the API enforces the schema of answers also while tools may be called.
    Each other endpoint is tried once, see :mod:`bagent.backends.profile`."""
    strict_tools: bool = True
    """Takes ``strict`` in the definition of a tool."""
    service_tier: tuple[str, ...] = ()
    """The path of the service tier in a request; empty: there are no tiers."""
    batch_service: bool = False
    """The provider's batch service takes files of requests."""
    prices: str | None = None
    """The provider's name in ``prices.json``."""


_NO_GROUPS = (RAW, LISTS, CHATS, EMBEDDINGS, TEMPLATE)

TRAITS: Mapping[BackendKind, BackendTraits] = {
    "vllm": BackendTraits(
        own=True,
        port=8000,
        keys=(("VLLM_API_KEY",),),
        groups_rows=True,
        not_reported=(LIMITS,),
    ),
    "sglang": BackendTraits(
        own=True, port=30000, groups_rows=True, unsupported=(CHATS,), not_reported=(LIMITS,)
    ),
    "dynamo": BackendTraits(
        own=True, port=8000, groups_rows=True, unsupported=(CHATS, TEMPLATE), not_reported=(LIMITS,)
    ),
    "openai": BackendTraits(
        hosted=True,
        address="https://api.openai.com/v1",
        address_variable="OPENAI_BASE_URL",
        keys=(("OPENAI_API_KEY",),),
        key_required=True,
        unsupported=(CHATS, TEMPLATE),
        native_schema_with_tools=True,
        service_tier=("service_tier",),
        batch_service=True,
        prices="openai",
    ),
    "anthropic": BackendTraits(
        protocol="anthropic",
        hosted=True,
        address="https://api.anthropic.com/v1",
        address_variable="ANTHROPIC_BASE_URL",
        keys=(("ANTHROPIC_API_KEY",), ("ANTHROPIC_AUTH_TOKEN",)),
        gateways_versioned=True,
        key_header="x-api-key",
        headers=MappingProxyType({"anthropic-version": "2023-06-01"}),
        forwarded_headers=("anthropic-beta", "anthropic-version"),
        unsupported=_NO_GROUPS,
        native_schema_with_tools=True,
        strict_tools=False,
        service_tier=("service_tier",),
        batch_service=True,
        prices="anthropic",
    ),
    "bedrock": BackendTraits(
        protocol="bedrock",
        hosted=True,
        keys=(
            ("AWS_BEARER_TOKEN_BEDROCK",),
            ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        ),
        signs_requests=True,
        serves_chat_completions=False,
        unsupported=_NO_GROUPS,
        not_reported=(WAIT, LIMITS),
        native_schema_with_tools=True,
        strict_tools=False,
        service_tier=("serviceTier", "type"),
        batch_service=True,
    ),
    "local": BackendTraits(
        own=True, engine="llama.cpp", unsupported=(CHATS,), not_reported=(LIMITS,)
    ),
    "sim": BackendTraits(own=True, groups_rows=True),
    "compatible": BackendTraits(
        groups_rows=True, service_tier=("service_tier",), batch_service=True
    ),
}

HARMLESS_HEADERS = frozenset({"accept", "content-type", "user-agent", "x-request-id"}).union(
    name.lower() for traits in TRAITS.values() for name in traits.headers
)
"""The only headers whose values may be shown; gateways read keys from headers of any name."""

FORWARDED_HEADERS = tuple(
    dict.fromkeys(name for traits in TRAITS.values() for name in traits.forwarded_headers)
)
"""Headers of a client that a hosted API needs."""


def traits_of(name: str | None) -> BackendTraits | None:
    """Return the traits of a kind or of the engine that a server names, None if unknown."""
    for kind, traits in TRAITS.items():
        if name in (kind, traits.engine) and name is not None:
            return traits
    return None
