"""Long answers are cut, and say so."""

from __future__ import annotations

BYTES_PER_TOKEN = 3.0
"""UTF-8 bytes that a token has at least, on average: four in English prose, three in code, JSON
and Chinese. A cut by it errs towards too short."""


def cut(text: str, max_tokens: int, bytes_per_token: float = BYTES_PER_TOKEN) -> str:
    """``text``, or its start and a note where it has more than about ``max_tokens`` tokens."""
    most = int(max_tokens * bytes_per_token)
    if len(text) * 4 <= most:
        return text
    raw = text.encode("utf-8", "replace")
    if len(raw) <= most:
        return text
    start = raw[:most].decode("utf-8", "ignore")
    return f"{start}\n[cut: the first {len(start):,} of {len(text):,} characters]"
