"""Rows become one: groups, and groups of what they gave, until so few are left as are wanted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from bagent.agents.plan import StagePlan
from bagent.agents.token_budget import MARGIN_TOKENS
from bagent.answers.retry_prompt import add_schema_instruction
from bagent.job.templates.template import TemplateFailure
from bagent.stages.base import (
    NO_SURVIVOR,
    Divide,
    FailurePolicy,
    PromptVariables,
    RowRequester,
    StageContext,
    make_outcome,
)
from bagent.stages.row import (
    Response,
    StageRow,
    answer_tokens,
    derive_key,
    estimate,
    input_response,
    response_of,
    responses,
)
from bagent.stages.slots import OrderedReader, Slot
from bagent.types import Json, Outcome, Row

LEAST_ROOM = 64
"""Tokens that the answers of a group may have at least, however long the prompt around them."""


class ReductionGroupRule(msgspec.Struct, frozen=True):
    """How large a group may be.

    ``fanin`` is how many answers, None for no limit. ``room`` is how many tokens they may have
    together, None where the context is not known; two of them always fit, since each is cut to
    half of it.
    """

    fanin: int | None
    room: int | None

    @property
    def longest(self) -> int | None:
        """How many tokens of one answer are shown at most."""
        return None if self.room is None else max(LEAST_ROOM, self.room) // 2


class GroupBuilder:
    """Forms groups of rows that come in order.

    Args:
        emit: gets each group once no further row belongs to it.
    """

    def __init__(self, rule: ReductionGroupRule, emit: Callable[[list[StageRow]], None]) -> None:
        self._rule = rule
        self._emit = emit
        self._tokens = 0
        self.group: list[StageRow] = []

    def add(self, item: StageRow) -> None:
        """Take the next row."""
        rule = self._rule
        tokens = item.tokens if rule.longest is None else min(item.tokens, rule.longest)
        if (
            rule.room is not None
            and len(self.group) > 1
            and self._tokens + tokens > max(LEAST_ROOM, rule.room)
        ):
            self._full()
        self.group.append(item)
        self._tokens += tokens
        if rule.fanin is not None and len(self.group) >= rule.fanin:
            self._full()

    def _full(self) -> None:
        group, self.group, self._tokens = self.group, [], 0
        self._emit(group)

    def take(self) -> list[StageRow]:
        """The rows of the last, unfinished group."""
        group, self.group, self._tokens = self.group, [], 0
        return group


def halves(group: Sequence[StageRow]) -> tuple[list[StageRow], list[StageRow]]:
    """A group that turned out too long, in two; the first half is not the smaller one."""
    middle = (len(group) + 1) // 2
    return list(group[:middle]), list(group[middle:])


MOST_RESERVED = 1024
"""Tokens kept for a reducer's answer where the job names no number."""

UNKNOWN_PROMPT = 256
"""Tokens thought to stand around the answers where the prompt cannot be rendered without any."""

_SHORTER = 0.8

SHORTEST = 8
"""Tokens below which answers are not cut further."""


