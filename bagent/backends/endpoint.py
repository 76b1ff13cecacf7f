"""One address that answers model calls, and what is known of it."""

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
"""What ends words that were cut: a secret may have been cut with them."""


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

    @property
    def weight(self) -> float:
        """Its share of the work beside others, by its tags; 1 where they say nothing."""
        return float(self.tags.get("weight") or self.tags.get("gpus") or 1)

    def without_secrets(self, text: str) -> str:
        """A server's words with the keys that it was sent as ``***``: some servers repeat them.

        Those of headers, of query parameters (as they are, or as URLs write them) and of the
        proxy; also the beginning of one that was cut with the words.
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
    """The password of ``Basic`` credentials, empty where it is none."""
    try:
        return base64.b64decode(login, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeError):
        return ""


def _without_beginning(text: str, secrets: set[str]) -> str:
    """``text`` without the beginning of a secret at their end."""
    for secret in secrets:
        for length in range(len(secret) - 1, SHORTEST_SECRET - 1, -1):
            if text.endswith(secret[:length]):
                return f"{text[:-length]}***"
    return text


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
