"""Which values are secret, and texts without them. Used by every package that writes texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "***"

HARMLESS_HEADERS = frozenset(
    {"accept", "anthropic-version", "content-type", "user-agent", "x-request-id"}
)
"""The only headers whose values may be shown. Names tell too little: gateways read keys from
``X-Pass``, ``X-Session`` or ``x-goog-iap-jwt-assertion``."""

SHORTEST_SECRET = 6
"""A shorter secret would also be found inside harmless words."""

_SECRET_WORDS = frozenset(
    {"key", "apikey", "token", "secret", "secrets", "password", "passwd", "pwd"}
    | {"credential", "credentials", "auth", "authorization"}
)
_PLACE_NAME = re.compile(r"(?:\w+_)?(?:HOST|HOSTNAME|NODE|ADDR|ADDRESS|IP|PORT|REGION)")


def looks_secret(name: str) -> bool:
    """Return whether a variable, header or key of this name probably holds a secret."""
    parts = re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    return not _SECRET_WORDS.isdisjoint(parts)


def looks_like_address(variable: str) -> bool:
    """Return whether a variable of this name holds a host or a port, which may be shown."""
    return _PLACE_NAME.fullmatch(variable.upper()) is not None and not looks_secret(variable)


def header_is_secret(name: str) -> bool:
    """Return whether the value of header ``name`` is never to be shown."""
    return name.lower() not in HARMLESS_HEADERS


def mask_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` with each of ``secrets`` masked, as it is and as URLs write it.

    A secret that is too short to be told from other words is masked where it is the whole text.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, quote(secret), quote(secret, safe=""), quote_plus(secret)}:
            if text == form:
                return MASK
            if len(form) >= SHORTEST_SECRET:
                text = text.replace(form, MASK)
    return text


class Redactor:
    """Masks the secrets of one run in texts that are written down.

    Args:
        secrets: the values.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = tuple(secrets)

    def __call__(self, text: str) -> str:
        """Return ``text`` without the secrets."""
        return mask_secrets(text, self._secrets) if self._secrets else text

    def optional(self, text: str | None) -> str | None:
        """Return ``text`` without the secrets, None for None."""
        return None if text is None else self(text)

    def values(self, value: Any) -> Any:
        """Return a JSON value whose texts hold none of the secrets."""
        if isinstance(value, dict):
            return {name: self.values(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.values(item) for item in value]
        return self(value) if isinstance(value, str) else value
