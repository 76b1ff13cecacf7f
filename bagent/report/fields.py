"""The section on input fields: which go with long answers, and with failed rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from bagent.duck import literal
from bagent.observe.formatting import counted, visible
from bagent.report.failures import FAULTS, find
from bagent.report.html import Html, heading, note, number, percent, section, table
from bagent.report.queries import FEW, WEAK, ReportDb

SAMPLE = 30_000
SEED = 7
MOST_FIELDS = 40
MOST_VALUES = 40
MOST_NUMBERS = 12
FEWEST = 5
"""Rows that must be alike for a line of the table."""

EDGES = (0.5, 0.75, 0.9, 0.97)
"""Shares of all rows at which steps of sizes begin."""


class FieldTotals(msgspec.Struct, frozen=True):
    """Sums over all rows of one stage, or over those that are alike in something."""

    rows: int
    counted: int
    """Rows whose answer has a token count."""

    tokens: float
    cut: int
    bad: int
    groups: tuple[int, ...]
    """Rows of each group: of the commonest failures, then of the other conditions."""

    spread: float = 0.0

    def minus(self, part: FieldTotals) -> FieldTotals:
        """Return the totals without those of ``part``."""
        return FieldTotals(
            self.rows - part.rows,
            self.counted - part.counted,
            self.tokens - part.tokens,
            self.cut - part.cut,
            self.bad - part.bad,
            tuple(a - b for a, b in zip(self.groups, part.groups, strict=True)),
        )

    @property
    def mean(self) -> float | None:
        """Mean answer tokens of a row."""
        return self.tokens / self.counted if self.counted else None


class FieldStat(msgspec.Struct, frozen=True):
    """Rows of one stage that are alike in one field, compared with the others."""

    stage: str
    field: str
    value: str | None
    """Their value; None where they have none, or where it is a size."""

    low: float | None
    """The bounds of a size; None where it is no size."""

    high: float | None
    unit: str
    matching: FieldTotals
    others: FieldTotals
    spread: float
    """The standard deviation of answer tokens in the stage."""

    in_prompt: bool | None = None
    """Whether a prompt uses the field; None where that is not known."""

    of_input: bool = True
    """False for what is known of a row beyond its input."""

    @property
    def sized(self) -> bool:
        """Whether the value is a range of sizes."""
        return self.low is not None

    @property
    def label(self) -> str:
        """The value for a table."""
        if self.low is not None and self.high is not None:
            low, high = number(self.low), number(self.high)
            return f"{low if low == high else f'{low} to {high}'} {self.unit}".strip()
        return "absent" if self.value is None else visible(self.value, 60)

    @property
    def phrase(self) -> str:
        """The value for a sentence: ``kind = review``, ``20 to 40 characters of title``."""
        if self.sized and self.unit:
            return f"{self.label} of {self.field}"
        if self.sized:
            return f"{self.field} of {self.label}"
        return f"no {self.field}" if self.value is None else f"{self.field} = {self.label}"

    @property
    def longer(self) -> float:
        """By how many standard errors its answers are longer than the others'."""
        mean, others_mean = self.matching.mean, self.others.mean
        if mean is None or others_mean is None or self.spread <= 0:
            return 0.0
        return (mean - others_mean) * math.sqrt(self.matching.counted) / self.spread

    def surplus(self, name: str) -> float:
        """By how many standard errors its share of ``cut`` or ``bad`` rows is above the others'."""
        matching, others_count = getattr(self.matching, name), getattr(self.others, name)
        rows, other_rows = self.matching.rows, self.others.rows
        if not rows or not other_rows:
            return 0.0
        share = (matching + others_count) / (rows + other_rows)
        error = math.sqrt(share * (1 - share) * (1 / rows + 1 / other_rows))
        return (matching / rows - others_count / other_rows) / error if error else 0.0


