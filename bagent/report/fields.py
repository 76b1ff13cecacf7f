"""Which field of the input goes with long answers, and with rows that are not ok?"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import msgspec

from bagent.duck import literal
from bagent.observe.formatting import visible
from bagent.report.failures import FAULTS
from bagent.report.html import FEW, WEAK, Html, heading, note, number, section, table
from bagent.report.queries import ReportDb

SAMPLE = 30_000
SEED = 7
MOST_FIELDS = 40
MOST_VALUES = 40
MOST_NUMBERS = 12
FEWEST = 5
"""Rows that must be alike to be worth a line."""

EDGES = (0.5, 0.75, 0.9, 0.97)
"""Where steps of sizes begin, as shares of all rows."""

_NUMBERS = range(1, FAULTS + 1)
_SUMS = (
    'count(*) as "rows", count(tokens) as told, coalesce(sum(tokens), 0)::double as tokens,'
    " sum(cut::int) as cut, sum(bad::int) as bad, "
    + ", ".join(f"count(*) filter (fault = {n}) as fault{n}" for n in _NUMBERS)
)


class FieldTotals(msgspec.Struct, frozen=True):
    """All rows of one stage, or those that are alike in something: sums over them."""

    rows: int
    told: int
    tokens: float
    cut: int
    bad: int
    faults: tuple[int, ...]
    spread: float = 0.0

    def less(self, part: FieldTotals) -> FieldTotals:
        """What is left without a part of it."""
        return FieldTotals(
            self.rows - part.rows,
            self.told - part.told,
            self.tokens - part.tokens,
            self.cut - part.cut,
            self.bad - part.bad,
            tuple(a - b for a, b in zip(self.faults, part.faults, strict=True)),
        )

    @property
    def mean(self) -> float | None:
        """Answer tokens of a row on average."""
        return self.tokens / self.told if self.told else None


class FieldStat(msgspec.Struct, frozen=True):
    """Rows of one stage that are alike in one field.

    ``value`` is what they have there, ``low`` and ``high`` its bounds where it is a size in
    ``unit``; all None where they have nothing there. ``rest`` are the other rows of the stage.
    ``in_prompt`` is None where it is not known whether a prompt uses the field; ``of_input`` tells
    a field of the input from what else is known of a row.
    """

    stage: str
    field: str
    value: str | None
    low: float | None
    high: float | None
    unit: str
    these: FieldTotals
    rest: FieldTotals
    spread: float
    in_prompt: bool | None = None
    of_input: bool = True

    @property
    def sized(self) -> bool:
        """Whether it is a step of sizes."""
        return self.low is not None

    @property
    def shown(self) -> str:
        """The value in words, for a table."""
        if self.low is not None and self.high is not None:
            low, high = number(self.low), number(self.high)
            return f"{low if low == high else f'{low} to {high}'} {self.unit}".strip()
        return "absent" if self.value is None else visible(self.value, 60)

    @property
    def phrase(self) -> str:
        """The same as what a row has: ``kind = review``, ``20 to 40 characters of title``."""
        if self.sized and self.unit:
            return f"{self.shown} of {self.field}"
        if self.sized:
            return f"{self.field} of {self.shown}"
        return f"no {self.field}" if self.value is None else f"{self.field} = {self.shown}"

    @property
    def longer(self) -> float:
        """How many standard errors its answers are longer than those of the rest."""
        mean, usual = self.these.mean, self.rest.mean
        if mean is None or usual is None or self.spread <= 0:
            return 0.0
        return (mean - usual) * math.sqrt(self.these.told) / self.spread

    def surplus(self, name: str) -> float:
        """How many standard errors the share of ``cut`` or ``bad`` rows is above the rest's."""
        mine, others = getattr(self.these, name), getattr(self.rest, name)
        rows, rest = self.these.rows, self.rest.rows
        if not rows or not rest:
            return 0.0
        share = (mine + others) / (rows + rest)
        error = math.sqrt(share * (1 - share) * (1 / rows + 1 / rest))
        return (mine / rows - others / rest) / error if error else 0.0


