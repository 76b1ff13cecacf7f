"""One row becomes several: items of an answer, or pieces of a long text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from bagent.job.spec.stages import SplitSpec
from bagent.job.templates.template import Expression, TemplateFailure
from bagent.stages.base import (
    NO_SURVIVOR,
    FailurePolicy,
    PromptVariables,
    RowStage,
    StageContext,
    make_outcome,
    prompt_row,
)
from bagent.stages.results import StageResults
from bagent.stages.row import INPUT, StageRow, derive_key, estimate, stage_item
from bagent.stages.slots import Slot
from bagent.types import Json, Row

_ENDS = tuple(map(re.compile, (r"\n\s*\n", r"[.!?。!?]['\")\]]*\s+|[。!?]", r"\s+")))
_LATEST = 0.5
"""A piece is cut back at most to so much of its length for a better end."""


class TextPiece(msgspec.Struct, frozen=True):
    """A part of a text in characters from ``start`` to before ``end``; about ``tokens`` long."""

    start: int
    end: int
    tokens: int


def pieces(text: str, tokens: int, overlap: int) -> list[TextPiece]:
    """The pieces of ``text``, of at most ``tokens`` tokens each by estimate.

    Each piece but the first repeats about the last ``overlap`` tokens of the one before. All
    characters are in some piece; an empty text has no pieces. The same text has the same pieces.
    """
    found: list[TextPiece] = []
    start = 0
    while start < len(text):
        end = _reach(text, start, tokens)
        if end < len(text):
            end = _good_end(text, start, end)
        found.append(TextPiece(start, end, _size(text, start, end)))
        if end >= len(text):
            break
        # A piece that was cut back far may be shorter than the overlap: go on all the same.
        start = max(start + (end - start + 1) // 2, _back(text, start, end, overlap))
    return found


def _size(text: str, start: int, end: int) -> int:
    return estimate(text[start:end].encode("utf-8", "replace"))


def _reach(text: str, start: int, tokens: int) -> int:
    """The furthest end of a piece that begins at ``start``; at least one character on."""
    low, high = start + 1, min(len(text), start + 3 * tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if _size(text, start, middle) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low


def _good_end(text: str, start: int, end: int) -> int:
    """The last end of a paragraph, else sentence, else word, in the second half of a piece."""
    least = start + int((end - start) * _LATEST)
    for pattern in _ENDS:
        ends = [found.end() for found in pattern.finditer(text, least, end)]
        if ends:
            return ends[-1]
    return end


def _back(text: str, start: int, end: int, overlap: int) -> int:
    """Where the next piece begins: ``overlap`` tokens before ``end``, at the start of a word."""
    if not overlap:
        return end
    low, high = start, end
    while low < high:
        middle = (low + high) // 2
        if _size(text, middle, end) <= overlap:
            high = middle
        else:
            low = middle + 1
    space = re.compile(r"\s+").search(text, low, end)
    return space.end() if space is not None and space.end() < end else low


NOTHING = "empty"
"""Error kind of a row that nothing came of."""


class ExpandedRows(msgspec.Struct, frozen=True):
    """One row that is to be made: its fields, and what is told of it in the results."""

    data: dict[str, Any]
    output: Json
    tokens: int = 0


class Recipe(Protocol):
    """How one row becomes several."""

    def rows(self, item: StageRow, names: Mapping[str, Json]) -> list[ExpandedRows]:
        """The rows that ``item`` becomes.

        Raises:
            TemplateFailure: it cannot be done for this row.
        """
        ...


class Items:
    """Rows of a list that an expression finds in an answer.

    Inside the expression stand the properties of the answer before the stage, ``answer`` (the
    whole), stages and fields by name. An item that is an object adds its properties to the fields.
    """

    def __init__(self, expression: Expression, source: str) -> None:
        self._expression = expression
        self._source = source

    def rows(self, item: StageRow, names: Mapping[str, Json]) -> list[ExpandedRows]:
        """One row an item of the list."""
        answer = names.get(self._source, item.row.data if self._source == INPUT else None)
        scope: dict[str, Any] = dict(item.row.data)
        if isinstance(answer, dict):
            scope.update(answer)
        scope.update(names)
        scope.setdefault("answer", answer)
        found = self._expression.value(scope)
        if not isinstance(found, (list, tuple)):
            kind = "an object" if isinstance(found, dict) else type(found).__name__
            raise TemplateFailure(
                f"{self._expression.where}: {self._expression.text} is {kind}, not a list"
            )
        return [
            ExpandedRows({**item.row.data, **(one if isinstance(one, dict) else {})}, one)
            for one in found
        ]


class TextSplit:
    """Rows of the pieces of a long text; each has its piece in the place of the text."""

    def __init__(self, spec: SplitSpec) -> None:
        self._spec = spec

    def rows(self, item: StageRow, names: Mapping[str, Json]) -> list[ExpandedRows]:
        """One row a piece; results tell its place, not its text."""
        field = self._spec.field
        text = item.row.data.get(field, names.get(field))
        if not isinstance(text, str):
            words = "there is no" if text is None else "it is no text:"
            raise TemplateFailure(f"split: {words} {field}")
        return [
            ExpandedRows({**item.row.data, field: text[one.start : one.end]}, told, one.tokens)
            for one, told in _told(pieces(text, self._spec.tokens, self._spec.overlap))
        ]


def _told(found: list[TextPiece]) -> Iterator[tuple[TextPiece, dict[str, int]]]:
    for number, piece in enumerate(found):
        told = {"piece": number, "of": len(found), "start": piece.start, "end": piece.end}
        yield piece, told


class ExpandStage(RowStage):
    """Makes several rows of each row; nothing is asked.

    The rows have keys of their own, and ``/NUMBER`` behind the id. A row that failed before, or
    that nothing can be made of, goes on as one failed row that no later stage is asked about.

    Args:
        later: the stages whose rows have the keys of this one's: what they wrote of such a failed
            row counts no more once it became rows.
    """

    def __init__(
        self,
        entrance: FailurePolicy,
        recipe: Recipe,
        names: PromptVariables,
        world: StageContext,
        *,
        later: Sequence[str] = (),
    ) -> None:
        super().__init__(entrance.name, entrance)
        self._recipe = recipe
        self._names = names
        self._world = world
        self._later = (entrance.name, *later)

    async def run(self) -> None:
        """Nothing to wait for: all is done as rows come."""

    def _take(self, item: StageRow, ticket: Slot) -> None:
        if not item.ok:
            self._fail(item, ticket, NO_SURVIVOR, self._entrance.reason(item))
            return
        try:
            made = self._recipe.rows(item, self._names.of(item))
        except TemplateFailure as failure:
            self._fail(item, ticket, "template", str(failure))
            return
        if not made:
            self._fail(item, ticket, NOTHING, "the list of items is empty")
            return
        self._world.records.forget(item.row.key, self._later)
        for number, (one, place) in enumerate(zip(made, ticket.split(len(made)), strict=True)):
            row = msgspec.structs.replace(
                prompt_row(item.row, item),
                key=derive_key((item.row.key,), self.name, number),
                id=f"{item.row.id}/{number}",
                data=one.data,
            )
            self._put(item, row, one, place)

    def _put(self, item: StageRow, row: Row, made: ExpandedRows, ticket: Slot) -> None:
        records: StageResults = self._world.records
        found = records.finished(row.key, self.name, 0, (item,))
        if found is None:
            outcome = make_outcome(self.name, row, self._world.now(), output=made.output)
            found = outcome, records.write(outcome, row)
        plain = msgspec.structs.replace(row, parents=(), parents_failed=None)
        filled = stage_item(item, plain, *found)
        ticket.fill(msgspec.structs.replace(filled, tokens=filled.tokens + made.tokens))

    def _fail(self, item: StageRow, ticket: Slot, kind: str, words: str) -> None:
        row = prompt_row(item.row, item)
        records = self._world.records
        found = records.finished(row.key, self.name, 0, (item,))
        if found is None:
            outcome = make_outcome(self.name, row, self._world.now(), error=(kind, words))
            found = outcome, records.write(outcome, row)
        ticket.fill(msgspec.structs.replace(stage_item(item, item.row, *found), void=True))
