"""Invariants of jobs whose rows go in batches of a provider."""

from __future__ import annotations

from collections import Counter

from worlds.evidence import Problems, invariant_for, is_answer, may_lose_answers, results_of
from worlds.history import History
from worlds.network import Sent


@invariant_for("batches")
def no_row_is_paid_twice(history: History) -> Problems:
    """Whatever kills the process, a row that the provider answered well is in no other batch. The
    answer to a single call is lost if it comes in the moment of the kill."""
    answered: dict[tuple[int, int], Sent] = {}
    for sent in history.network.sent:
        unit = sent.rows[0], sent.versions[0]
        if unit in answered and not _is_edited_back(history, unit):
            yield f"row {unit} was answered in the batch of {answered[unit].at} and of {sent.at}"
        if is_answer(sent) and not _is_lost(history, sent):
            answered[unit] = sent


def _is_edited_back(history: History, unit: tuple[int, int]) -> bool:
    return any(start.versions.get(unit[0], 0) > unit[1] for start in history.starts[:-1])


def _is_lost(history: History, sent: Sent) -> bool:
    """Return whether the process was killed in the moment in which a single call was answered, or
    the disk refused the answer."""
    is_single = all(sent.at != batch.created for batch in history.provider.batches.values())
    killed = any(start.code is None and start.ended == sent.done for start in history.starts)
    return is_single and (killed or may_lose_answers(history, history.starts[sent.start]))


@invariant_for("batches")
def each_batch_is_read(history: History) -> Problems:
    """No batch is forgotten with the provider: at the end each one has been downloaded."""
    provider, last = history.provider, history.starts[-1]
    if last.code not in (0, 1):
        return
    for batch in provider.batches.values():
        if not provider.fetched[batch.id] and not batch.refused:
            yield f"{batch} was never read"


@invariant_for("batches")
def a_paid_answer_is_a_result(history: History) -> Problems:
    """What the provider answered well is the result of its row at the end, unless the row was sent
    with another text since then."""
    last = history.starts[-1]
    if last.code not in (0, 1):
        return
    results = results_of(last)
    for sent in history.network.sent:
        row = sent.rows[0]
        equal = [unit for unit, lead in enumerate(history.world.leads) if lead == row]
        current = [r for r in equal if sent.versions[0] == last.versions.get(r, 0)]
        good = any(results.get(unit, {}).get("status") == "ok" for unit in current)
        stays = is_answer(sent) and not _is_lost(history, sent) and not _is_replaced(history, sent)
        if stays and current and not good:
            yield f"row {row} was answered at {sent.done}, and is {results.get(row)}"


def _is_replaced(history: History, sent: Sent) -> bool:
    """Return whether a later start sent the row of a request with another text."""
    return any(
        later.start > sent.start and later.rows == sent.rows and later.versions != sent.versions
        for later in history.network.sent
    )


@invariant_for("batches")
def batches_are_made_once(history: History) -> Problems:
    """No two batches of a provider have the same requests, unless it has refused the first."""
    batches = history.provider.batches.values()
    labels = Counter(batch.label for batch in batches if not batch.refused)
    for label, count in labels.items():
        if count > 1:
            yield f"{count} batches have the label {label}"
