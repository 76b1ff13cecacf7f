"""The section on input fields: which go with long answers, and with failed rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import msgspec

from bagent.observe.formatting import counted
from bagent.report.failures import FAULTS, Cause
from bagent.report.field_stats import FEWEST, FieldStat, Traits
from bagent.report.html import Html, heading, note, number, percent, section, table
from bagent.report.queries import FEW, WEAK
from bagent.report.suspects import Suspect

SURE = 4.0
"""Standard errors from which on a difference is significant: some hundred are compared."""

LISTED = 2.0
"""Standard errors from which on a line is in the table."""

LONGER = 1.4
"""Answers that are longer by this factor have a finding."""

MOST = 12
CORRELATED = 0.4
CLEAR = 0.6
"""A correlation below this is a weak one."""

ALMOST = 0.8
"""What rows share is weak where fewer of them have it, or more than 1 - this of the others."""

STRONG = 0.7
"""A field has no finding where its effect is below this share of the strongest one's."""


class FieldFinding(msgspec.Struct, frozen=True):
    """What rows have in common, or get, for people; and the field that selects them."""

    message: str
    stat: FieldStat | None
    """None where several values, or none, select them."""

    cause: str | None = None
    """The kind of failure of the rows; None where they did not fail."""


def long_answers(traits: Traits) -> list[FieldFinding]:
    """Describe the fields whose rows get long answers, or answers that are cut off."""
    lines = [line for line in traits.lines if line.of_input and line.in_prompt is not False]
    lines = lines or [line for line in traits.lines if line.of_input]
    findings: dict[tuple[str, str], FieldFinding] = {}
    first: FieldStat | None = None
    for line in sorted(lines, key=lambda o: -max(o.longer, o.surplus("cut"))):
        key = (line.stage, line.field)
        if key in findings or len(findings) == 3:
            continue
        message = _message(line, traits)
        if message and (first is None or not _weaker(line, first, traits)):
            first = first or line
            findings[key] = FieldFinding(message, line)
    return list(findings.values())


def _weaker(line: FieldStat, first: FieldStat, traits: Traits) -> bool:
    """Whether the effect of a field is much less than the first one's, which may cause it."""
    correlation, best_correlation = (
        traits.grows.get((stat.stage, stat.field)) if stat.sized else None for stat in (line, first)
    )
    if correlation is not None and best_correlation is not None:
        return correlation < STRONG * best_correlation
    return line.longer < STRONG * first.longer


def _message(line: FieldStat, traits: Traits) -> str:
    mean, others_mean = line.matching.mean, line.others.mean
    is_long = (
        mean is not None and others_mean and mean > LONGER * others_mean and line.longer > SURE
    )
    cut, others_cut = _share(line, "cut"), _others_share(line, "cut")
    is_cut = cut > 2 * others_cut + 2 and line.surplus("cut") > SURE
    if not is_long and not is_cut:
        return ""
    where = f"stage {line.stage}: " if len(traits.stages) > 1 else ""
    grows = traits.grows.get((line.stage, line.field), 0.0)
    if line.matching.rows < FEW or (line.sized and not is_cut and grows < CLEAR):
        where = WEAK + where
    parts = []
    if is_long:
        parts.append(
            f"rows with {line.phrase} get answers of {number(mean)} tokens on average,"
            f" the others of {number(others_mean)}"
        )
    if is_cut:
        whose = "their answers" if is_long else f"the answers of rows with {line.phrase}"
        parts.append(
            f"{percent(cut)} of {whose} are cut off at the limit, {percent(others_cut)} else"
        )
    if line.sized and grows > CORRELATED:
        parts.append(f"the larger {line.field}, the longer the answer (correlation {grows:.2f})")
    return where + "; ".join(parts)


def failing(traits: Traits, reported: Container[tuple[str, str]] = ()) -> list[str]:
    """Describe the values whose rows fail more often than others.

    Args:
        reported: (stage, field) of findings to leave out.
    """
    messages: dict[tuple[str, str], str] = {}
    for line in sorted(traits.lines, key=lambda line: -line.surplus("bad")):
        key = (line.stage, line.field)
        share, others_bad = _share(line, "bad"), _others_share(line, "bad")
        if not line.of_input or key in reported or key in messages:
            continue
        few = line.matching.bad < FEWEST
        if not few and share > 2 * others_bad + 1 and line.surplus("bad") > SURE:
            where = f"stage {line.stage}: " if len(traits.stages) > 1 else ""
            where = WEAK * (line.matching.rows < FEW) + where
            messages[key] = (
                f"{where}of the rows with {line.phrase} {percent(share)} failed,"
                f" of the others {percent(others_bad)}"
            )
    return list(messages.values())[:2]


class Shared(msgspec.Struct, frozen=True):
    """What the rows of a group have in common."""

    text: str
    fields: tuple[tuple[str, str], ...]
    """(stage, field) of each part."""

    stat: FieldStat | None
    """The first part; None where that has several values, or there is none."""


