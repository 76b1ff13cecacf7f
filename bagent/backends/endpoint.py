"""Server addresses and their capabilities."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from urllib.parse import quote, quote_plus, unquote, urlsplit

import msgspec

from bagent.redaction import SHORTEST_SECRET, header_is_secret

_NO_TAGS: Mapping[str, str] = MappingProxyType({})
_SECRET_NAME = re.compile(
    r"auth|key|token|secret|cookie|passw|credential|signature|\bsig\b|^code$", re.IGNORECASE
)
_CUT = "…"
"""Ends truncated text, which may end with a part of a secret."""


class Endpoint(msgspec.Struct, frozen=True, eq=False):
    """One server address."""

    name: str
    """As shown and stored: ``host:port``, or the host of a hosted API."""
    url: str
    """Base to which ``/chat/completions`` is added."""
    headers: Mapping[str, str] = _NO_TAGS
    """Hold the key; never shown."""
    query: Mapping[str, str] = _NO_TAGS
    proxy: str | None = None
    """Decided when the endpoint is made, not by the transport."""
    ca_file: str | None = None
    account: str = ""
    """What rate limits are counted against."""
    own: bool = False
    """An engine of the user's own."""
    tags: Mapping[str, str] = _NO_TAGS

    @property
    def root(self) -> str:
        """The address without ``/v1``: the base of ``/health``, ``/version`` and ``/tokenize``."""
        return self.url.removesuffix("/v1")

    @property
    def weight(self) -> float:
        """The endpoint's share of the work by its tags, 1 by default."""
        return float(self.tags.get("weight") or self.tags.get("gpus") or 1)

    def without_secrets(self, text: str) -> str:
        """Replace the endpoint's secrets in ``text`` by ``***``: some servers repeat them.

        Covers secret headers, query parameters (plain or URL-encoded) and the proxy's password, and
        prefixes of them where the text was truncated.
        """
        forms = {
            form
            for secret in self._secrets()
            for form in (secret, quote(secret), quote(secret, safe=""), quote_plus(secret))
            if len(secret) >= SHORTEST_SECRET
        }
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, "***")
        if not forms or _CUT not in text:
            return text
        *cut, last = text.split(_CUT)
        return _CUT.join([*(_without_beginning(part, forms) for part in cut), last])

    def _secrets(self) -> Iterator[str]:
        for name, value in self.headers.items():
            if header_is_secret(name):
                yield value
                kind, _, secret = value.rpartition(" ")
                yield secret
                if kind.lower() == "basic":
                    yield _password(secret)
        for name, value in self.query.items():
            if _SECRET_NAME.search(name):
                yield value
        login = urlsplit(self.proxy).netloc.rpartition("@")[0] if self.proxy else ""
        if login:
            user, _, password = map(unquote, login.partition(":"))
            yield password
            yield base64.b64encode(f"{user}:{password}".encode()).decode("ascii")


def _password(login: str) -> str:
    """Return the password of ``Basic`` credentials, empty if they are malformed."""
    try:
        return base64.b64decode(login, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeError):
        return ""


def _without_beginning(text: str, secrets: set[str]) -> str:
    """Replace the prefix of a secret at the end of ``text``."""
    for secret in secrets:
        for length in range(len(secret) - 1, SHORTEST_SECRET - 1, -1):
            if text.endswith(secret[:length]):
                return f"{text[:-length]}***"
    return text


class Capabilities(msgspec.Struct, frozen=True):
    """What an endpoint reported about itself; None where it did not, or was not asked."""

    models: tuple[str, ...] = ()
    """The names it serves, its own first."""
    context: int | None = None
    """The context length in tokens, prompt and answer together."""
    version: str | None = None
    engine: str | None = None
    """As the server names itself; ``vllm``, ``sglang``, ``dynamo``, ``llama.cpp`` or ``unknown``
    once its routes were detected."""
    tokenize: bool | None = None
    """``/tokenize`` accepts texts and conversations as vLLM's does."""
    models_route: bool | None = None
    """``/models`` answers with a list, which may be empty."""
    lists: bool | None = None
    """``/completions`` accepts a list of prompts."""
    chat_batch: bool | None = None
    """``/chat/completions/batch`` is served."""
    metrics: bool | None = None
    """``/metrics`` holds the load of a known engine."""
    load: bool | None = None
    """A route reports the number of requests in service."""
    cached_tokens: bool | None = None
    """Usage includes cached tokens; known only from answers."""
