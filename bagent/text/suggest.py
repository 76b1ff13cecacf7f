"""Suggestions for misspelled names, and short descriptions of values."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN = 60


def nearest_name(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that ``word`` was probably meant to be, or None.

    Case and the choice between ``-``, ``_`` and blanks do not count; else the nearest by
    ``difflib`` with a similarity of at least 0.6.
    """
    by_key = {_plain(candidate): candidate for candidate in candidates}
    matches = get_close_matches(_plain(word), by_key, n=1, cutoff=0.6)
    return by_key[matches[0]] if matches else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``did you mean X?``, or an empty text where nothing is near."""
    nearest = nearest_name(word, candidates)
    return f"did you mean {nearest}?" if nearest else ""


def describe_value(value: object) -> str:
    """Describe a wrong value in up to 60 letters: ``the text "0.1"``, ``true``, ``a list``."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = " ".join(value.split())
        return f'the text "{_cut(text)}"'
    if isinstance(value, (int, float)):
        return _cut(str(getattr(value, "source", value)))
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"a {type(value).__name__}"


def dotted(path: Iterable[str | int]) -> str:
    """Return a path of keys as people read it: ``stages[1].prompt.user``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _plain(word: str) -> str:
    return word.strip().lower().replace("-", "_").replace(" ", "_")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
