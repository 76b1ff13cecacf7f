"""Texts of tools cut to what a model or a message should get."""

from __future__ import annotations

FAULT_CHARACTERS = 2_000
"""Longest error that goes back to the model."""

BYTES_PER_TOKEN = 3.0
"""A lower estimate of the UTF-8 bytes of a token: English prose has four, code, JSON and Chinese
have three."""


def truncate(text: str, max_tokens: int) -> str:
    """Return ``text``, or its start and a note where it has more than about ``max_tokens``."""
    most = int(max_tokens * BYTES_PER_TOKEN)
    if len(text) * 4 <= most:
        return text
    raw = text.encode("utf-8", "replace")
    if len(raw) <= most:
        return text
    start = raw[:most].decode("utf-8", "ignore")
    return f"{start}\n[cut: the first {len(start):,} of {len(text):,} characters]"


def shorten(text: str, limit: int = FAULT_CHARACTERS) -> str:
    """Return ``text``, without its middle where it has more than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
