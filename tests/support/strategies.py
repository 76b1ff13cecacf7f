"""Strategies of hypothesis that several tests of ``properties`` share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

ODD_TEXT = st.text(st.characters(), max_size=5)
"""Any text, lone surrogates and control characters included."""

CUTS = st.lists(st.integers(0, 1 << 16), max_size=8)
"""Where :func:`pieces` cuts."""


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """Return ``data`` in pieces, cut at the offsets ``cuts`` modulo its length; none is empty."""
    offsets = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[low:high] for low, high in pairwise(offsets)]


def texts_of(*parts: str, odd: st.SearchStrategy[str] | None = None) -> st.SearchStrategy[str]:
    """Return texts made of ``parts`` and of other short texts."""
    others = st.text(max_size=3) if odd is None else odd
    return st.lists(st.sampled_from(parts) | others, max_size=20).map("".join)


def json_values(texts: st.SearchStrategy[str] | None = None) -> st.SearchStrategy[Any]:
    """Return JSON values that every parser reads alike, up to three levels deep."""
    texts = st.text(max_size=8) if texts is None else texts
    scalars = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | texts
    )
    # Written out, since recursive strategies are slow.
    return _deeper(texts, _deeper(texts, scalars))


def _deeper(texts: st.SearchStrategy[str], inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return inner | st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)


def json_objects(
    texts: st.SearchStrategy[str] | None = None,
) -> st.SearchStrategy[dict[str, Any]]:
    """Return JSON objects."""
    texts = st.text(max_size=8) if texts is None else texts
    return st.dictionaries(texts, json_values(texts), max_size=3)