class Traits:
    """The statistics of all fields.

    ``lines`` has one for each stage, field and value; ``grows`` the correlation of size and answer
    length for each stage and field with sizes.

    Args:
        ask: the tables, with ``faults`` as :func:`bagent.report.failures.find` makes it.
        in_prompt: see :class:`bagent.report.run.ReportInfo`.
        conditions: SQL over ``results`` of further groups of rows to compare with the others.
    """

    def __init__(
        self, db: ReportDb, in_prompt: frozenset[str] | None, conditions: Sequence[str] = ()
    ) -> None:
        self.lines: list[FieldStat] = []
        self.grows: dict[tuple[str, str], float] = {}
        self._ask = db
        self._in_prompt = in_prompt
        self._sums = _sums(FAULTS + len(conditions))
        _make_sample(db, conditions)
        self.stages = {
            row["stage"]: _totals(row)
            for row in db.rows(
                f"select stage, stddev_pop(tokens) as spread, {self._sums}"
                " from sampled group by stage"
            )
        }
        self.rows = sum(totals.rows for totals in self.stages.values())
        names = [row["name"] for row in db.rows(_NAMES)]
        for name in sorted(names, key=lambda name: (not self._is_used(name), name))[:MOST_FIELDS]:
            pointer = literal("/" + name.replace("~", "~0").replace("/", "~1"))
            self._add_field(name, f"json_extract_string(input, {pointer})", pointer)
        for name in ("endpoint", "model", "source", "prompt_tokens"):
            self._add_field(name, f"{name}::varchar", None)

    def _is_used(self, name: str) -> bool | None:
        return None if self._in_prompt is None else name in self._in_prompt

    def _add_field(self, name: str, value: str, pointer: str | None) -> None:
        size, is_list = f"length({value})", "false"
        if pointer is not None:
            is_list = f"coalesce(json_type(input, {pointer}) = 'ARRAY', false)"
            size = f"case when {is_list} then json_array_length(input, {pointer}) else {size} end"
        self._ask.run(
            f"create or replace temp table cells as select stage, bad, cut, tokens, groups,"
            f" left({value}, 60) as value, hash({value}) as whole,"
            f" case when isfinite(try_cast({value} as double)) then try_cast({value} as double) end"
            f" as number, ({size})::double as size, {is_list} as listed from sampled"
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
                self._add_lines(name, shape["stage"], pointer, self._by_value(shape["stage"]), "")
                continue
            unit = "" if numeric else "items" if shape["listed"] else "characters"
            rows = self._by_size(shape["stage"], "number" if numeric else "size")
            self._add_lines(name, shape["stage"], pointer, rows, unit)

    def _add_lines(
        self, name: str, stage: str, pointer: str | None, rows: Iterable[dict[str, Any]], unit: str
    ) -> None:
        totals = self.stages[stage]
        for row in rows:
            matching = _totals(row)
            if row["grows"] is not None and pointer is not None:
                self.grows[stage, name] = row["grows"]
            if matching.rows < FEWEST or matching.rows == totals.rows:
                continue
            line = FieldStat(
                stage=stage,
                field=name.replace("_", " ") if pointer is None else name,
                value=row["value"],
                low=row["low"],
                high=row["high"],
                unit=unit,
                matching=matching,
                others=totals.minus(matching),
                spread=totals.spread,
                in_prompt=self._is_used(name) if pointer is not None else None,
                of_input=pointer is not None,
            )
            self.lines.append(line)

    def _by_value(self, stage: str) -> list[dict[str, Any]]:
        return self._ask.rows(
            "select any_value(value) as value, null as low, null as high, null as grows,"
            f" {self._sums} from cells where stage = {literal(stage)}"
            " group by value is null, whole order by value"
        )

    def _by_size(self, stage: str, measure: str) -> list[dict[str, Any]]:
        """Steps begin at quantiles, and where the rows of each failure begin: that is a limit."""
        here = f"cells where stage = {literal(stage)}"
        begins = [f"quantile_disc({measure}, 0.05) filter ({_in(n)})" for n in range(FAULTS)]
        begins.append(f"quantile_disc({measure}, 0.05) filter (cut)")
        quantiles = [f"quantile_disc({measure}, {share})" for share in EDGES]
        row = self._ask.row(f"select [{', '.join(quantiles + begins)}] as edges from {here}")
        edges = sorted({edge for edge in row["edges"] if edge is not None})
        steps = " ".join(f"when m < {edge!r} then {n}" for n, edge in enumerate(edges))
        return self._ask.rows(
            f"""with ranked as (
                    select *, {measure} as m,
                           case when {measure} is not null and tokens is not null then
                                rank() over (order by {measure}) end as size_rank,
                           case when {measure} is not null and tokens is not null then
                                rank() over (order by tokens) end as length_rank from {here}),
                stepped as (
                    select *, case when m is null then -1 {steps} else {len(edges)} end as step
                    from ranked)
                select null as value, min(m) as low, max(m) as high,
                       (select corr(size_rank, length_rank) from stepped) as grows, {self._sums}
                from stepped group by step order by step"""
        )

    def of_group(self, group: int) -> Iterator[tuple[list[FieldStat], float, float]]:
        """Yield what most rows of a group have and few others, the clearest first.

        Each is the lines of one stage and field, the share of the group's rows that they hold, and
        their share of the other rows.
        """
        fields: dict[tuple[str, str], list[FieldStat]] = {}
        for line in self.lines:
            fields.setdefault((line.stage, line.field), []).append(line)
        candidates = []
        for (stage, _), lines in fields.items():
            totals = self.stages[stage]
            size = totals.groups[group]
            other_rows = totals.rows - size
            if size < FEWEST or not other_rows:
                continue
            typical = size / totals.rows
            lines = [o for o in lines if o.matching.groups[group] > 2 * typical * o.matching.rows]
            share = sum(line.matching.groups[group] for line in lines) / size
            other_share = (
                sum(line.matching.rows - line.matching.groups[group] for line in lines) / other_rows
            )
            if (
                lines
                and (lines[0].sized or len(lines) <= 3)
                and share >= 0.6
                and share - other_share > 0.3
            ):
                candidates.append((lines, share, other_share))
        yield from sorted(
            candidates,
            key=lambda candidate: (
                -round(candidate[1] - candidate[2], 2),
                not candidate[0][0].of_input,
            ),
        )


_NAMES = (
    "select distinct unnest(json_keys(input)) as name from sampled"
    " where json_type(input) = 'OBJECT' order by 1"
)


def _in(group: int) -> str:
    """Return SQL for rows of a group."""
    return f"(groups & {1 << group}) <> 0"


def _sums(groups: int) -> str:
    """Return SQL of :class:`FieldTotals`."""
    return (
        'count(*) as "rows", count(tokens) as counted, coalesce(sum(tokens), 0)::double as tokens,'
        " sum(cut::int) as cut, sum(bad::int) as bad, "
        + ", ".join(f"count(*) filter ({_in(n)}) as group{n}" for n in range(groups))
    )


def _make_sample(db: ReportDb, conditions: Sequence[str]) -> None:
    """Make the table ``sampled``: rows that were sent or failed, with a bit for each group.

    The first groups are the commonest failures, the others those of ``conditions``. ``tokens`` are
    those of usable answers only.
    """
    from bagent.store.tables.schema import ALIKE

    bits = [
        f"case when {condition} then {1 << number} else 0 end"
        for number, condition in enumerate(conditions, FAULTS)
    ]
    others = " | ".join(["0::bigint", *bits])
    db.run(
        f"""create or replace temp table sampled as
            select r.*, coalesce(1::bigint << (f.fault::int - 1), 0) | others as groups from (
                select stage, status, error_kind, {ALIKE} as pattern, input, endpoint, model,
                       source, prompt_tokens, error_kind is not null as bad,
                       case when status in ('ok', 'truncated') then completion_tokens end as tokens,
                       coalesce(finish_reason = 'length', false) or status = 'truncated' as cut,
                       {others} as others
                from results
                where copied_from is null and (endpoint is not null or error_kind is not null)
                ) as r
            left join faults as f on r.bad and f.fault <= {FAULTS} and r.stage = f.stage
                 and r.status = f.status and r.error_kind is not distinct from f.error_kind
                 and r.pattern = f.pattern
            using sample reservoir({SAMPLE} rows) repeatable ({SEED})"""
    )


def _totals(row: dict[str, Any]) -> FieldTotals:
    return FieldTotals(
        row["rows"],
        row["counted"],
        row["tokens"],
        row["cut"],
        row["bad"],
        tuple(value for name, value in row.items() if name.startswith("group")),
        row.get("spread") or 0.0,
    )


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


def long_answers(traits: Traits) -> list[str]:
    """Describe the fields whose rows get long answers, or answers that are cut off."""
    lines = [line for line in traits.lines if line.of_input and line.in_prompt is not False]
    lines = lines or [line for line in traits.lines if line.of_input]
    messages: dict[tuple[str, str], str] = {}
    first: FieldStat | None = None
    for line in sorted(lines, key=lambda o: -max(o.longer, o.surplus("cut"))):
        key = (line.stage, line.field)
        if key in messages or len(messages) == 3:
            continue
        message = _message(line, traits)
        if message and (first is None or not _weaker(line, first, traits)):
            first = first or line
            messages[key] = message
    return list(messages.values())


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
    """What the rows of a group have in common, and (stage, field) of each part."""

    text: str
    fields: tuple[tuple[str, str], ...]


def shared(traits: Traits, group: int) -> Shared:
    """Describe what the rows of a group share and other rows do not have.

    What is known beyond the input (the prompt's length) is used where no input field is shared.
    """
    traits_of_group = list(traits.of_group(group))
    of_input = [each for each in traits_of_group if each[0][0].of_input]
    clearest = (of_input or traits_of_group)[:2]
    if group >= FAULTS:  # of answers that may be wrong, only what is clear
        clearest = [each for each in clearest if each[1] >= ALMOST and each[2] <= 1 - ALMOST]
    parts = [
        f"{_together(lines)} ({percent(100 * share)} of them,"
        f" {percent(100 * other_share)} of the other rows"
        f"{', which is weak' * (share < ALMOST or other_share > 1 - ALMOST)})"
        for lines, share, other_share in clearest
    ]
    return Shared(
        "; ".join(parts), tuple((each[0][0].stage, each[0][0].field) for each in clearest)
    )


def in_common(db: ReportDb, in_prompt: frozenset[str] | None) -> dict[str, list[str]]:
    """Describe what failed rows share, and the fields whose rows get long answers, by title.

    Args:
        db: the tables of a run.
        in_prompt: the names that prompts use; None where they are not known.
    """
    faults = find(db)[:FAULTS]
    traits = Traits(db, in_prompt)
    messages = []
    for fault in faults:
        if parts := shared(traits, fault["fault"] - 1).text:
            rows = counted(fault["rows"], "row")
            messages.append(f"{rows} that failed ({fault['error_kind']}) share {parts}")
    long = [message.removeprefix(WEAK) for message in long_answers(traits)]
    topics = {"Failures": messages, "Long answers": long}
    return {title: topic for title, topic in topics.items() if topic}


def _together(lines: list[FieldStat]) -> str:
    """Write lines of one field as one phrase; steps of sizes become one range."""
    first = lines[0]
    lows, highs = [o.low for o in lines], [o.high for o in lines]
    if first.sized and None not in lows and None not in highs:
        least = min(low for low in lows if low is not None)
        most = max(high for high in highs if high is not None)
        return type(first)(
            **{name: getattr(first, name) for name in first.__struct_fields__}
            | {"low": least, "high": most}
        ).phrase
    return " or ".join([first.phrase, *(line.label for line in lines[1:])])


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