class ContextFit:
    """Reckons with one stage's context, on the safe side and the same in every start.

    ``usable`` is how many tokens a prompt may have; None where the context is not known.
    """

    def __init__(self, plan: StagePlan) -> None:
        self._plan = plan
        context = plan.budget.context
        self.usable: int | None = None
        if context is not None:
            asked = plan.settings.max_tokens
            reserved = min(MOST_RESERVED, context // 4) if asked is None else asked
            self.usable = context - reserved - MARGIN_TOKENS

    def room(self, data: dict[str, Any], names: dict[str, Json]) -> int | None:
        """Tokens that answers may have beside the rest of the prompt; None: no limit is known."""
        if self.usable is None:
            return None
        empty = {**names, "responses": responses([]), "n": 0, "level": 1}
        try:
            return self.usable - self._size(data, empty)
        except TemplateFailure:
            return self.usable - UNKNOWN_PROMPT

    def fits(self, row: Row) -> bool:
        """Whether the prompt of a row, as it is rendered, leaves room for an answer."""
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
    """``response``, cut to about ``tokens`` tokens where it is longer, and saying so."""
    if tokens is None or _printed(response) <= tokens:
        return response
    output = response["output"]
    whole = response["text"] or ""
    if response["status"] != "ok":
        whole = response["error"] or ""
    elif output is not None:
        whole = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    kept = len(whole)
    while True:
        kept = int(kept * _SHORTER)
        text = f"{whole[:kept]} ...[cut: {len(whole) - kept} of {len(whole)} characters left out]"
        found = Response(response, output=None, text=text)
        if response["status"] != "ok":
            found = Response(response, error=text)
        if kept == 0 or _printed(found) <= tokens:
            return found


def _printed(response: Response) -> int:
    try:
        return estimate(msgspec.json.encode(response.shown()))
    except (UnicodeEncodeError, TypeError):
        return estimate(json.dumps(response.shown(), default=str).encode())


class ReduceRule(msgspec.Struct, frozen=True):
    """What a reduction keeps to: at most ``fanin`` answers a group, ``goal`` rows at the end."""

    fanin: int | None
    goal: int


class Reducer:
    """Asks about groups: what all trees of one stage share."""

    def __init__(
        self,
        asker: RowRequester,
        rule: ReduceRule,
        entrance: FailurePolicy,
        names: PromptVariables,
        world: StageContext,
    ) -> None:
        self.name = asker.plan.name
        self.rule = rule
        self.entrance = entrance
        self.names = names
        self.world = world
        self.fit = ContextFit(asker.plan)
        self._asker = asker
        self._keys: set[int] = set()

    def all_over(self) -> None:
        """Every tree is done: what other groups gave in earlier starts counts no more."""
        self.world.records.keep_only(self.name, self._keys)

    def seen(self, row: Row) -> Row:
        """Note that ``row`` is one of this start's, where earlier starts have left some."""
        if self.world.records.takes_back:
            self._keys.add(row.key)
        return row

    def response(self, item: StageRow, longest: int | None) -> Response:
        """A row as the prompt shows it."""
        if item.place is None:
            return shortened(input_response(item.row), longest)
        return shortened(response_of(self.world.records.read(item.place)), longest)

    def ask(self, node: Node, ticket: Slot, divide: Divide) -> None:
        """Put the answer about a group in its place."""
        self.seen(node.row)
        if not any(item.ok for item in node.group):
            self._nothing_left(node, ticket)
            return
        done = partial(self._done, node, ticket)
        self._asker.ask((node.row.key, 0), node.group, node.made, done, divide)

    def _nothing_left(self, node: Node, ticket: Slot) -> None:
        found = self.world.records.finished(node.row.key, self.name, 0, node.group)
        if found is None:
            count = len(node.group)
            first = self.entrance.reason(node.group[0])
            words = f"none of {count} rows came out ok; the first: {first}"
            outcome = make_outcome(
                self.name, node.row, self.world.now(), error=(NO_SURVIVOR, words)
            )
            found = outcome, self.world.records.write(outcome, node.row)
        self._done(node, ticket, *found)

    def _done(self, node: Node, ticket: Slot, outcome: Outcome, place: int) -> None:
        ok = outcome.status == "ok"
        failed = node.row.parents_failed or 0
        ticket.fill(
            StageRow(
                row=msgspec.structs.replace(node.row, parents=(), parents_failed=None),
                root=node.root,
                stage=self.name,
                answer=0,
                ok=ok,
                place=place,
                seen={**node.seen, self.name: place},
                tokens=answer_tokens(outcome),
                failed=failed if ok else max(1, failed),
            )
        )


class Node:
    """One group on its way to one answer.

    ``row`` is what is sent, less what ``made`` adds. ``longest`` is how many tokens of each answer
    its prompt shows at most; None for no limit.
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
        self._reducer = reducer
        self._level = level
        self.longest = longest

    def shorten(self) -> bool:
        """Show half of what the longest answer shows now; False where that says too little."""
        longest = max(item.tokens for item in self.group)
        longest = (longest if self.longest is None else min(self.longest, longest)) // 2
        if longest < SHORTEST:
            return False
        self.longest = longest
        return True

    def made(self) -> Row:
        """The row with the answers that its prompt needs."""
        reducer = self._reducer
        found = [reducer.response(item, self.longest) for item in self.group]
        names = reducer.names.of(msgspec.structs.replace(self.group[0], seen=self.seen))
        extra: dict[str, Json] = {
            **names,
            "responses": responses(found),
            "n": len(found),
            "level": self._level,
        }
        return msgspec.structs.replace(self.row, extra=extra)


def _shared(group: Sequence[StageRow]) -> dict[str, int]:
    """What all rows of a group go back to: the same outcome of an earlier stage."""
    first = group[0].seen
    return {
        name: place
        for name, place in first.items()
        if all(item.seen.get(name) == place for item in group)
    }


class Tree:
    """One reduction: leaves in order, nodes in levels, and what is left at the end.

    Args:
        reducer: asks.
        label: its name in ids.
        data: the fields of its rows.
        root: the input row that all of it goes back to, if there is one.
        ticket: the place of what is left.
    """

    def __init__(
        self, reducer: Reducer, label: str, data: dict[str, Any], root: Row | None, ticket: Slot
    ) -> None:
        self.reducer = reducer
        self.label = label
        self.data = data
        self.root = root
        self.leaves = 0
        self.dropped = 0
        self.not_reported = 0
        self.over = False
        self._ticket = ticket
        self._rule: ReductionGroupRule | None = None
        self._first = Level(self, 1)

    @property
    def rule(self) -> ReductionGroupRule:
        """How large groups may be."""
        if self._rule is None:
            room = self.reducer.fit.room(self.data, {})
            self._rule = ReductionGroupRule(self.reducer.rule.fanin, room)
        return self._rule

    def add(self, item: StageRow) -> None:
        """Take the next leaf."""
        self.leaves += 1
        self._first.add(item)

    def end(self) -> None:
        """No more leaves come."""
        self._first.over()

    def key(self, level: int, position: str, group: list[StageRow]) -> int:
        """The key of the row that ``group`` becomes."""
        return derive_key((item.row.key for item in group), self.reducer.name, level, position)

    def node(
        self,
        level: int,
        position: str,
        group: list[StageRow],
        longest: int | None,
        dropped: int = 0,
    ) -> Node:
        """The row that ``group`` becomes; ``dropped`` failures count among its parents'."""
        reducer = self.reducer
        base = self.root or group[0].row
        failed = sum(item.failed for item in group) + dropped
        row = Row(
            index=base.index,
            key=self.key(level, position, group),
            id=f"{self.label}:{level}.{position}",
            data=self.data,
            source=base.source,
            line=base.line,
            parents=tuple(item.ref for item in group),
            parents_failed=failed,
        )
        return Node(reducer, row, self.root, group, level, longest)

    def finish(self, left: list[StageRow]) -> None:
        """What the last level leaves is the result."""
        self.over = True
        if len(left) == 1:
            self._ticket.fill(left[0])
        elif left or not (self.leaves or self.dropped):
            for item, place in zip(left, self._ticket.split(len(left)), strict=True):
                place.fill(item)
        else:
            self._no_survivors()

    def _no_survivors(self) -> None:
        reducer, records = self.reducer, self.reducer.world.records
        base = self.root
        row = Row(
            index=base.index if base else 0,
            key=derive_key((base.key,) if base else (), reducer.name, self.label, "none"),
            id=f"{self.label}:0.0",
            data=self.data,
            source=base.source if base else "",
            line=base.line if base else 0,
            parents_failed=self.dropped,
        )
        found = records.finished(reducer.seen(row).key, reducer.name, 0)
        if found is None:
            words = f"nothing is left to reduce: {self.dropped} rows failed before and were dropped"
            outcome = make_outcome(
                reducer.name, row, reducer.world.now(), error=(NO_SURVIVOR, words)
            )
            found = outcome, records.write(outcome, row)
        self._ticket.fill(
            StageRow(row, self.root, reducer.name, 0, False, found[1], {}, failed=self.dropped)
        )


class Level:
    """One level of a tree. Level 1 gets leaves, level N the nodes of level N - 1."""

    def __init__(self, tree: Tree, number: int) -> None:
        self._tree = tree
        self._number = number
        self._former: GroupBuilder | None = None
        self._announced = 0
        self._nodes = 0
        self._held: list[StageRow] = []
        self._order = OrderedReader(self.add, self.over)
        self._next: Level | None = None

    def announce(self, ticket: Slot) -> None:
        """A node of the level before will stand here."""
        self.expect_more()
        self._order.take(ticket)

    def expect_more(self) -> None:
        """Count one more node of the level before."""
        self._announced += 1
        if self._needed and self._held:
            held, self._held = self._held, []
            for item in held:
                self._form(item)

    def end(self) -> None:
        """The level before has formed its last group."""
        self._order.end()

    @property
    def _needed(self) -> bool:
        """Whether this level has anything to do: what it gets may be few enough already."""
        return self._number == 1 or self._announced > self._tree.reducer.rule.goal

    def add(self, item: StageRow) -> None:
        """Take the next row in order."""
        tree = self._tree
        if not tree.reducer.entrance.admits(item):
            tree.dropped += max(1, item.failed)
            tree.not_reported += max(1, item.failed)
        elif self._needed:
            self._form(item)
        else:
            self._held.append(item)

    def _form(self, item: StageRow) -> None:
        if self._former is None:
            self._former = GroupBuilder(self._tree.rule, self._group)
        self._former.add(item)

    def _group(self, group: list[StageRow]) -> None:
        """Ask about a group, or about its halves where its prompt is too long by estimate."""
        tree, longest = self._tree, self._tree.rule.longest
        position = str(self._nodes)
        node = tree.node(self._number, position, group, longest, tree.not_reported)
        if longest is not None and sum(item.tokens for item in group) > longest:
            # It is near the limit by estimate: render the prompt itself.
            while not tree.reducer.fit.fits(node.made()):
                if len(group) > 2:
                    for half in halves(group):
                        self._group(half)
                    return
                if not node.shorten():
                    break
        tree.not_reported = 0
        self._nodes += 1
        ticket = Slot()
        self._next_level().announce(ticket)
        self._ask(node, position, ticket)

    def _next_level(self) -> Level:
        if self._next is None:
            self._next = Level(self._tree, self._number + 1)
        return self._next

    def _ask(self, node: Node, position: str, ticket: Slot) -> None:
        """Ask about a group; about its parts where it is refused as too long, now or earlier."""
        divide = partial(self._divide, node, position, ticket)
        if self._tree.reducer.world.records.has_earlier and self._was_divided(node, position):
            divide()
        else:
            self._tree.reducer.ask(node, ticket, divide)

    def _divide(self, node: Node, position: str, ticket: Slot) -> bool:
        """Ask about the halves of a group, or about less of each answer of a small one."""
        if len(node.group) <= 2:
            if not node.shorten():
                return False
            self._ask(node, position, ticket)
            return True
        self._next_level().expect_more()
        dropped = (node.row.parents_failed or 0) - sum(item.failed for item in node.group)
        parts = self._parts(node.group, position)
        for (half, name), part in zip(parts, ticket.split(len(parts)), strict=True):
            half_node = self._tree.node(self._number, name, half, node.longest, dropped)
            dropped = 0
            self._ask(half_node, name, part)
        return True

    def _parts(self, group: list[StageRow], position: str) -> list[tuple[list[StageRow], str]]:
        """The halves of a group with their positions."""
        return [(half, f"{position}.{number}") for number, half in enumerate(halves(group))]

    def _was_divided(self, node: Node, position: str) -> bool:
        """Whether an earlier start has an answer about a part of a group, and none about all."""
        tree = self._tree
        records, name = tree.reducer.world.records, tree.reducer.name

        def has_answers(group: list[StageRow], position: str) -> bool:
            return len(group) > 2 and any(
                records.is_finished(tree.key(self._number, at, half), name) or has_answers(half, at)
                for half, at in self._parts(group, position)
            )

        return not records.is_finished(node.row.key, name) and has_answers(node.group, position)

    def over(self) -> None:
        """All rows of this level are in: form the last group, or hand out what is left."""
        tree = self._tree
        if not self._needed:
            tree.finish(self._held)
            return
        rest = self._former.take() if self._former is not None else []
        if len(rest) == 1 and (self._nodes or self._number > 1):
            ticket = Slot()
            self._next_level().announce(ticket)
            ticket.fill(rest[0])
        elif rest:
            self._group(rest)
        if self._next is None:
            tree.finish([])
        else:
            self._next.end()
