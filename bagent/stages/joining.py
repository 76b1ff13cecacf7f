"""One stream of several stages: their rows joined by key, else by id."""

from __future__ import annotations

from functools import partial

import msgspec

from bagent.stages.items import Item
from bagent.stages.tickets import AsTheyCome, Reader, Stream, Ticket
from bagent.types import Json


class Join:
    """Gives each row of the first source what the other sources have for it.

    Rows belong together that have the same key (both were made of one row, unchanged), else the
    same id; then the first such row counts. A row that some source lacks goes on without it, and
    its name is not there in prompts. Fields of the first source go before those of the others.

    Args:
        count: how many sources there are, at least 2.
    """

    def __init__(self, count: int) -> None:
        self.out = Stream()
        self._count = count
        self._open: dict[int, tuple[Item, Ticket]] = {}
        self._by_key: list[dict[int, Item]] = [{} for _ in range(count)]
        self._idle = 0

    def readers(self) -> list[Reader]:
        """One reader for each source, in order."""
        first = AsTheyCome(self._first, self._ended, self.out)
        others = [
            AsTheyCome(partial(self._other, number), self._ended)
            for number in range(1, self._count)
        ]
        return [first, *others]

    def _first(self, item: Item, ticket: Ticket) -> None:
        self._open[item.row.key] = (item, ticket)
        self._look(item.row.key)

    def _other(self, source: int, item: Item, _: Ticket) -> None:
        self._by_key[source].setdefault(item.row.key, item)
        self._look(item.row.key)

    def _look(self, key: int) -> None:
        """Let a row go on whose partners are all there by key."""
        others = self._by_key[1:]
        if key in self._open and all(key in found for found in others):
            item, ticket = self._open.pop(key)
            ticket.fill(joined(item, [found.pop(key) for found in others]))

    def _ended(self) -> None:
        self._idle += 1
        if self._idle < self._count:
            return
        by_id = [_by_id(found) for found in self._by_key[1:]]
        left, self._open = self._open, {}
        for key, (item, ticket) in left.items():
            partners = []
            for found, names in zip(self._by_key[1:], by_id, strict=True):
                partner = found.get(key) or names.get(_name(item.row.id))
                if partner is not None:
                    partners.append(partner)
            ticket.fill(joined(item, partners))
        self._by_key = [{} for _ in range(self._count)]


def joined(item: Item, partners: list[Item]) -> Item:
    """``item`` with the fields, names and failures of ``partners``."""
    data = dict(item.row.data)
    for partner in partners:
        data = {**partner.row.data, **data}
    seen = dict(item.seen)
    for partner in partners:
        seen = {**partner.seen, **seen}
    return msgspec.structs.replace(
        item,
        row=msgspec.structs.replace(item.row, data=data),
        seen=seen,
        ok=item.ok and all(partner.ok for partner in partners),
        also=tuple(ref for partner in partners for ref in partner.parents),
        failed=max([item.failed, *(partner.failed for partner in partners)]),
    )


def _by_id(items: dict[int, Item]) -> dict[str, Item]:
    found: dict[str, Item] = {}
    for item in sorted(items.values(), key=lambda one: (one.row.index, one.answer)):
        found.setdefault(_name(item.row.id), item)
    return found


def _name(row_id: Json) -> str:
    return f"{type(row_id).__name__}:{row_id}"
