"""Backends by kind of server, and the settings that each does not support.

The kinds and what distinguishes them are in :mod:`bagent.backend_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import msgspec

from bagent.backend_kinds import LIMITS, LISTS, RAW, TRAITS, BackendKind, Protocol, traits_of
from bagent.backends import anthropic
from bagent.backends.base import Backend
from bagent.backends.bedrock import wire as bedrock
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
    api: str = "auto"
    keys: KeySource | None = None
    """Source of newer keys, None if the key does not change."""
    bedrock: BedrockConfig | None = None
    """Required for that kind only."""


Notice = Callable[[str], None]


def make_backend(
    kind: BackendKind,
    transport: Transport,
    config: BackendConfig,
    notice: Notice = lambda _: None,
) -> Backend:
    """Return the backend for servers of ``kind``.

    Raises:
        UsageError: there is no such kind, or ``bedrock`` lacks its settings.
    """
    traits = TRAITS.get(kind)
    if traits is None:
        raise UsageError(f"there is no backend {kind}", hint=f"there are {' '.join(TRAITS)}")
    backend = _MAKERS[traits.protocol](transport, config, notice)
    return backend if config.keys is None else KeyRotatingBackend(backend, config.keys)


def _make_openai(transport: Transport, config: BackendConfig, notice: Notice) -> Backend:
    return OpenAIBackend(
        transport,
        enforce=config.enforce,
        batching=config.batching,
        api=config.api,
        notice=notice,
    )


def _make_anthropic(transport: Transport, config: BackendConfig, notice: Notice) -> Backend:
    return anthropic.AnthropicBackend(transport, enforce=config.enforce, notice=notice)


def _make_bedrock(transport: Transport, config: BackendConfig, notice: Notice) -> Backend:
    from bagent.backends.bedrock.backend import BedrockBackend

    if config.bedrock is None:
        raise UsageError("Bedrock is not set up", hint="write backend: bedrock://us-east-1")
    return BedrockBackend(config.bedrock, enforce=config.enforce, notice=notice)


_MAKERS: dict[Protocol, Callable[[Transport, BackendConfig, Notice], Backend]] = {
    "openai": _make_openai,
    "anthropic": _make_anthropic,
    "bedrock": _make_bedrock,
}


class SamplingNames(msgspec.Struct, frozen=True):
    """The sampling parameters of a protocol."""

    sent: frozenset[str]
    ignored: frozenset[str]
    """Left out of requests: the API has nothing like them."""


SAMPLING: dict[Protocol, SamplingNames] = {
    "anthropic": SamplingNames(anthropic.SAMPLING_NAMES, anthropic.IGNORED_SAMPLING),
    "bedrock": SamplingNames(bedrock.SAMPLING_NAMES, bedrock.IGNORED_SAMPLING),
}
"""Protocols that are not listed send every parameter as it is."""


def check_supported(
    kind: BackendKind, sampling: AbstractSet[str], *, raw: bool, batching: str, api: str = "auto"
) -> None:
    """Refuse settings that the API of ``kind`` does not support, before anything is sent.

    Args:
        sampling: the names of the sampling parameters that the job sets.
        raw: whether prompts are raw texts.
        batching: the job's ``batching.mode``.
        api: the backend's ``api``.

    Raises:
        UsageError: with what to change in the job.
    """
    traits = TRAITS[kind]
    if raw and RAW in traits.unsupported:
        raise UsageError(
            f"backend {kind} takes no raw prompts", hint="write prompt: {system: ..., user: ...}"
        )
    if api == "responses" and (raw or batching in ("completions", "chat")):
        refused = "raw prompts" if raw else f"batching: {{mode: {batching}}}"
        raise UsageError(
            f"api: responses takes messages, one row a request, and no {refused}",
            hint="write backend: {url: ..., api: chat}",
        )
    if batching in ("completions", "chat") and LISTS in traits.unsupported:
        raise UsageError(
            f"backend {kind} takes one row a request, not batching: {{mode: {batching}}}",
            hint="leave batching.mode out",
        )
    names = SAMPLING.get(traits.protocol)
    unknown = sorted(sampling - names.sent - names.ignored) if names is not None else []
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
        """Return text such as ``no raw prompts; not reported: Retry-After``; empty if all works."""
        parts = [f"no {', '.join(self.unsupported)}"] if self.unsupported else []
        missing = [name for name in self.not_reported if name != LIMITS]  # few servers report them
        if missing:
            parts.append(f"not reported: {', '.join(missing)}")
        return "; ".join(parts)


def unsupported_settings(name: str | None) -> UnsupportedSettings:
    """Return what a kind of backend, or an engine, does not support."""
    traits = traits_of(name)
    if traits is None:
        return UnsupportedSettings()
    names = SAMPLING.get(traits.protocol)
    ignored = sorted(names.ignored) if names is not None else []
    return UnsupportedSettings((*traits.unsupported, *ignored), traits.not_reported)
