"""The reduce stage: one tree for all rows, for each value of a field, or for each input row."""

from __future__ import annotations

from collections import deque

import msgspec

from bagent.job.templates.environment import to_text
from bagent.stages.base import RowRequester
from bagent.stages.reduction_tree import Reducer, Tree
from bagent.stages.row import StageRow, value_of
from bagent.stages.slots import OrderedReader, Reader, Slot, Stream
from bagent.types import Json

BY_ROW = ("id",)
"""``by: id`` is by the input row that everything goes back to."""


class ReduceStage:
    """Makes trees and waits for them.

    Args:
        by: fields to group by.
        sources: how many stages it reads; the rows of each come after those of the one before.
    """

    def __init__(
        self, asker: RowRequester, reducer: Reducer, by: tuple[str, ...], sources: int
    ) -> None:
        self.name = reducer.name
        self.out = Stream()
        self._asker = asker
        self._reducer = reducer
        self._by = by
        self._sources = sources
        self._trees: dict[bytes, Tree] = {}
        self._open = 0
        self._ended = False

    def readers(self) -> list[Reader]:
        """One reader for each source."""
        if self._by == BY_ROW and self._sources == 1:
            return [_RootByRoot(self)]
        first = OrderedReader(self._leaf, self._leaves_over)
        if self._sources == 1:
            return [first]
        chain = _Chain(first, self._sources)
        return list(chain.parts)

    async def run(self) -> None:
        """Ask until all trees are done."""
        await self._asker.run()
        self._reducer.all_over()

    # --- trees ------------------------------------------------------------------------------------

    def hold(self, place: Slot) -> None:
        """Keep a place in the stream for what a tree leaves."""
        self._open += 1
        self.out.push(place)
        place.watch(self._tree_over)

    def tree_of(self, item: StageRow, place: Slot) -> Tree:
        """The tree of the input row that ``item`` goes back to."""
        root = item.root
        base = root if root is not None else item.row
        return Tree(self._reducer, to_text(base.id), dict(base.data), root, place)

    def _tree_over(self, _: Slot) -> None:
        self._open -= 1
        self._look()

    def all_begun(self) -> None:
        """No more trees come."""
        self._ended = True
        self._reducer.entrance.tell()
        self.out.end()
        self._look()

    def _look(self) -> None:
        if self._ended and not self._open:
            self._asker.close()

    # --- all rows, or by fields -------------------------------------------------------------------

    def _leaf(self, item: StageRow) -> None:
        values = [self._value(name, item) for name in self._by]
        place = msgspec.json.encode(values)
        tree = self._trees.get(place)
        if tree is None:
            names = [name.rpartition(".")[2] for name in self._by]
            label = ",".join(to_text(value) for value in values) or self.name
            data = dict(zip(names, values, strict=True))
            ticket = Slot()
            self.hold(ticket)
            if self._by == BY_ROW:
                tree = self.tree_of(item, ticket)
            else:
                tree = Tree(self._reducer, label, data, None, ticket)
            self._trees[place] = tree
        tree.add(item)

    def _leaves_over(self) -> None:
        trees, self._trees = self._trees, {}
        for tree in trees.values():
            tree.end()
        self.all_begun()

    def _value(self, name: str, item: StageRow) -> Json:
        """The value of a field to group by: of the row, of a stage's answer, of the last answer."""
        first, *rest = name.split(".")
        found: Json
        if name == "id":
            return item.root.id if item.root is not None else item.row.id
        records = self._reducer.world.records
        if first in item.row.data:
            found = item.row.data[first]
        elif first in item.seen:
            found = value_of(records.read(item.seen[first]))
        else:
            answer = value_of(records.read(item.place)) if item.place is not None else None
            found = answer.get(first) if isinstance(answer, dict) and item.ok else None
        for part in rest:
            found = found.get(part) if isinstance(found, dict) else None
        return found


class _RootByRoot:
    """Makes a tree of each input row's own rows, as soon as the row is announced."""

    def __init__(self, stage: ReduceStage) -> None:
        self._stage = stage

    def take(self, ticket: Slot) -> None:
        """All that comes of one input row."""
        stage = self._stage
        place = Slot()
        stage.hold(place)
        found: list[Tree] = []

        def leaf(item: StageRow) -> None:
            if not found:
                found.append(stage.tree_of(item, place))
            found[0].add(item)

        def over() -> None:
            if found:
                found[0].end()
            else:
                place.split(0)

        order = OrderedReader(leaf, over)
        order.take(ticket)
        order.end()

    def end(self) -> None:
        """No more input rows come."""
        self._stage.all_begun()


class _Chain:
    """Several streams as one: the tickets of each follow those of the one before."""

    def __init__(self, target: Reader, count: int) -> None:
        self._target = target
        self._reached = 0
        self.parts = [_Part(self, number) for number in range(count)]

    def look(self) -> None:
        """Pass on what is due."""
        while self._reached < len(self.parts):
            part = self.parts[self._reached]
            while part.waiting:
                self._target.take(part.waiting.popleft())
            if not part.ended:
                return
            self._reached += 1
        self._target.end()


class _Part:
    """One of the streams of a chain."""

    def __init__(self, chain: _Chain, number: int) -> None:
        self.number = number
        self.waiting: deque[Slot] = deque()
        self.ended = False
        self._chain = chain

    def take(self, ticket: Slot) -> None:
        """Take the next ticket of this stream."""
        self.waiting.append(ticket)
        self._chain.look()

    def end(self) -> None:
        """This stream has no more."""
        self.ended = True
        self._chain.look()