class Traits:
    """The lines of all fields, and for each stage and field with sizes the correlation.

    Args:
        ask: the tables, with ``faults`` as :func:`bagent.report.failures.find` makes it.
        in_prompt: names that the prompts use; None: not known, or the row as a whole.
    """

    def __init__(self, ask: ReportDb, in_prompt: frozenset[str] | None) -> None:
        self.lines: list[FieldStat] = []
        self.grows: dict[tuple[str, str], float] = {}
        self._ask = ask
        self._in_prompt = in_prompt
        _make_sample(ask)
        self.stages = {
            row["stage"]: _whole(row)
            for row in ask.rows(
                f"select stage, stddev_pop(tokens) as spread, {_SUMS} from sampled group by stage"
            )
        }
        self.rows = sum(whole.rows for whole in self.stages.values())
        names = [row["name"] for row in ask.rows(_NAMES)]
        for name in sorted(names, key=lambda name: (not self._is_used(name), name))[:MOST_FIELDS]:
            pointer = literal("/" + name.replace("~", "~0").replace("/", "~1"))
            self._look(name, f"json_extract_string(input, {pointer})", pointer)
        for name in ("endpoint", "model", "source", "prompt_tokens"):
            self._look(name, f"{name}::varchar", None)

    def _is_used(self, name: str) -> bool | None:
        return None if self._in_prompt is None else name in self._in_prompt

    def _look(self, name: str, value: str, pointer: str | None) -> None:
        size, listed = f"length({value})", "false"
        if pointer is not None:
            listed = f"coalesce(json_type(input, {pointer}) = 'ARRAY', false)"
            size = f"case when {listed} then json_array_length(input, {pointer}) else {size} end"
        self._ask.run(
            f"create or replace temp table cells as select stage, bad, cut, tokens, fault,"
            f" left({value}, 60) as value, hash({value}) as whole,"
            f" case when isfinite(try_cast({value} as double)) then try_cast({value} as double) end"
            f" as number, ({size})::double as size, {listed} as listed from sampled"
        )
        for shape in self._ask.rows(
            "select stage, count(value) as n, count(number) as numbers,"
            " count(distinct whole) filter (value is not null) as many,"
            " bool_and(listed or value is null) as listed"
            " from cells group by stage order by stage"
        ):
            numeric = shape["numbers"] == shape["n"]
            few = MOST_NUMBERS if numeric else MOST_VALUES
            if not shape["n"]:
                continue
            if shape["many"] <= few:
                self._take(name, shape["stage"], pointer, self._by_value(shape["stage"]), "")
                continue
            unit = "" if numeric else "items" if shape["listed"] else "characters"
            rows = self._by_size(shape["stage"], "number" if numeric else "size")
            self._take(name, shape["stage"], pointer, rows, unit)

    def _take(
        self, name: str, stage: str, pointer: str | None, rows: Iterable[dict[str, Any]], unit: str
    ) -> None:
        whole = self.stages[stage]
        for row in rows:
            these = _whole(row)
            if row["grows"] is not None and pointer is not None:
                self.grows[stage, name] = row["grows"]
            if these.rows < FEWEST or these.rows == whole.rows:
                continue
            line = FieldStat(
                stage=stage,
                field=name.replace("_", " ") if pointer is None else name,
                value=row["value"],
                low=row["low"],
                high=row["high"],
                unit=unit,
                these=these,
                rest=whole.less(these),
                spread=whole.spread,
                in_prompt=self._is_used(name) if pointer is not None else None,
                of_input=pointer is not None,
            )
            self.lines.append(line)

    def _by_value(self, stage: str) -> list[dict[str, Any]]:
        return self._ask.rows(
            "select any_value(value) as value, null as low, null as high, null as grows,"
            f" {_SUMS} from cells where stage = {literal(stage)}"
            " group by value is null, whole order by value"
        )

    def _by_size(self, stage: str, measure: str) -> list[dict[str, Any]]:
        """Steps from quantiles, and from where the rows of each failure begin: that is a limit."""
        here = f"cells where stage = {literal(stage)}"
        begins = [f"quantile_disc({measure}, 0.05) filter (fault = {n})" for n in _NUMBERS]
        begins.append(f"quantile_disc({measure}, 0.05) filter (cut)")
        quantiles = [f"quantile_disc({measure}, {share})" for share in EDGES]
        found = self._ask.row(f"select [{', '.join(quantiles + begins)}] as edges from {here}")
        edges = sorted({edge for edge in found["edges"] if edge is not None})
        steps = " ".join(f"when m < {edge!r} then {n}" for n, edge in enumerate(edges))
        return self._ask.rows(
            f"""with placed as (
                    select *, {measure} as m,
                           case when {measure} is not null and tokens is not null then
                                rank() over (order by {measure}) end as place,
                           case when {measure} is not null and tokens is not null then
                                rank() over (order by tokens) end as long from {here}),
                stepped as (
                    select *, case when m is null then -1 {steps} else {len(edges)} end as step
                    from placed)
                select null as value, min(m) as low, max(m) as high,
                       (select corr(place, long) from stepped) as grows, {_SUMS}
                from stepped group by step order by step"""
        )

    def of_fault(self, fault: int) -> Iterator[tuple[list[FieldStat], float, float]]:
        """What most rows of a group of failures have, and few others: the best first.

        Yields lines of one stage and field that belong together, the share of the group's rows
        that they hold, and their share of the other rows.
        """
        fields: dict[tuple[str, str], list[FieldStat]] = {}
        for line in self.lines:
            fields.setdefault((line.stage, line.field), []).append(line)
        found = []
        for (stage, _), lines in fields.items():
            whole = self.stages[stage]
            group = whole.faults[fault - 1]
            rest = whole.rows - group
            if group < FEWEST or not rest:
                continue
            usual = group / whole.rows
            lines = [o for o in lines if o.these.faults[fault - 1] > 2 * usual * o.these.rows]
            mine = sum(line.these.faults[fault - 1] for line in lines) / group
            others = sum(line.these.rows - line.these.faults[fault - 1] for line in lines) / rest
            if (
                lines
                and (lines[0].sized or len(lines) <= 3)
                and mine >= 0.6
                and mine - others > 0.3
            ):
                found.append((lines, mine, others))
        yield from sorted(
            found, key=lambda one: (-round(one[1] - one[2], 2), not one[0][0].of_input)
        )


