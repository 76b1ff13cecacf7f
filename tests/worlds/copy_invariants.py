"""Invariants of rows with equal prompts, which are sent once."""

from __future__ import annotations

from bagent.types import PASSING_KINDS
from worlds.evidence import (
    Problems,
    invariant,
    invariant_for,
    is_answer,
    may_lose_answers,
    results_of,
)
from worlds.history import History
from worlds.network import Sent
from worlds.replies import answer_text


@invariant
def a_copy_is_of_an_answer(history: History) -> Problems:
    """A row gets the answer to its own prompt, whichever row it was copied from, or a refusal that
    would come again; never the failure of another row that a retry may mend."""
    if all(row.same is None for row in history.world.rows):
        return
    for start in history.starts:
        for row, result in results_of(start).items():
            where = f"start {start.number} row {row}: {result['status']} {result['error']}"
            if result["copied_from"] is None:
                continue
            if result["error_kind"] in PASSING_KINDS:
                yield f"{where}, copied from {result['copied_from']}"
            if result["attempts"]:
                yield f"{where}: {result['attempts']} attempts of a copy"


@invariant_for("copies")
def copies_have_the_right_answer(history: History) -> Problems:
    """Each good row has the one right answer to its prompt."""
    for start in history.starts:
        for row, result in results_of(start).items():
            text = answer_text(history.world.leads[row], 0)
            if result["status"] == "ok" and result["text"] != text:
                yield f"start {start.number} row {row}: {result['text']!r}, not {text!r}"


@invariant_for("copies")
def an_answered_prompt_is_not_sent_again(history: History) -> Problems:
    """What was answered well is on disk, and no row with this prompt is sent any more."""
    if any(s.killed_by_power or may_lose_answers(history, s) for s in history.starts):
        return
    answered: dict[int, Sent] = {}
    for start in history.starts:
        for sent in history.sent[start.number]:
            first = answered.get(sent.rows[0])
            if first is not None and first.done is not None and first.done < sent.at:
                yield f"prompt {sent.rows[0]} was answered at {first.done}, sent at {sent.at}"
            if is_answer(sent) and (sent.done or 1e9) < start.ended:
                answered[sent.rows[0]] = sent
