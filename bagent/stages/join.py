"""One stream of several stages: their rows joined by key, by id, or by what they go back to."""

from __future__ import annotations

from functools import partial

import msgspec

from bagent.stages.row import StageRow
from bagent.stages.slots import Reader, Slot, Stream, UnorderedReader
from bagent.types import Json


class Join:
    """Gives each row of the first source what the other sources have for it.

    Rows belong together that have the same key (both were made of one row, unchanged), else the
    same id; then the first such row counts. Else a row gets the only one that goes back to the same
    input row: a reduction ``by: id`` is joined to its row, and an answer about a row to each of
    its pieces. A row that some source lacks goes on without it, and its name is not there in
    prompts. Fields of the first source go before those of the others.

    Args:
        count: how many sources there are, at least 2.
    """

    def __init__(self, count: int) -> None:
        self.out = Stream()
        self._count = count
        self._open: dict[int, tuple[StageRow, Slot]] = {}
        self._by_key: list[dict[int, StageRow]] = [{} for _ in range(count)]
        self._idle = 0

    def readers(self) -> list[Reader]:
        """One reader for each source, in order."""
        first = UnorderedReader(self._first, self._ended, self.out)
        others = [
            UnorderedReader(partial(self._other, number), self._ended)
            for number in range(1, self._count)
        ]
        return [first, *others]

    def _first(self, item: StageRow, ticket: Slot) -> None:
        self._open[item.row.key] = (item, ticket)
        self._look(item.row.key)

    def _other(self, source: int, item: StageRow, _: Slot) -> None:
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
        left, self._open = self._open, {}
        sources = [_Left(found) for found in self._by_key[1:]] if left else []
        for item, ticket in left.values():
            found = [source.partner(item) for source in sources]
            ticket.fill(joined(item, [one for one in found if one is not None]))
        self._by_key = [{} for _ in range(self._count)]


class _Left:
    """The rows of one source that no row found by its key while both came."""

    def __init__(self, items: dict[int, StageRow]) -> None:
        self._by_key = items
        self._by_name: dict[str, StageRow] = {}
        self._by_root: dict[int, list[StageRow]] = {}
        self._by_base: dict[str, list[StageRow]] = {}
        for item in sorted(items.values(), key=lambda one: (one.row.index, one.answer)):
            self._by_name.setdefault(_name(item.row.id), item)
            self._by_base.setdefault(_base(item), []).append(item)
            if item.root is not None:
                self._by_root.setdefault(item.root.key, []).append(item)

    def partner(self, item: StageRow) -> StageRow | None:
        """The row that belongs to ``item``."""
        row = item.row
        return self._by_key.get(row.key) or self._by_name.get(_name(row.id)) or self._only(item)

    def _only(self, item: StageRow) -> StageRow | None:
        """The only one that goes back to the same input row, and to the same rows on the way."""
        found = self._by_base.get(_base(item), [])
        if item.root is not None and any(one.root is not None for one in found):
            found = self._by_root.get(item.root.key, [])
        near = [one for one in found if _agree(one.seen, item.seen)]
        return near[0] if len(near) == 1 else None


def _agree(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether two rows have the same outcomes of all stages that both have been through."""
    return all(other.get(name, place) == place for name, place in one.items())


def joined(item: StageRow, partners: list[StageRow]) -> StageRow:
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


def _name(row_id: Json) -> str:
    return f"{type(row_id).__name__}:{row_id}"


def _base(item: StageRow) -> str:
    """The id of the input row that a row goes back to, else its own."""
    return _name(item.row.id if item.root is None else item.root.id)
