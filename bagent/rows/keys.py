"""The key of a row: a 64-bit number that survives moving the line.

Journals hold keys, so this recipe must not change:

1. Body: bytes that say what the row is.

   - A row with an id: the JSON array ``[ID,[V1,V2,...]]`` of the id as typed and the values of
     the fields that the job uses, in the order of the sorted field names. Nothing stands between
     the commas for a field that the row lacks (``null`` stands for a null). Where the job may use
     every field, ``[ID,{...}]`` with the whole row.
   - A row without id: ``[[V1,V2,...]]`` or ``[{...}]``; the whole row too where the job uses no
     field at all.
   - A row that cannot be read: its raw bytes.

   The JSON is compact, in UTF-8, and the names of every object in it are sorted. Lone surrogates
   are the visible text ``\\udXXX``.
2. Base key: BLAKE2b with a digest of 8 bytes over the body (RFC 7693), read big-endian.
3. Where k rows of the same base key came before, k >= 1, the key is BLAKE2b with a digest of
   8 bytes over the base key and k, each as 8 bytes big-endian; for k = 0 it is the base key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from operator import itemgetter
from struct import pack
from typing import Any

import msgspec

from bagent.rows.keyset import KeySet
from bagent.rows.values import TOO_DEEP, Chunk, Item, Unreadable, visible, visible_data
from bagent.types import Json

_SIMPLE = {str, int}
_NONE = {type(None)}

_encode = msgspec.json.Encoder(order="deterministic").encode


class Bodies:
    """Makes the bodies of rows.

    Args:
        id_field: as in :class:`bagent.rows.config.RowsConfig`.
        fields: likewise.
    """

    def __init__(self, id_field: str | None, fields: tuple[str, ...] | None) -> None:
        self._id_fields = ("id", "custom_id") if id_field is None else (id_field,)
        self._fields = fields
        self._used = _getter(fields)
        self._content = _getter(fields or None)

    def of(self, chunk: Chunk) -> tuple[list[Json], list[bytes]]:
        """The id (None: it has none) and the body of each item.

        An id that is a list or an object becomes its compact JSON text. An item whose nesting is
        too deep to write again becomes :class:`Unreadable` in the chunk.
        """
        if not chunk.items:
            return [], []
        return self._alike(chunk.items) or self._each(chunk)

    def _alike(self, items: list[Item]) -> tuple[list[Json], list[bytes]] | None:
        """The fast way for rows that all have text or whole numbers as ids, or all none."""
        if set(map(type, items)) != {dict}:
            return None
        rows: list[dict[str, Any]] = items  # type: ignore[assignment]
        ids: list[Json] = []
        try:
            for name in self._id_fields:
                ids = [row.get(name) for row in rows]
                kinds = set(map(type, ids))
                if kinds <= _SIMPLE:
                    used = self._used
                    pairs = zip(ids, rows, strict=True)
                    return ids, [_encode((id_, used(row))) for id_, row in pairs]
                if kinds != _NONE:
                    return None
            content = self._content
            return ids, [_encode((content(row),)) for row in rows]
        except (KeyError, RecursionError, UnicodeEncodeError):
            # Some row lacks a field, is nested too deep, or holds a lone surrogate.
            return None

    def _each(self, chunk: Chunk) -> tuple[list[Json], list[bytes]]:
        ids: list[Json] = []
        bodies: list[bytes] = []
        for position, item in enumerate(chunk.items):
            try:
                id_, body = self._one(item)
            except RecursionError:
                id_, body = None, chunk.raws[position] if chunk.raws else b""
                chunk.items[position] = Unreadable(TOO_DEEP, body)
            ids.append(id_)
            bodies.append(body)
        return ids, bodies

    def _one(self, item: Item) -> tuple[Json, bytes]:
        if isinstance(item, Unreadable):
            return item.id if isinstance(item.id, str | int) else None, item.raw
        id_ = next((item[name] for name in self._id_fields if item.get(name) is not None), None)
        if id_ is None:
            return None, b"[" + _values(item, self._fields or None) + b"]"
        if isinstance(id_, list | dict):
            id_ = _carefully(id_).decode()
        elif isinstance(id_, str):
            id_ = visible(id_)
        return id_, b"[" + _encode(id_) + b"," + _values(item, self._fields) + b"]"


class Occurrences:
    """How often each base key came before. The memory is that of a :class:`KeySet`."""

    _RECENT = 4096

    def __init__(self) -> None:
        self.keys = KeySet()
        self._recent: dict[int, int] = {}

    def count(self, bases: Sequence[int]) -> list[int]:
        """For each base key, how many equal ones came before it: 0 for the first."""
        counts = [0] * len(bases)
        for at in self.keys.add_all(bases):
            counts[at] = self.again(bases[at])
        return counts

    def again(self, base: int) -> int:
        """As :meth:`count`, for one base key that is known to have come before: 1 or more.

        The keys of all repeats are in the set without a gap, so the first missing one is found
        by doubling and halving; no counter is kept for each key.
        """
        before = self._recent.get(base, 0)
        if not before:
            missing = 1
            while derive(base, missing) in self.keys:
                before, missing = missing, 2 * missing
            while missing - before > 1:
                middle = (before + missing) // 2
                if derive(base, middle) in self.keys:
                    before = middle
                else:
                    missing = middle
        self.keys.add(derive(base, before + 1))
        if len(self._recent) >= self._RECENT:
            self._recent.clear()
        self._recent[base] = before + 1
        return before + 1


def digests(bodies: list[bytes]) -> list[bytes]:
    """The base key of each body, as 8 bytes."""
    return [blake2b(body, digest_size=8).digest() for body in bodies]


def derive(base: int, k: int) -> int:
    """The key of a row that ``k`` rows of the same base key came before."""
    if not k:
        return base
    return int.from_bytes(blake2b(pack(">QQ", base, k), digest_size=8).digest(), "big")


def _getter(fields: tuple[str, ...] | None) -> Callable[[dict[str, Any]], Any]:
    """What takes the values of the fields out of a row; KeyError where one is missing."""
    if fields is None:
        return lambda row: row
    if len(fields) < 2:
        return lambda row: tuple([row[name] for name in fields])
    return itemgetter(*fields)


def _values(row: dict[str, Any], fields: tuple[str, ...] | None) -> bytes:
    """What :func:`_getter` takes, encoded, and with nothing where a field is missing."""
    if fields is None:
        return _carefully(row)
    return b"[" + b",".join([_carefully(row[n]) if n in row else b"" for n in fields]) + b"]"


def _carefully(value: Json) -> bytes:
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(visible_data(value))