_NAMES = (
    "select distinct unnest(json_keys(input)) as name from sampled"
    " where json_type(input) = 'OBJECT' order by 1"
)


def _make_sample(ask: ReportDb) -> None:
    """``sampled``: rows that were asked about or failed, with the number of their failure.

    ``tokens`` are those of answers: what was asked for again and stayed invalid is none.
    """
    from bagent.store.tables.views import ALIKE

    ask.run(
        f"""create or replace temp table sampled as
            select r.*, f.fault from (
                select stage, status, error_kind, {ALIKE} as pattern, input, endpoint, model,
                       source, prompt_tokens, status <> 'ok' as bad,
                       case when status in ('ok', 'truncated') then completion_tokens end as tokens,
                       coalesce(finish_reason = 'length', false) or status = 'truncated' as cut
                from results where copied_from is null and (endpoint is not null or status <> 'ok')
                ) as r
            left join faults as f on r.bad and f.fault <= {FAULTS} and r.stage = f.stage
                 and r.status = f.status and r.error_kind is not distinct from f.error_kind
                 and r.pattern = f.pattern
            using sample reservoir({SAMPLE} rows) repeatable ({SEED})"""
    )


def _whole(row: dict[str, Any]) -> FieldTotals:
    return FieldTotals(
        row["rows"],
        row["told"],
        row["tokens"],
        row["cut"],
        row["bad"],
        tuple(row[f"fault{n}"] for n in _NUMBERS),
        row.get("spread") or 0.0,
    )


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
    first: FieldStat | None = None
    for line in sorted(lines, key=lambda o: -max(o.longer, o.surplus("cut"))):
        key = (line.stage, line.field)
        if key in words or len(words) == 3:
            continue
        said = _told(line, traits)
        if said and (first is None or not _weaker(line, first, traits)):
            first = first or line
            words[key] = said
    return list(words.values())


def _weaker(line: FieldStat, first: FieldStat, traits: Traits) -> bool:
    """Whether a field says much less than the first: it may go with that one only."""
    mine, best = (
        traits.grows.get((one.stage, one.field)) if one.sized else None for one in (line, first)
    )
    if mine is not None and best is not None:
        return mine < STRONG * best
    return line.longer < STRONG * first.longer


def _told(line: FieldStat, traits: Traits) -> str:
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


def _together(lines: list[FieldStat]) -> str:
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


def _share(line: FieldStat, name: str) -> float:
    """Percent of its rows."""
    return float(100 * getattr(line.these, name) / line.these.rows)


def _rest(line: FieldStat, name: str) -> float:
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


def _longer(line: FieldStat) -> float:
    return line.longer


def _worse(line: FieldStat) -> float:
    return line.surplus("bad")


def _in_order(
    lines: Iterable[FieldStat], strength: Callable[[FieldStat], float]
) -> list[FieldStat]:
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


def _row(line: FieldStat, many: bool, strength: float) -> dict[str, Any]:
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
