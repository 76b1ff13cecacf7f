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
"""``by: id`` groups by the input row that rows go back to."""


class ReduceStage:
    """Reduces rows in one tree, or in one for each group.

    Args:
        requester: asks about groups.
        reducer: what the trees share.
        by: fields to group by.
        sources: how many stages it reads; the rows of each follow those of the one before.
    """

    def __init__(
        self, requester: RowRequester, reducer: Reducer, by: tuple[str, ...], sources: int
    ) -> None:
        self.name = reducer.name
        self.out = Stream()
        self._requester = requester
        self._reducer = reducer
        self._by = by
        self._sources = sources
        self._trees: dict[bytes, Tree] = {}
        self._open = 0
        self._ended = False

    def readers(self) -> list[Reader]:
        """Return one reader for each source."""
        if self._by == BY_ROW and self._sources == 1:
            return [_TreePerSlot(self)]
        first = OrderedReader(self._leaf, self._on_last_leaf)
        if self._sources == 1:
            return [first]
        chain = _Chain(first, self._sources)
        return list(chain.parts)

    async def run(self) -> None:
        """Ask until all trees are finished."""
        await self._requester.run()
        self._reducer.finish()

    # --- trees ------------------------------------------------------------------------------------

    def add_result(self, slot: Slot) -> None:
        """Announce the slot of a tree's result."""
        self._open += 1
        self.out.push(slot)
        slot.watch(self._on_tree_end)

    def tree_of(self, item: StageRow, slot: Slot) -> Tree:
        """Make the tree of the input row that ``item`` goes back to."""
        root = item.root
        base = root if root is not None else item.row
        return Tree(self._reducer, to_text(base.id), dict(base.data), root, slot)

    def _on_tree_end(self, _: Slot) -> None:
        self._open -= 1
        self._close_if_done()

    def end(self) -> None:
        """Handle the end of the input: no more trees come."""
        self._ended = True
        self._reducer.policy.report_dropped()
        self.out.end()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._ended and not self._open:
            self._requester.close()

    # --- all rows, or by fields -------------------------------------------------------------------

    def _leaf(self, item: StageRow) -> None:
        values = [self._value(name, item) for name in self._by]
        tree_key = msgspec.json.encode(values)
        tree = self._trees.get(tree_key)
        if tree is None:
            names = [name.rpartition(".")[2] for name in self._by]
            label = ",".join(to_text(value) for value in values) or self.name
            data = dict(zip(names, values, strict=True))
            slot = Slot()
            self.add_result(slot)
            if self._by == BY_ROW:
                tree = self.tree_of(item, slot)
            else:
                tree = Tree(self._reducer, label, data, None, slot)
            self._trees[tree_key] = tree
        tree.add(item)

    def _on_last_leaf(self) -> None:
        trees, self._trees = self._trees, {}
        for tree in trees.values():
            tree.end()
        self.end()

    def _value(self, name: str, item: StageRow) -> Json:
        """Return a field to group by: of the row, of a stage's answer, or of the last answer."""
        first, *properties = name.split(".")
        value: Json
        if name == "id":
            return item.root.id if item.root is not None else item.row.id
        results = self._reducer.context.results
        if first in item.row.data:
            value = item.row.data[first]
        elif first in item.seen:
            value = value_of(results.read(item.seen[first]))
        else:
            answer = value_of(results.read(item.location)) if item.location is not None else None
            value = answer.get(first) if isinstance(answer, dict) and item.ok else None
        for key in properties:
            value = value.get(key) if isinstance(value, dict) else None
        return value


class _TreePerSlot:
    """Reader that makes a tree of each input row's own rows, as soon as the row is announced."""

    def __init__(self, stage: ReduceStage) -> None:
        self._stage = stage

    def take(self, slot: Slot) -> None:
        """Reduce everything that comes in one slot."""
        stage = self._stage
        result = Slot()
        stage.add_result(result)
        tree: Tree | None = None

        def add_leaf(item: StageRow) -> None:
            nonlocal tree
            tree = tree or stage.tree_of(item, result)
            tree.add(item)

        def end_tree() -> None:
            if tree is not None:
                tree.end()
            else:
                result.split(0)

        order = OrderedReader(add_leaf, end_tree)
        order.take(slot)
        order.end()

    def end(self) -> None:
        """Handle the end of the input."""
        self._stage.end()


class _Chain:
    """Several streams as one: the slots of each follow those of the one before."""

    def __init__(self, target: Reader, count: int) -> None:
        self._target = target
        self._reached = 0
        self.parts = [_Part(self) for _ in range(count)]

    def pass_on(self) -> None:
        """Pass slots on up to the first stream that has not ended."""
        while self._reached < len(self.parts):
            part = self.parts[self._reached]
            while part.waiting:
                self._target.take(part.waiting.popleft())
            if not part.ended:
                return
            self._reached += 1
        self._target.end()


class _Part:
    """Reader of one of the streams of a chain."""

    def __init__(self, chain: _Chain) -> None:
        self.waiting: deque[Slot] = deque()
        self.ended = False
        self._chain = chain

    def take(self, slot: Slot) -> None:
        """Take the next slot of this stream."""
        self.waiting.append(slot)
        self._chain.pass_on()

    def end(self) -> None:
        """Handle the end of this stream."""
        self.ended = True
        self._chain.pass_on()
