"""Secret values, and masking them in text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, quote_plus

from bagent.backend_kinds import HARMLESS_HEADERS

MASK = "***"

SHORTEST_SECRET = 6
"""Shorter secrets occur inside ordinary words."""

_SECRET_WORDS = frozenset(
    {"key", "apikey", "token", "secret", "secrets", "password", "passwd", "pwd"}
    | {"credential", "credentials", "auth", "authorization"}
)
_ADDRESS_NAME = re.compile(r"(?:\w+_)?(?:HOST|HOSTNAME|NODE|ADDR|ADDRESS|IP|PORT|REGION)")


def looks_secret(name: str) -> bool:
    """Return whether a variable, header or key with this name probably holds a secret."""
    parts = re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    return not _SECRET_WORDS.isdisjoint(parts)


def looks_like_address(variable: str) -> bool:
    """Return whether a variable with this name holds a host or port, which may be shown."""
    return _ADDRESS_NAME.fullmatch(variable.upper()) is not None and not looks_secret(variable)


def header_is_secret(name: str) -> bool:
    """Return whether the value of header ``name`` must not be shown."""
    return name.lower() not in HARMLESS_HEADERS


def mask_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` with ``secrets`` masked, also in their URL encodings.

    A secret shorter than :data:`SHORTEST_SECRET` is masked only if it is the complete text.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, quote(secret), quote(secret, safe=""), quote_plus(secret)}:
            if text == form:
                return MASK
            if len(form) >= SHORTEST_SECRET:
                text = text.replace(form, MASK)
    return text


class Redactor:
    """Masks the secrets of one run.

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
        """Return a JSON value with the secrets masked in its strings."""
        if isinstance(value, dict):
            return {name: self.values(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.values(item) for item in value]
        return self(value) if isinstance(value, str) else value


NO_SECRETS = Redactor()
"""Masks nothing."""
