"""Which field of the input goes with long answers, and with rows that are not ok?"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import msgspec

from bagent.observe.report.html import FEW, WEAK, Html, heading, note, number, section, table
from bagent.observe.report.traits import Line, Traits

SURE = 4.0
"""Standard errors from which on a difference is no accident: some hundred are looked at."""

LISTED = 2.0
"""Standard errors from which on a line stands in the table."""

LONGER = 1.4
"""So many times as many tokens are worth a word."""

MOST = 12
CORRELATED = 0.4
CLEAR = 0.6
"""A correlation below this is a weak one."""

ALMOST = 0.8
"""What rows share is weak where fewer of them have it, or more than the rest of the others."""
STRONG = 0.7
"""A field whose effect is less than this part of the strongest one's has no finding."""


def long_answers(traits: Traits) -> list[str]:
    """Fields whose rows get long answers, or answers that are cut off, in words."""
    lines = [line for line in traits.lines if line.of_input and line.in_prompt is not False]
    lines = lines or [line for line in traits.lines if line.of_input]
    words: dict[tuple[str, str], str] = {}
    first: Line | None = None
    for line in sorted(lines, key=lambda o: -max(o.longer, o.surplus("cut"))):
        key = (line.stage, line.field)
        if key in words or len(words) == 3:
            continue
        said = _told(line, traits)
        if said and (first is None or not _weaker(line, first, traits)):
            first = first or line
            words[key] = said
    return list(words.values())


def _weaker(line: Line, first: Line, traits: Traits) -> bool:
    """Whether a field says much less than the first: it may go with that one only."""
    mine, best = (
        traits.grows.get((one.stage, one.field)) if one.sized else None for one in (line, first)
    )
    if mine is not None and best is not None:
        return mine < STRONG * best
    return line.longer < STRONG * first.longer


def _told(line: Line, traits: Traits) -> str:
    mean, usual = line.these.mean, line.rest.mean
    is_long = mean is not None and usual and mean > LONGER * usual and line.longer > SURE
    cut, others = _share(line, "cut"), _rest(line, "cut")
    is_cut = cut > 2 * others + 2 and line.surplus("cut") > SURE
    if not is_long and not is_cut:
        return ""
    where = f"stage {line.stage}: " if len(traits.stages) > 1 else ""
    grows = traits.grows.get((line.stage, line.field), 0.0)
    if line.these.rows < FEW or (line.sized and not is_cut and grows < CLEAR):
        where = WEAK + where
    parts = []
    if is_long:
        parts.append(
            f"rows with {line.phrase} get answers of {number(mean)} tokens on average,"
            f" the others of {number(usual)}"
        )
    if is_cut:
        whose = "their answers" if is_long else f"the answers of rows with {line.phrase}"
        parts.append(f"{cut:.3g} % of {whose} are cut off at the limit, {others:.3g} % else")
    if line.sized and grows > CORRELATED:
        parts.append(f"the larger {line.field}, the longer the answer (correlation {grows:.2f})")
    return where + "; ".join(parts)


def failing(traits: Traits, told: Container[tuple[str, str]] = ()) -> list[str]:
    """Values of fields whose rows are not ok more often than others, in words.

    Args:
        told: (stage, field) of what need not be said again.
    """
    words: dict[tuple[str, str], str] = {}
    for line in sorted(traits.lines, key=lambda line: -line.surplus("bad")):
        key = (line.stage, line.field)
        share, others = _share(line, "bad"), _rest(line, "bad")
        if not line.of_input or key in told or key in words:
            continue
        if share > 2 * others + 1 and line.surplus("bad") > SURE:
            where = f"stage {line.stage}: " if len(traits.stages) > 1 else ""
            where = WEAK * (line.these.rows < FEW) + where
            words[key] = (
                f"{where}of the rows with {line.phrase} {share:.3g} % are not ok,"
                f" of the others {others:.3g} %"
            )
    return list(words.values())[:2]


class Shared(msgspec.Struct, frozen=True):
    """What the rows of a group of failures have in common: words, and (stage, field) of each."""

    words: str
    fields: tuple[tuple[str, str], ...]


