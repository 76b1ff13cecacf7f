"""A row between two stages, and how what earlier stages answered looks inside a prompt."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable
from hashlib import blake2b
from struct import pack
from typing import Any

import msgspec

from bagent.job.templates.environment import JsonLines
from bagent.types import Json, Outcome, Row

INPUT = "input"
"""The name of what comes before the first stage."""


def derive_key(parents: Iterable[int], *words: str | int) -> int:
    """The 64-bit key of a row made of the rows with keys ``parents``.

    BLAKE2b (RFC 7693) with a digest of 8 bytes over the parents' keys in order, 8 bytes
    big-endian each, and over ``words``, each ended by a zero byte. Journals hold these keys, so
    the recipe must not change.
    """
    digest = blake2b(digest_size=8, person=b"bagent.stage")
    for key in parents:
        digest.update(pack(">Q", key))
    for word in words:
        digest.update(str(word).encode("utf-8", "surrogatepass") + b"\0")
    return int.from_bytes(digest.digest(), "big")


def reference(stage: str, row_id: Json, answer: int) -> str:
    """How ``parents`` names an outcome: ``STAGE:ID:ANSWER``, as SQL can put it together."""
    shown = row_id if isinstance(row_id, str) else str(row_id)
    return f"{stage}:{shown}:{answer}"


FIELDS = ("id", "status", "output", "text", "error")
"""What a response has, in the order in which it is printed."""

TOKENS_PER_BYTE = 0.4
"""On the safe side for prose and JSON."""

_DIGITS = b"0123456789"


class StageRow(msgspec.Struct, frozen=True, eq=False):
    """One row as a stage left it.

    ``row`` has the fields for prompts in ``data``, ``root`` is the input row that it goes back to
    (None after stages that join rows). ``place`` is where the outcome of ``stage`` for it stands;
    None for an input row. ``seen`` has the places of all earlier stages' outcomes for it by name.
    ``tokens`` is about how many its answer has. ``failed`` counts input rows that failed among
    those that it was made of, ``also`` names further parents of what is made of it. ``told`` is
    its id in the results where that is another one than the row's. ``void``: a stage that makes
    rows could make none of it, so that there is nothing to ask about.
    """

    row: Row
    root: Row | None
    stage: str
    answer: int
    ok: bool
    place: int | None
    seen: dict[str, int]
    tokens: int = 0
    failed: int = 0
    also: tuple[str, ...] = ()
    told: Json = None
    void: bool = False

    @property
    def ref(self) -> str:
        """Its name as a parent."""
        told = self.row.id if self.told is None else self.told
        return reference(self.stage, told, self.answer)

    @property
    def parents(self) -> tuple[str, ...]:
        """The parents of what is made of it alone: none for an input row, which is its own."""
        return self.also if self.stage == INPUT else (self.ref, *self.also)


def input_item(row: Row, *, measured: bool = False) -> StageRow:
    """An input row before the first stage; ``measured``: its tokens are wanted."""
    ok = row.error is None
    size = 0
    if measured and ok:
        size = 24 + estimate(str(row.data).encode("utf-8", "replace"))
    return StageRow(row, row, INPUT, 0, ok, None, {}, size, int(not ok))


def stage_item(item: StageRow, row: Row, outcome: Outcome, place: int) -> StageRow:
    """The item that ``outcome``, which stands at ``place``, makes of ``item``.

    Args:
        item: what went in.
        row: what comes out: ``item.row``, or a row made of it.
    """
    ok = outcome.status == "ok"
    failed = item.failed if ok else max(1, item.failed)
    return StageRow(
        row=row,
        root=item.root,
        stage=outcome.stage,
        answer=outcome.answer,
        ok=ok,
        place=place,
        seen={**item.seen, outcome.stage: place},
        tokens=answer_tokens(outcome),
        failed=failed,
        told=outcome.id,
        void=item.void,
    )


def answer_tokens(outcome: Outcome) -> int:
    """About how many tokens an answer has inside a later prompt; never too few for prose."""
    output = outcome.output
    body = bytes(output) if output is not None else (outcome.text or "").encode("utf-8", "replace")
    if outcome.status != "ok":
        body = (outcome.error or "").encode("utf-8", "replace")
    return estimate(body) + 24 + estimate(str(outcome.id).encode("utf-8", "replace"))


def estimate(text: bytes) -> int:
    """About how many tokens a text in UTF-8 has, on the safe side: digits may count one each."""
    digits = len(text) - len(text.translate(None, _DIGITS))
    return int((len(text) - digits) * TOKENS_PER_BYTE) + digits


class Response(dict[str, Any]):
    """One answer in a later prompt: ``id status output text error``.

    Printed, it is one JSON line: the output, else the text, of a good one; the error of another.
    """

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """What is printed; the other fields can be named too."""
        return self.shown().items()

    def shown(self) -> dict[str, Any]:
        """The fields that are worth their tokens."""
        shown = {"id": self["id"], "status": self["status"]}
        if self["status"] != "ok":
            shown["error"] = self["error"]
        elif self["output"] is not None:
            shown["output"] = self["output"]
        else:
            shown["text"] = self["text"]
        return shown


def response_of(outcome: Outcome) -> Response:
    """An outcome as a prompt sees it."""
    output = outcome.output
    decoded = None if output is None or not bytes(output) else msgspec.json.decode(output)
    values = (outcome.id, outcome.status, decoded, outcome.text, outcome.error)
    return Response(zip(FIELDS, values, strict=True))


def input_response(row: Row) -> Response:
    """An input row as a reducer that reads the input sees it."""
    status = "ok" if row.error is None else "bad_input"
    output = None if row.error is not None else row.data
    return Response(zip(FIELDS, (row.id, status, output, None, row.error), strict=True))


def value_of(outcome: Outcome) -> Json:
    """What a stage's name stands for: its output, else its text; a failure as a response."""
    response = response_of(outcome)
    if outcome.status != "ok":
        return response
    return response["output"] if response["output"] is not None else response["text"]


def responses(found: list[Response]) -> JsonLines:
    """The list ``responses`` of a reduce prompt: printed alone, one JSON line each."""
    return JsonLines(found)
