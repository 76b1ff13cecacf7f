"""The expand stage: rows of the items of an answer, or of the pieces of a long text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    prompt_row,
)
from bagent.stages.row import INPUT, StageRow, derive_key, estimate, stage_item
from bagent.stages.slots import Slot
from bagent.types import Json

_ENDS = tuple(map(re.compile, (r"\n\s*\n", r"[.!?。!?]['\")\]]*\s+|[。!?]", r"\s+")))
_LATEST = 0.5
"""The share of its length that a piece keeps at least when it is cut back to a better end."""


class TextPiece(msgspec.Struct, frozen=True):
    """Part of a text, from character ``start`` to before ``end``; of about ``tokens`` tokens."""

    start: int
    end: int
    tokens: int


def pieces(text: str, tokens: int, overlap: int) -> list[TextPiece]:
    """Split ``text`` into pieces of at most ``tokens`` tokens each by estimate.

    Each piece but the first repeats about the last ``overlap`` tokens of the one before. Every
    character is in a piece; an empty text has no pieces. Equal texts have equal pieces.
    """
    result: list[TextPiece] = []
    start = 0
    while start < len(text):
        end = _reach(text, start, tokens)
        if end < len(text):
            end = _good_end(text, start, end)
        result.append(TextPiece(start, end, _size(text, start, end)))
        if end >= len(text):
            break
        # A piece that was cut back far may be shorter than the overlap.
        start = max(start + (end - start + 1) // 2, _back(text, start, end, overlap))
    return result


def _size(text: str, start: int, end: int) -> int:
    return estimate(text[start:end].encode("utf-8", "replace"))


def _reach(text: str, start: int, tokens: int) -> int:
    """Return the last end of a piece from ``start`` on; it has at least one character."""
    low, high = start + 1, min(len(text), start + 3 * tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if _size(text, start, middle) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low


def _good_end(text: str, start: int, end: int) -> int:
    """Return the last end of a paragraph, sentence or word in the second half of a piece."""
    least = start + int((end - start) * _LATEST)
    for pattern in _ENDS:
        ends = [match.end() for match in pattern.finditer(text, least, end)]
        if ends:
            return ends[-1]
    return end


def _back(text: str, start: int, end: int, overlap: int) -> int:
    """Return where the next piece begins: ``overlap`` tokens before ``end``, at a word."""
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
"""Error kind of a row that no row could be made of."""


class ExpandedRow(msgspec.Struct, frozen=True):
    """A row that is to be made: its fields, and its output in the results."""

    data: dict[str, Any]
    output: Json
    tokens: int = 0


class Recipe(Protocol):
    """Makes several rows of one."""

    def rows(self, item: StageRow, variables: Mapping[str, Json]) -> list[ExpandedRow]:
        """Return the rows that ``item`` becomes.

        Raises:
            TemplateFailure: it cannot be done for this row.
        """
        ...


class Items:
    """Makes a row of each item of a list that an expression takes from an answer.

    The expression can name the properties of the answer before the stage, ``answer`` itself, stages
    and fields. The properties of an item that is an object are added to the fields.
    """

    def __init__(self, expression: Expression, source: str) -> None:
        self._expression = expression
        self._source = source

    def rows(self, item: StageRow, variables: Mapping[str, Json]) -> list[ExpandedRow]:
        """Return one row for each item of the list."""
        answer = variables.get(self._source, item.row.data if self._source == INPUT else None)
        scope: dict[str, Any] = dict(item.row.data)
        if isinstance(answer, dict):
            scope.update(answer)
        scope.update(variables)
        scope.setdefault("answer", answer)
        items = self._expression.value(scope)
        if not isinstance(items, (list, tuple)):
            kind = "an object" if isinstance(items, dict) else type(items).__name__
            raise TemplateFailure(
                f"{self._expression.where}: {self._expression.text} is {kind}, not a list"
            )
        return [
            ExpandedRow({**item.row.data, **(value if isinstance(value, dict) else {})}, value)
            for value in items
        ]


class TextSplit:
    """Makes a row of each piece of a long text; the piece replaces the text."""

    def __init__(self, spec: SplitSpec) -> None:
        self._spec = spec

    def rows(self, item: StageRow, variables: Mapping[str, Json]) -> list[ExpandedRow]:
        """Return one row for each piece; its output is the position of the piece."""
        field = self._spec.field
        text = item.row.data.get(field, variables.get(field))
        if not isinstance(text, str):
            problem = "there is no" if text is None else "it is no text:"
            raise TemplateFailure(f"split: {problem} {field}")
        parts = pieces(text, self._spec.tokens, self._spec.overlap)
        return [
            ExpandedRow(
                {**item.row.data, field: text[piece.start : piece.end]},
                {"piece": number, "of": len(parts), "start": piece.start, "end": piece.end},
                piece.tokens,
            )
            for number, piece in enumerate(parts)
        ]


class ExpandStage(RowStage):
    """Makes several rows of each row; nothing is asked.

    The rows have keys of their own, and ``/NUMBER`` behind the id. A row that failed before, or
    that no row can be made of, becomes one failed row that no later stage asks about.

    Args:
        policy: decides about failed rows.
        recipe: makes the rows.
        variables: the variables of its expression.
        context: what the stages share.
        later: the stages whose rows have the keys of this one's. Once a failed row becomes rows,
            what they wrote of the failure is taken back.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        recipe: Recipe,
        variables: PromptVariables,
        context: StageContext,
        *,
        later: Sequence[str] = (),
    ) -> None:
        super().__init__(policy.name, policy)
        self._recipe = recipe
        self._variables = variables
        self._context = context
        self._later = (policy.name, *later)

    async def run(self) -> None:
        """Return at once: rows are made as they come."""

    def _process(self, item: StageRow, slot: Slot) -> None:
        if not item.ok:
            self._fail(item, slot, NO_SURVIVOR, self._policy.reason(item))
            return
        try:
            made = self._recipe.rows(item, self._variables.of(item))
        except TemplateFailure as failure:
            self._fail(item, slot, "template", str(failure))
            return
        if not made:
            self._fail(item, slot, NOTHING, "the list of items is empty")
            return
        self._context.results.forget(item.row.key, self._later)
        for number, (new, row_slot) in enumerate(zip(made, slot.split(len(made)), strict=True)):
            row = msgspec.structs.replace(
                prompt_row(item.row, item),
                key=derive_key((item.row.key,), self.name, number),
                id=f"{item.row.id}/{number}",
                data=new.data,
            )
            recorded = self._context.record(self.name, row, (item,), output=new.output)
            plain = msgspec.structs.replace(row, parents=(), parents_failed=None)
            filled = stage_item(item, plain, *recorded)
            row_slot.fill(msgspec.structs.replace(filled, tokens=filled.tokens + new.tokens))

    def _fail(self, item: StageRow, slot: Slot, kind: str, message: str) -> None:
        row = prompt_row(item.row, item)
        recorded = self._context.record(self.name, row, (item,), error=(kind, message))
        failed = stage_item(item, item.row, *recorded)
        slot.fill(msgspec.structs.replace(failed, nothing_to_ask=True))
