"""Reduction trees: groups of rows become one row each, level by level, until few enough remain."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from bagent.agents.plan import MARGIN_TOKENS, StagePlan
from bagent.answers.messages import add_schema_instruction
from bagent.job.templates.template import TemplateFailure
from bagent.stages.base import (
    NO_SURVIVOR,
    Divide,
    FailurePolicy,
    PromptVariables,
    RowRequester,
    StageContext,
)
from bagent.stages.row import (
    Response,
    StageRow,
    derive_key,
    estimate,
    input_response,
    made_item,
    response_of,
    responses,
)
from bagent.stages.slots import OrderedReader, Slot
from bagent.types import Json, Outcome, Row

LEAST_ROOM = 64
"""Tokens that the answers of a group may always have, however long the prompt around them."""


class ReductionGroupRule(msgspec.Struct, frozen=True):
    """How large a group may be."""

    fanin: int | None
    """Answers of a group; None for no limit."""
    available: int | None
    """Tokens that the answers may have together; None where the context is not known."""

    @property
    def longest(self) -> int | None:
        """Tokens of one answer that a prompt shows at most: two answers always fit."""
        return None if self.available is None else max(LEAST_ROOM, self.available) // 2


class GroupBuilder:
    """Forms groups of rows that come in order.

    Args:
        rule: how large a group may be.
        emit: gets each group once no further row belongs to it.
    """

    def __init__(self, rule: ReductionGroupRule, emit: Callable[[list[StageRow]], None]) -> None:
        self._rule = rule
        self._emit = emit
        self._tokens = 0
        self.group: list[StageRow] = []

    def add(self, item: StageRow) -> None:
        """Add the next row."""
        rule = self._rule
        tokens = item.tokens if rule.longest is None else min(item.tokens, rule.longest)
        if (
            rule.available is not None
            and len(self.group) > 1
            and self._tokens + tokens > max(LEAST_ROOM, rule.available)
        ):
            self._emit(self.take_group())
        self.group.append(item)
        self._tokens += tokens
        if rule.fanin is not None and len(self.group) >= rule.fanin:
            self._emit(self.take_group())

    def take_group(self) -> list[StageRow]:
        """Take the rows of the last, unfinished group."""
        group, self.group, self._tokens = self.group, [], 0
        return group


def halves(group: Sequence[StageRow]) -> tuple[list[StageRow], list[StageRow]]:
    """Divide a group in two; the first half is not the smaller one."""
    middle = (len(group) + 1) // 2
    return list(group[:middle]), list(group[middle:])


MOST_RESERVED = 1024
"""Tokens reserved for a reducer's answer where the job sets no ``max_tokens``, at most."""

UNKNOWN_PROMPT = 256
"""Tokens assumed around the answers where the prompt cannot be rendered without any."""

_SHORTER = 0.8

SHORTEST = 8
"""Tokens below which answers are not cut further."""


