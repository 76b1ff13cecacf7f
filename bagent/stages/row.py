"""Rows between stages, and earlier answers as later prompts see them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Mapping
from hashlib import blake2b
from struct import pack
from types import MappingProxyType
from typing import Any

import msgspec

from bagent.job.templates.environment import JsonLines
from bagent.types import Json, Outcome, Row

INPUT = "input"
"""The name of the source before the first stage."""


def derive_key(parents: Iterable[int], *parts: str | int) -> int:
    """Return the 64-bit key of a row made of the rows with keys ``parents``.

    BLAKE2b (RFC 7693) with a digest of 8 bytes over the parents' keys in order, 8 bytes
    big-endian each, and over ``parts``, each ended by a zero byte. Journals hold these keys, so
    the recipe must not change.
    """
    digest = blake2b(digest_size=8, person=b"bagent.stage")
    for key in parents:
        digest.update(pack(">Q", key))
    for part in parts:
        digest.update(str(part).encode("utf-8", "surrogatepass") + b"\0")
    return int.from_bytes(digest.digest(), "big")


def reference(stage: str, row_id: Json, answer: int) -> str:
    """Return how ``parents`` names an outcome: ``STAGE:ID:ANSWER``."""
    name = row_id if isinstance(row_id, str) else str(row_id)
    return f"{stage}:{name}:{answer}"


FIELDS = ("id", "status", "output", "text", "error")
"""The fields of a response, in the order in which they are printed."""

TOKENS_PER_BYTE = 0.4
"""An upper estimate for prose and JSON."""

_DIGITS = b"0123456789"


class StageRow(msgspec.Struct, frozen=True, eq=False):
    """One row as a stage left it."""

    row: Row
    """Has the fields for prompts in ``data``."""
    root: Row | None
    """The input row that it goes back to; None after stages that join rows."""
    stage: str
    answer: int
    ok: bool
    location: int | None
    """Location of the outcome of ``stage``; None for an input row."""
    seen: dict[str, int]
    """Locations of the outcomes of all earlier stages, by the stage's name."""
    tokens: int = 0
    """Estimated tokens of its answer."""
    failed: int = 0
    """Failed input rows among those that it is made of."""
    extra_parents: tuple[str, ...] = ()
    result_id: Json = None
    """Its id in the results; None: the row's."""
    nothing_to_ask: bool = False
    """A stage that makes rows could make none of it."""

    @property
    def ref(self) -> str:
        """Its name as a parent."""
        result_id = self.row.id if self.result_id is None else self.result_id
        return reference(self.stage, result_id, self.answer)

    @property
    def parents(self) -> tuple[str, ...]:
        """The parents of what is made of it alone; an input row is not its own parent."""
        return self.extra_parents if self.stage == INPUT else (self.ref, *self.extra_parents)


def input_item(row: Row, *, measured: bool = False) -> StageRow:
    """Return an input row as the first stage gets it; with its tokens if ``measured``."""
    ok = row.error is None
    size = 0
    if measured and ok:
        size = 24 + estimate(str(row.data).encode("utf-8", "replace"))
    return StageRow(row, row, INPUT, 0, ok, None, {}, size, int(not ok))


def stage_item(item: StageRow, row: Row, outcome: Outcome, location: int) -> StageRow:
    """Return what an outcome makes of ``item``; ``row`` is ``item.row`` or a row made of it."""
    made = made_item(row, outcome, location, root=item.root, seen=item.seen, failed=item.failed)
    if item.nothing_to_ask:
        return msgspec.structs.replace(made, nothing_to_ask=True)
    return made


def made_item(
    row: Row,
    outcome: Outcome,
    location: int,
    *,
    root: Row | None = None,
    seen: Mapping[str, int] = MappingProxyType({}),
    failed: int = 0,
) -> StageRow:
    """Return a row that a stage made, with the outcome at ``location``.

    Args:
        row: the row without its parents.
        outcome: its outcome.
        location: the location of the outcome.
        root: the input row that it goes back to.
        seen: the locations of the earlier stages' outcomes.
        failed: the failed input rows that it is made of; at least 1 where it failed itself.
    """
    ok = is_good(outcome)
    return StageRow(
        row=row,
        root=root,
        stage=outcome.stage,
        answer=outcome.answer,
        ok=ok,
        location=location,
        seen={**seen, outcome.stage: location},
        tokens=answer_tokens(outcome),
        failed=failed if ok else max(1, failed),
        result_id=outcome.id,
    )


def is_good(outcome: Outcome) -> bool:
    """Return whether later stages take an outcome as an answer: ok, or cut off and accepted."""
    return outcome.status == "ok" or outcome.accepted


def answer_tokens(outcome: Outcome) -> int:
    """Estimate the tokens of an answer inside a later prompt; never too few for prose."""
    output = outcome.output
    body = bytes(output) if output is not None else (outcome.text or "").encode("utf-8", "replace")
    if not is_good(outcome):
        body = (outcome.error or "").encode("utf-8", "replace")
    return estimate(body) + 24 + estimate(str(outcome.id).encode("utf-8", "replace"))


def estimate(text: bytes) -> int:
    """Estimate the tokens of a text in UTF-8 from above; a digit counts as one."""
    digits = len(text) - len(text.translate(None, _DIGITS))
    return int((len(text) - digits) * TOKENS_PER_BYTE) + digits


class Response(dict[str, Any]):
    """One answer in a later prompt: ``id status output text error``.

    It prints as one JSON line with the output, the text, or the error of a failed answer.
    """

    @property
    def is_good(self) -> bool:
        """Whether it is an answer: ok, or cut off and accepted."""
        return self["status"] == "ok" or (self["status"] == "truncated" and self["error"] is None)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return the printed fields; the other fields can be named too."""
        return self.printed_fields().items()

    def printed_fields(self) -> dict[str, Any]:
        """Return the fields that are worth their tokens."""
        fields = {"id": self["id"], "status": self["status"]}
        if not self.is_good:
            fields["error"] = self["error"]
        elif self["output"] is not None:
            fields["output"] = self["output"]
        else:
            fields["text"] = self["text"]
        return fields


def response_of(outcome: Outcome) -> Response:
    """Return an outcome as prompts see it."""
    output = outcome.output
    decoded = None if output is None or not bytes(output) else msgspec.json.decode(output)
    values = (outcome.id, outcome.status, decoded, outcome.text, outcome.error)
    return Response(zip(FIELDS, values, strict=True))


def input_response(row: Row) -> Response:
    """Return an input row as the prompt of a reduction sees it."""
    status = "ok" if row.error is None else "bad_input"
    output = None if row.error is not None else row.data
    return Response(zip(FIELDS, (row.id, status, output, None, row.error), strict=True))


def value_of(outcome: Outcome) -> Json:
    """Return the value of a stage's name: its output, its text, or a failure as a response."""
    response = response_of(outcome)
    if not is_good(outcome):
        return response
    return response["output"] if response["output"] is not None else response["text"]


def responses(answers: list[Response]) -> JsonLines:
    """Return the list ``responses`` of a reduce prompt; it prints as JSON lines."""
    return JsonLines(answers)
