"""Two texts word by word."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Literal

Change = Literal["same", "removed", "added"]

MOST_WORDS = 4000
"""Words of each text that are compared; the work grows with their product."""

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def word_diff(first: str, second: str) -> list[tuple[Change, str]]:
    """Return the pieces of both texts in order; beyond :data:`MOST_WORDS` nothing is compared."""
    a, b = (_WORDS.findall(text)[: MOST_WORDS + 1] for text in (first, second))
    if max(len(a), len(b)) > MOST_WORDS:
        same = first == second
        return [("same", first)] if same else [("removed", first), ("added", second)]
    pieces: list[tuple[Change, str]] = []
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            pieces.append(("same", "".join(a[i:j])))
            continue
        if i < j:
            pieces.append(("removed", "".join(a[i:j])))
        if k < m:
            pieces.append(("added", "".join(b[k:m])))
    return pieces