def shared(traits: Traits, group: int) -> Shared:
    """Describe what the rows of a group share and other rows do not have.

    What is known beyond the input (the prompt's length) is used where no input field is shared.
    """
    traits_of_group = list(traits.of_group(group))
    of_input = [each for each in traits_of_group if each[0][0].of_input]
    clearest = (of_input or traits_of_group)[:2]
    if group >= FAULTS:  # of answers that may be wrong, only what is clear
        clearest = [each for each in clearest if each[1] >= ALMOST and each[2] <= 1 - ALMOST]
    together = [_together(lines) for lines, _, _ in clearest]
    parts = [
        f"{phrase} ({_part_of(traits, lines, group)},"
        f" {percent(100 * other_share)} of the other rows"
        f"{', which is weak' * (share < ALMOST or other_share > 1 - ALMOST)})"
        for (phrase, _), (lines, share, other_share) in zip(together, clearest, strict=True)
    ]
    fields = tuple((each[0][0].stage, each[0][0].field) for each in clearest)
    return Shared("; ".join(parts), fields, together[0][1] if together else None)


def _part_of(traits: Traits, lines: list[FieldStat], group: int) -> str:
    """Write how many rows of a group the lines hold: a number if that is known, else percent."""
    rows = sum(line.matching.groups[group] for line in lines)
    all_rows = traits.stages[lines[0].stage].groups[group]
    if rows < all_rows and traits.complete:
        return f"{rows:,} of the {all_rows:,}"
    return f"{percent(100 * rows / all_rows)} of them"


def shared_by_suspects(traits: Traits, suspects: Sequence[Suspect]) -> list[str]:
    """Describe what the rows of each suspect share; empty for those of one endpoint.

    Args:
        traits: with the conditions of the suspects.
        suspects: as :func:`bagent.report.suspects.find_suspects` returns them.
    """
    return [
        shared(traits, group).text if suspect.endpoint is None else ""
        for group, suspect in enumerate(suspects, FAULTS)
    ]


def shared_by_causes(traits: Traits, alike: Sequence[Cause]) -> list[FieldFinding]:
    """Describe what the rows of each of the first causes of failure share.

    Args:
        traits: the statistics of fields.
        alike: as :func:`bagent.report.failures.causes` returns them.
    """
    findings = []
    for group, cause in enumerate(alike[:FAULTS]):
        common = shared(traits, group)
        if common.text:
            rows = f"{counted(cause.rows, 'row')} that failed ({cause.kind})"
            findings.append(FieldFinding(f"{rows} share {common.text}", common.stat, cause.kind))
    return findings


def _together(lines: list[FieldStat]) -> tuple[str, FieldStat | None]:
    """Write lines of one field as one phrase; steps of sizes become one range.

    The second value is the single line or the range; None for several values.
    """
    first = lines[0]
    lows = [line.low for line in lines if line.low is not None]
    highs = [line.high for line in lines if line.high is not None]
    if len(lows) == len(highs) == len(lines):
        first = msgspec.structs.replace(first, low=min(lows), high=max(highs))
        return first.phrase, first
    phrase = " or ".join([first.phrase, *(line.label for line in lines[1:])])
    return phrase, first if len(lines) == 1 else None


def _share(line: FieldStat, name: str) -> float:
    """Percent of its rows."""
    return float(100 * getattr(line.matching, name) / line.matching.rows)


def _others_share(line: FieldStat, name: str) -> float:
    return float(100 * getattr(line.others, name) / max(1, line.others.rows))


def fields(traits: Traits) -> Html:
    """Make the section."""
    lines = [line for line in traits.lines if line.of_input]
    several_stages = len(traits.stages) > 1
    parts = []
    for title, strength in (
        ("rows with longer answers than others", _longer),
        ("rows that fail more often than others", _worse),
    ):
        chosen = _in_order(lines, strength)
        if chosen:
            table_rows = [_row(line, several_stages, strength(line)) for line in chosen]
            parts += [heading(title), table(table_rows, HEADS)]
    if not parts:
        return Html("")
    explanation = (
        f"From {traits.rows:,} rows, drawn at random where there are more. Weak: fewer than {FEW}"
        f" rows, or less than {SURE:.0f} standard errors from the others, which may be chance."
    )
    return section("Input fields and answers", note(explanation), *parts, name="fields")


def _longer(line: FieldStat) -> float:
    return line.longer


def _worse(line: FieldStat) -> float:
    return line.surplus("bad")


def _in_order(
    lines: Iterable[FieldStat], strength: Callable[[FieldStat], float]
) -> list[FieldStat]:
    """The strongest lines: the strongest field first, the sizes of each rising."""
    strongest = sorted(
        (line for line in lines if strength(line) > LISTED), key=lambda o: -strength(o)
    )
    strongest = strongest[:MOST]
    first_positions: dict[tuple[str, str], int] = {}
    for position, line in enumerate(strongest):
        first_positions.setdefault((line.stage, line.field), position)
    lowest = float("-inf")
    return sorted(
        strongest,
        key=lambda o: (first_positions[o.stage, o.field], lowest if o.low is None else o.low),
    )


HEADS = {
    "stage": "stage",
    "field": "field",
    "value": "value",
    "rows": "rows",
    "tokens": "answer tokens",
    "others": "others' tokens",
    "cut_percent": "cut off",
    "bad_percent": "failed",
    "others_percent": "others failed",
    "in_prompt": "in a prompt",
    "weak": "evidence",
}


def _row(line: FieldStat, several_stages: bool, strength: float) -> dict[str, Any]:
    return {
        "stage": line.stage if several_stages else None,
        "field": line.field,
        "value": line.label,
        "rows": line.matching.rows,
        "tokens": line.matching.mean,
        "others": line.others.mean,
        "cut_percent": _share(line, "cut"),
        "bad_percent": _share(line, "bad"),
        "others_percent": _others_share(line, "bad"),
        "in_prompt": line.in_prompt,
        "weak": "weak" if strength < SURE or line.matching.rows < FEW else None,
    }
