"""Backends by kind of server, and the settings that each does not support."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import msgspec

from bagent.backends.anthropic.wire import IGNORED_SAMPLING as ANTHROPIC_LEFT_OUT
from bagent.backends.base import Backend
from bagent.backends.bedrock.wire import IGNORED_SAMPLING as BEDROCK_LEFT_OUT
from bagent.backends.http.client import Transport
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.wrappers import KeyRotatingBackend
from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.backends.bedrock.backend import BedrockConfig
    from bagent.backends.keys import KeySource


class BackendConfig(msgspec.Struct, frozen=True):
    """Settings of a backend; the defaults are those of a job file."""

    enforce: str = "auto"
    batching: str = "auto"
    keys: KeySource | None = None
    """Source of newer keys, None if the key does not change."""
    bedrock: BedrockConfig | None = None
    """Required for that kind only."""


def make_backend(
    kind: str,
    transport: Transport,
    config: BackendConfig,
    notice: Callable[[str], None] = lambda _: None,
) -> Backend:
    """Return the backend for servers of ``kind``, named as in :mod:`bagent.job.spec.backend`.

    Raises:
        UsageError: ``bedrock`` without its settings.
    """
    backend: Backend
    if kind == "anthropic":
        from bagent.backends.anthropic.backend import AnthropicBackend

        backend = AnthropicBackend(transport, enforce=config.enforce, notice=notice)
    elif kind == "bedrock":
        from bagent.backends.bedrock.backend import BedrockBackend

        if config.bedrock is None:
            raise UsageError("Bedrock is not set up", hint="write backend: bedrock://us-east-1")
        backend = BedrockBackend(config.bedrock, enforce=config.enforce, notice=notice)
    else:
        backend = OpenAIBackend(
            transport, enforce=config.enforce, batching=config.batching, notice=notice
        )
    return backend if config.keys is None else KeyRotatingBackend(backend, config.keys)


def check_supported(kind: str, sampling: AbstractSet[str], *, raw: bool, batching: str) -> None:
    """Refuse settings that the API of ``kind`` does not support, before anything is sent.

    Args:
        sampling: the names of the sampling parameters that the job sets.
        raw: whether prompts are raw texts.
        batching: the job's ``batching.mode``.

    Raises:
        UsageError: with what to change in the job.
    """
    if kind not in ("anthropic", "bedrock"):
        return
    if raw:
        raise UsageError(
            f"backend {kind} takes no raw prompts", hint="write prompt: {system: ..., user: ...}"
        )
    if batching in ("completions", "chat"):
        raise UsageError(
            f"backend {kind} takes one row a request, not batching: {{mode: {batching}}}",
            hint="write batching: {mode: auto}",
        )
    if kind == "anthropic":
        from bagent.backends.anthropic.wire import IGNORED_SAMPLING, SAMPLING_NAMES
    else:
        from bagent.backends.bedrock.wire import IGNORED_SAMPLING, SAMPLING_NAMES
    unknown = sorted(sampling - SAMPLING_NAMES - IGNORED_SAMPLING)
    if unknown:
        raise UsageError(
            f"backend {kind} has no sampling parameter {', '.join(unknown)}",
            hint="leave it out, or use another backend",
        )


class UnsupportedSettings(msgspec.Struct, frozen=True):
    """Features that an API lacks."""

    unsupported: tuple[str, ...] = ()
    """What the API lacks."""
    not_reported: tuple[str, ...] = ()
    """What the server does not report."""

    def text(self) -> str:
        """Return text such as ``no raw prompts; not told: Retry-After``; empty if all works."""
        parts = [f"no {', '.join(self.unsupported)}"] if self.unsupported else []
        if self.not_reported:
            parts.append(f"not told: {', '.join(self.not_reported)}")
        return "; ".join(parts)


RAW, LISTS, CHATS, EMBEDDINGS = "raw prompts", "lists of prompts", "batches of chats", "embeddings"
TEMPLATE, WAIT, LIMITS = "/tokenize", "Retry-After", "rate limits"

_NONE = UnsupportedSettings()
_SKIPS = {
    "openai": UnsupportedSettings((CHATS, TEMPLATE)),
    "anthropic": UnsupportedSettings(
        (RAW, LISTS, CHATS, EMBEDDINGS, TEMPLATE, *sorted(ANTHROPIC_LEFT_OUT))
    ),
    "bedrock": UnsupportedSettings(
        (RAW, LISTS, CHATS, EMBEDDINGS, TEMPLATE, *sorted(BEDROCK_LEFT_OUT)), (WAIT, LIMITS)
    ),
    "vllm": UnsupportedSettings((), (LIMITS,)),
    "sglang": UnsupportedSettings((CHATS,), (LIMITS,)),
    "dynamo": UnsupportedSettings((CHATS, TEMPLATE), (LIMITS,)),
    "llama.cpp": UnsupportedSettings((CHATS,), (LIMITS,)),
}


def unsupported_settings(kind: str | None) -> UnsupportedSettings:
    """Return what a kind of backend, or an engine, does not support."""
    return _SKIPS.get(kind or "", _NONE)