def shared(traits: Traits, fault: int) -> Shared:
    """What the rows of a group of failures share that others do not have; empty: nothing.

    What else is known of a row (its prompt's length) is told where no field of the input is.
    """
    found = list(traits.of_fault(fault))
    of_input = [one for one in found if one[0][0].of_input]
    found = (of_input or found)[:2]
    words = [
        f"{_together(lines)} ({100 * mine:.3g} % of them, {100 * others:.2g} % of the other rows"
        f"{', which is weak' * (mine < ALMOST or others > 1 - ALMOST)})"
        for lines, mine, others in found
    ]
    return Shared("; ".join(words), tuple((one[0][0].stage, one[0][0].field) for one in found))


def _together(lines: list[Line]) -> str:
    """Lines of one field as one phrase; steps of sizes are one step from the least on."""
    first = lines[0]
    lows, highs = [o.low for o in lines], [o.high for o in lines]
    if first.sized and None not in lows and None not in highs:
        least = min(low for low in lows if low is not None)
        most = max(high for high in highs if high is not None)
        return type(first)(
            **{name: getattr(first, name) for name in first.__struct_fields__}
            | {"low": least, "high": most}
        ).phrase
    return " or ".join([first.phrase, *(line.shown for line in lines[1:])])


def _share(line: Line, name: str) -> float:
    """Percent of its rows."""
    return float(100 * getattr(line.these, name) / line.these.rows)


def _rest(line: Line, name: str) -> float:
    return float(100 * getattr(line.rest, name) / max(1, line.rest.rows))


def fields(traits: Traits) -> Html:
    """The part of the page."""
    lines = [line for line in traits.lines if line.of_input]
    many = len(traits.stages) > 1
    parts = []
    for title, strength in (
        ("rows with longer answers than others", _longer),
        ("rows that are not ok more often than others", _worse),
    ):
        chosen = _in_order(lines, strength)
        if chosen:
            shown = [_row(line, many, strength(line)) for line in chosen]
            parts += [heading(title), table(shown, HEADS)]
    if not parts:
        return Html("")
    words = (
        f"From {traits.rows:,} rows, drawn at random where there are more. Weak: fewer than {FEW}"
        f" rows, or less than {SURE:.0f} standard errors from the others, which may be chance."
    )
    return section("Input fields and answers", note(words), *parts, name="fields")


def _longer(line: Line) -> float:
    return line.longer


def _worse(line: Line) -> float:
    return line.surplus("bad")


def _in_order(lines: Iterable[Line], strength: Callable[[Line], float]) -> list[Line]:
    """The strongest lines: the field with the strongest first, the sizes of each rising."""
    found = sorted((one for one in lines if strength(one) > LISTED), key=lambda o: -strength(o))
    found = found[:MOST]
    first: dict[tuple[str, str], int] = {}
    for place, line in enumerate(found):
        first.setdefault((line.stage, line.field), place)
    lowest = float("-inf")
    return sorted(
        found,
        key=lambda o: (first[o.stage, o.field], lowest if o.low is None else o.low),
    )


HEADS = {
    "stage": "stage",
    "field": "field",
    "value": "value",
    "rows": "rows",
    "tokens": "answer tokens",
    "others": "of others",
    "cut_percent": "cut off",
    "bad_percent": "not ok",
    "others_percent": "of others",
    "in_prompt": "in a prompt",
    "weak": "",
}


def _row(line: Line, many: bool, strength: float) -> dict[str, Any]:
    return {
        "stage": line.stage if many else None,
        "field": line.field,
        "value": line.shown,
        "rows": line.these.rows,
        "tokens": line.these.mean,
        "others": line.rest.mean,
        "cut_percent": _share(line, "cut"),
        "bad_percent": _share(line, "bad"),
        "others_percent": _rest(line, "bad"),
        "in_prompt": line.in_prompt,
        "weak": "weak" if strength < SURE or line.these.rows < FEW else None,
    }
