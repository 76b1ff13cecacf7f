"""Keys and names of rows that stages make: the same rows get the same ones in every start."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from struct import pack

from bagent.types import Json

INPUT = "input"
"""The name of what comes before the first stage."""


def derived(parents: Iterable[int], *words: str | int) -> int:
    """The 64-bit key of a row made of the rows with keys ``parents``.

    BLAKE2b (RFC 7693) with a digest of 8 bytes over the parents' keys in order, 8 bytes
    big-endian each, and over ``words``, each ended by a zero byte. Journals hold these keys, so
    the recipe must not change.
    """
    digest = blake2b(digest_size=8, person=b"bagent.stage")
    for key in parents:
        digest.update(pack(">Q", key))
    for word in words:
        digest.update(str(word).encode("utf-8", "surrogatepass") + b"\0")
    return int.from_bytes(digest.digest(), "big")


def reference(stage: str, row_id: Json, answer: int) -> str:
    """How ``parents`` names an outcome: ``STAGE:ID:ANSWER``, as SQL can put it together."""
    shown = row_id if isinstance(row_id, str) else str(row_id)
    return f"{stage}:{shown}:{answer}"
