"""The statistics of input fields: answer tokens and failures of the rows that are alike in one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from bagent.duck import literal
from bagent.observe.formatting import visible
from bagent.report.failures import ERROR_HASH, FAULTS
from bagent.report.html import number
from bagent.report.queries import ReportDb
from bagent.store.tables.schema import pointer

SAMPLE = 30_000
SEED = 7
MOST_FIELDS = 40
MOST_VALUES = 40
MOST_NUMBERS = 12
LONGEST_VALUE = 60
"""Characters of a value that are kept."""

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
        return "absent" if self.value is None else visible(self.value, LONGEST_VALUE)

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
        db: the tables, with those that :func:`bagent.report.failures.causes` makes.
        in_prompt: see :class:`bagent.report.run.ReportInfo`.
        conditions: SQL over ``results`` of further groups of rows to compare with the others.
    """

    def __init__(
        self, db: ReportDb, in_prompt: frozenset[str] | None, conditions: Sequence[str] = ()
    ) -> None:
        self.lines: list[FieldStat] = []
        self.grows: dict[tuple[str, str], float] = {}
        self._db = db
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
            path = literal(pointer(name))
            self._add_field(name, f"json_extract_string(input, {path})", path)
        for name in ("endpoint", "model", "source", "prompt_tokens"):
            self._add_field(name, f"{name}::varchar", None)

    @property
    def complete(self) -> bool:
        """Whether they are of all rows, not of a sample."""
        return self.rows < SAMPLE

    def _is_used(self, name: str) -> bool | None:
        return None if self._in_prompt is None else name in self._in_prompt

    def _add_field(self, name: str, value: str, path: str | None) -> None:
        size, is_list = f"length({value})", "false"
        if path is not None:
            is_list = f"coalesce(json_type(input, {path}) = 'ARRAY', false)"
            size = f"case when {is_list} then json_array_length(input, {path}) else {size} end"
        self._db.run(
            f"create or replace temp table cells as select stage, bad, cut, tokens, groups,"
            f" left({value}, {LONGEST_VALUE}) as value, hash({value}) as whole,"
            f" case when isfinite(try_cast({value} as double)) then try_cast({value} as double) end"
            f" as number, ({size})::double as size, {is_list} as listed from sampled"
        )
        for shape in self._db.rows(
            "select stage, count(value) as n, count(number) as numbers,"
            " count(distinct whole) filter (value is not null) as many, max(size) as longest,"
            " bool_and(listed or value is null) as listed"
            " from cells group by stage order by stage"
        ):
            numeric = shape["numbers"] == shape["n"]
            long = not numeric and shape["longest"] >= LONGEST_VALUE
            few = MOST_NUMBERS if numeric or long else MOST_VALUES
            if not shape["n"]:
                continue
            if shape["many"] <= few:
                self._add_lines(name, shape["stage"], path, self._by_value(shape["stage"]), "")
                continue
            unit = "" if numeric else "items" if shape["listed"] else "characters"
            rows = self._by_size(shape["stage"], "number" if numeric else "size")
            self._add_lines(name, shape["stage"], path, rows, unit)

    def _add_lines(
        self, name: str, stage: str, path: str | None, rows: Iterable[dict[str, Any]], unit: str
    ) -> None:
        totals = self.stages[stage]
        for row in rows:
            matching = _totals(row)
            if row["grows"] is not None and path is not None:
                self.grows[stage, name] = row["grows"]
            if matching.rows < FEWEST or matching.rows == totals.rows:
                continue
            if path is None and row["value"] is None and row["low"] is None:
                continue  # failed rows have no model, and no counted tokens
            line = FieldStat(
                stage=stage,
                field=name.replace("_", " ") if path is None else name,
                value=row["value"],
                low=row["low"],
                high=row["high"],
                unit=unit,
                matching=matching,
                others=totals.minus(matching),
                spread=totals.spread,
                in_prompt=self._is_used(name) if path is not None else None,
                of_input=path is not None,
            )
            self.lines.append(line)

    def _by_value(self, stage: str) -> list[dict[str, Any]]:
        return self._db.rows(
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
        row = self._db.row(f"select [{', '.join(quantiles + begins)}] as edges from {here}")
        edges = sorted({edge for edge in row["edges"] if edge is not None})
        steps = " ".join(f"when m < {edge!r} then {n}" for n, edge in enumerate(edges))
        return self._db.rows(
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
    bits = [
        f"case when {condition} then {1 << number} else 0 end"
        for number, condition in enumerate(conditions, FAULTS)
    ]
    others = " | ".join(["0::bigint", *bits])
    db.run(
        f"""create or replace temp table sampled as
            select r.*, coalesce(1::bigint << (f.fault::int - 1), 0) | others as groups from (
                select stage, status, error_kind, {ERROR_HASH} as error_hash, input, endpoint,
                       model, source, prompt_tokens, error_kind is not null as bad,
                       case when status in ('ok', 'truncated') then completion_tokens end as tokens,
                       coalesce(finish_reason = 'length', false) or status = 'truncated' as cut,
                       {others} as others
                from results
                where copied_from is null and (endpoint is not null or error_kind is not null)
                using sample reservoir({SAMPLE} rows) repeatable ({SEED})
                ) as r
            left join patterns using (error_hash)
            left join faults as f on r.bad and f.fault <= {FAULTS} and r.stage = f.stage
                 and r.status = f.status and r.error_kind is not distinct from f.error_kind
                 and patterns.pattern = f.pattern"""
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