class ContextFit:
    """Estimates what fits one stage's context, from above and the same in every start."""

    def __init__(self, plan: StagePlan) -> None:
        self._plan = plan
        context = plan.budget.context
        self.usable: int | None = None
        """Tokens that a prompt may have; None where the context is not known."""
        if context is not None:
            max_tokens = plan.settings.max_tokens
            reserved = min(MOST_RESERVED, context // 4) if max_tokens is None else max_tokens
            self.usable = context - reserved - MARGIN_TOKENS

    def available(self, data: dict[str, Any]) -> int | None:
        """Return the tokens that answers may have beside the rest of the prompt; None: no limit."""
        if self.usable is None:
            return None
        empty = {"responses": responses([]), "n": 0, "level": 1}
        try:
            return self.usable - self._size(data, empty)
        except TemplateFailure:
            return self.usable - UNKNOWN_PROMPT

    def fits(self, row: Row) -> bool:
        """Return whether the rendered prompt of a row leaves room for an answer."""
        if self.usable is None:
            return True
        try:
            return self._size(row.data, row.extra or {}) <= self.usable
        except TemplateFailure:
            return True  # the row fails by itself, with the reason

    def _size(self, data: dict[str, Any], extra: dict[str, Json]) -> int:
        plan = self._plan
        if plan.prompt.raw:
            return estimate(plan.prompt.render_raw(data, extra).encode("utf-8", "replace"))
        messages = plan.prompt.render(data, extra)
        if plan.describe and plan.schema is not None:
            messages = add_schema_instruction(messages, plan.schema)
        texts = [str(message.get("content")) for message in messages]
        return sum(estimate(text.encode("utf-8", "replace")) + 8 for text in texts)


def shortened(response: Response, tokens: int | None) -> Response:
    """Return ``response``, cut to about ``tokens`` tokens with a note where it is longer."""
    if tokens is None or _printed(response) <= tokens:
        return response
    output = response["output"]
    full_text = response["text"] or ""
    if not response.is_good:
        full_text = response["error"] or ""
    elif output is not None:
        full_text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    length = len(full_text)
    while True:
        length = int(length * _SHORTER)
        cut = f"[cut: {len(full_text) - length} of {len(full_text)} characters left out]"
        text = f"{full_text[:length]} ...{cut}"
        short = Response(response, output=None, text=text)
        if not response.is_good:
            short = Response(response, error=text)
        if length == 0 or _printed(short) <= tokens:
            return short


def _printed(response: Response) -> int:
    try:
        return estimate(msgspec.json.encode(response.printed_fields()))
    except (UnicodeEncodeError, TypeError):
        return estimate(json.dumps(response.printed_fields(), default=str).encode())


class ReduceRule(msgspec.Struct, frozen=True):
    """The limits of a reduction."""

    fanin: int | None
    """Answers of a group; None for no limit."""
    goal: int
    """Rows that may remain at the end."""


class Reducer:
    """Asks about the groups of all trees of one stage."""

    def __init__(
        self,
        requester: RowRequester,
        rule: ReduceRule,
        policy: FailurePolicy,
        variables: PromptVariables,
        context: StageContext,
    ) -> None:
        self.name = requester.plan.name
        self.rule = rule
        self.policy = policy
        self.variables = variables
        self.context = context
        self.fit = ContextFit(requester.plan)
        self._requester = requester
        self._keys: set[int] = set()

    def finish(self) -> None:
        """Take back what earlier starts made of groups that this start does not have."""
        self.context.results.keep_only(self.name, self._keys)

    def note(self, row: Row) -> None:
        """Note that ``row`` is one of this start's."""
        if self.context.results.takes_back:
            self._keys.add(row.key)

    def response(self, item: StageRow, longest: int | None) -> Response:
        """Return a row as the prompt shows it."""
        if item.location is None:
            return shortened(input_response(item.row), longest)
        return shortened(response_of(self.context.results.read(item.location)), longest)

    def ask(self, node: Node, slot: Slot, divide: Divide) -> None:
        """Fill a slot with the answer about a group; ``divide`` is called where it is too long."""
        self.note(node.row)
        done = partial(self._done, node, slot)
        if any(item.ok for item in node.group):
            unit = node.row.key, 0
            self._requester.ask(unit, node.group, node.rendered_row, done, divide)
            return
        first = self.policy.reason(node.group[0])
        message = f"none of {len(node.group)} rows came out ok; the first: {first}"
        error = NO_SURVIVOR, message
        done(*self.context.record(self.name, node.row, node.group, error=error))

    def _done(self, node: Node, slot: Slot, outcome: Outcome, location: int) -> None:
        row = msgspec.structs.replace(node.row, parents=(), parents_failed=None)
        failed = node.row.parents_failed or 0
        slot.fill(made_item(row, outcome, location, root=node.root, seen=node.seen, failed=failed))


class Node:
    """One group on its way to one answer.

    Args:
        reducer: what the trees of the stage share.
        row: the row that is sent, without the variables of its prompt.
        root: the input row that the group goes back to, if there is one.
        group: the rows.
        level: the level of the tree, from 1.
        longest: the tokens of each answer that the prompt shows at most; None for no limit.
    """

    __slots__ = ("_level", "_reducer", "group", "longest", "root", "row", "seen")

    def __init__(
        self,
        reducer: Reducer,
        row: Row,
        root: Row | None,
        group: list[StageRow],
        level: int,
        longest: int | None,
    ) -> None:
        self.row = row
        self.root = root
        self.group = group
        self.seen = _shared(group)
        self.longest = longest
        self._reducer = reducer
        self._level = level

    @property
    def dropped(self) -> int:
        """Failed input rows that it counts beside those of its group."""
        return (self.row.parents_failed or 0) - sum(item.failed for item in self.group)

    def shorten(self) -> bool:
        """Halve what is shown of the longest answer; return False where that is too little."""
        longest = max(item.tokens for item in self.group)
        longest = (longest if self.longest is None else min(self.longest, longest)) // 2
        if longest < SHORTEST:
            return False
        self.longest = longest
        return True

    def rendered_row(self) -> Row:
        """Return the row with the answers that its prompt needs."""
        reducer = self._reducer
        answers = [reducer.response(item, self.longest) for item in self.group]
        variables = reducer.variables.of(msgspec.structs.replace(self.group[0], seen=self.seen))
        extra: dict[str, Json] = {
            **variables,
            "responses": responses(answers),
            "n": len(answers),
            "level": self._level,
        }
        return msgspec.structs.replace(self.row, extra=extra)


def _shared(group: Sequence[StageRow]) -> dict[str, int]:
    """Return the outcomes of earlier stages that all rows of a group go back to."""
    first = group[0].seen
    return {
        name: location
        for name, location in first.items()
        if all(item.seen.get(name) == location for item in group)
    }


class Tree:
    """One reduction: leaves in order, nodes in levels, and the rows that remain at the end.

    Args:
        reducer: asks about groups.
        label: its name in ids.
        data: the fields of its rows.
        root: the input row that all of it goes back to, if there is one.
        slot: the slot of what remains.
    """

    def __init__(
        self, reducer: Reducer, label: str, data: dict[str, Any], root: Row | None, slot: Slot
    ) -> None:
        self.reducer = reducer
        self.dropped = 0
        """Failed input rows that were left out."""
        self.unreported_failures = 0
        """Those of them that no node counts yet."""
        self._label = label
        self._data = data
        self._root = root
        self._first_dropped: Row | None = None
        self._leaves = 0
        self._slot = slot
        self._rule: ReductionGroupRule | None = None
        self._first = Level(self, 1)

    @property
    def rule(self) -> ReductionGroupRule:
        """How large groups may be."""
        if self._rule is None:
            available = self.reducer.fit.available(self._data)
            self._rule = ReductionGroupRule(self.reducer.rule.fanin, available)
        return self._rule

    def add(self, item: StageRow) -> None:
        """Add the next leaf."""
        self._leaves += 1
        self._first.add(item)

    def drop(self, item: StageRow) -> None:
        """Leave out a row that failed."""
        self.dropped += max(1, item.failed)
        self.unreported_failures += max(1, item.failed)
        self._first_dropped = self._first_dropped or item.row

    def end(self) -> None:
        """Handle the end of the leaves."""
        self._first.end_input()

    def key(self, level: int, position: str, group: list[StageRow]) -> int:
        """Return the key of the row that ``group`` becomes."""
        return derive_key((item.row.key for item in group), self.reducer.name, level, position)

    def node(
        self, level: int, position: str, group: list[StageRow], longest: int | None, dropped: int
    ) -> Node:
        """Make the node of ``group``; ``dropped`` failures count among its parents'."""
        base = self._root or group[0].row
        row = Row(
            index=base.index,
            key=self.key(level, position, group),
            id=f"{self._label}:{level}.{position}",
            data=self._data,
            source=base.source,
            line=base.line,
            parents=tuple(item.ref for item in group),
            parents_failed=sum(item.failed for item in group) + dropped,
        )
        return Node(self.reducer, row, self._root, group, level, longest)

    def finish(self, remaining: list[StageRow]) -> None:
        """Fill the slot with the rows of the last level."""
        if len(remaining) == 1:
            self._slot.fill(remaining[0])
        elif remaining or not (self._leaves or self.dropped):
            for item, row_slot in zip(remaining, self._slot.split(len(remaining)), strict=True):
                row_slot.fill(item)
        else:
            self._fail()

    def _fail(self) -> None:
        """Fill the slot with a failure: every leaf failed before and was dropped."""
        reducer, root, base = self.reducer, self._root, self._root or self._first_dropped
        assert base is not None
        row = Row(
            index=base.index,
            key=derive_key((root.key,) if root else (), reducer.name, self._label, "none"),
            id=f"{self._label}:0.0",
            data=self._data,
            source=base.source,
            line=base.line,
            parents_failed=self.dropped,
        )
        reducer.note(row)
        message = f"nothing is left to reduce: {self.dropped} rows failed before and were dropped"
        _, location = reducer.context.record(reducer.name, row, error=(NO_SURVIVOR, message))
        self._slot.fill(
            StageRow(row, root, reducer.name, 0, False, location, {}, failed=self.dropped)
        )


class Level:
    """One level of a tree. Level 1 gets leaves, level N the nodes of level N - 1."""

    def __init__(self, tree: Tree, number: int) -> None:
        self._tree = tree
        self._number = number
        self._builder: GroupBuilder | None = None
        self._announced = 0
        self._nodes = 0
        self._waiting: list[StageRow] = []
        self._order = OrderedReader(self.add, self.end_input)
        self._next: Level | None = None

    def announce(self, slot: Slot) -> None:
        """Expect a node of the level before in ``slot``."""
        self.expect_more()
        self._order.take(slot)

    def expect_more(self) -> None:
        """Count one more node of the level before."""
        self._announced += 1
        if self._needed and self._waiting:
            waiting, self._waiting = self._waiting, []
            for item in waiting:
                self._form(item)

    def end(self) -> None:
        """Handle that the level before has formed its last group."""
        self._order.end()

    @property
    def _needed(self) -> bool:
        """Whether this level has to reduce: its rows may be few enough already."""
        return self._number == 1 or self._announced > self._tree.reducer.rule.goal

    def add(self, item: StageRow) -> None:
        """Add the next row in order; one that remains at the end may have failed."""
        if self._needed:
            self._form(item)
        else:
            self._waiting.append(item)

    def _form(self, item: StageRow) -> None:
        tree = self._tree
        if not tree.reducer.policy.admits(item):
            tree.drop(item)
            return
        if self._builder is None:
            self._builder = GroupBuilder(tree.rule, self._ask_group)
        self._builder.add(item)

    def end_input(self) -> None:
        """Ask about the last group, or finish the tree, once all rows of this level are in."""
        tree = self._tree
        if not self._needed:
            tree.finish(self._waiting)
            return
        group = self._builder.take_group() if self._builder is not None else []
        if len(group) == 1 and (self._nodes or self._number > 1):
            slot = Slot()
            self._next_level().announce(slot)
            slot.fill(group[0])
        elif group:
            self._ask_group(group)
        if self._next is None:
            tree.finish([])
        else:
            self._next.end()

    def _next_level(self) -> Level:
        if self._next is None:
            self._next = Level(self._tree, self._number + 1)
        return self._next

    # --- groups -----------------------------------------------------------------------------------

    def _ask_group(self, group: list[StageRow]) -> None:
        """Ask about a group, or about its halves where its prompt is too long by estimate."""
        tree, longest, position = self._tree, self._tree.rule.longest, str(self._nodes)
        node = tree.node(self._number, position, group, longest, tree.unreported_failures)
        if longest is not None and sum(item.tokens for item in group) > longest:
            # The group is near the limit by estimate: render its prompt.
            while not tree.reducer.fit.fits(node.rendered_row()):
                if len(group) > 2:
                    for half in halves(group):
                        self._ask_group(half)
                    return
                if not node.shorten():
                    break
        tree.unreported_failures = 0
        self._nodes += 1
        slot = Slot()
        self._next_level().announce(slot)
        self._ask(node, position, slot)

    def _ask(self, node: Node, position: str, slot: Slot) -> None:
        """Ask about a group, or about its parts where an earlier start had to divide it."""
        divide = partial(self._divide, node, position, slot)
        if self._tree.reducer.context.results.has_earlier and self._was_divided(node, position):
            divide()
        else:
            self._tree.reducer.ask(node, slot, divide)

    def _divide(self, node: Node, position: str, slot: Slot) -> bool:
        """Ask about the halves of a refused group, or show less of each of two answers."""
        if len(node.group) <= 2:
            if not node.shorten():
                return False
            self._ask(node, position, slot)
            return True
        self._next_level().expect_more()
        dropped = node.dropped
        for (half, name), part in zip(_parts(node.group, position), slot.split(2), strict=True):
            half_node = self._tree.node(self._number, name, half, node.longest, dropped)
            dropped = 0
            self._ask(half_node, name, part)
        return True

    def _was_divided(self, node: Node, position: str) -> bool:
        """Return whether an earlier start has an answer about a part of a group, none about all."""
        tree, results = self._tree, self._tree.reducer.context.results

        def is_finished(group: list[StageRow], position: str) -> bool:
            return results.is_finished(tree.key(self._number, position, group), tree.reducer.name)

        def has_answers(group: list[StageRow], position: str) -> bool:
            return len(group) > 2 and any(
                is_finished(half, name) or has_answers(half, name)
                for half, name in _parts(group, position)
            )

        return not is_finished(node.group, position) and has_answers(node.group, position)


def _parts(group: list[StageRow], position: str) -> list[tuple[list[StageRow], str]]:
    """Return the halves of a group with their positions."""
    return [(half, f"{position}.{number}") for number, half in enumerate(halves(group))]
