"""What the answers of a run hold: values, numbers and lengths of each property of the schema."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from bagent.duck import literal, quoted
from bagent.report.queries import ReportDb
from bagent.store.tables.schema import ANSWER_KEY, answer_names

FieldKind = Literal["values", "numbers", "lengths", "items", "other"]

MOST_FIELDS = 40
MOST_VALUES = 24
"""Distinct values of a property that are drawn; a property with more has its lengths drawn."""

LONGEST_VALUE = 60
"""Characters of the longest value that is drawn as a value."""

STEPS = 18
"""Bins of numbers and lengths."""

FAR = 3.0
"""Numbers lie far apart if all span so many times the width of the middle 98 hundredths."""

_WHOLE = ("BIGINT", "INTEGER")
_NICE = (1, 2, 2.5, 5, 10)


class FieldBar(msgspec.Struct, frozen=True):
    """One bar: rows with a value, or with a number or length from ``low`` to below ``high``."""

    label: str
    rows: int
    value: str | None = None
    low: float | None = None
    high: float | None = None
    far: bool = False
    """Whether it holds what lies far from the others."""


class FieldProfile(msgspec.Struct, frozen=True):
    """The distribution of one property over the ok answers."""

    name: str | None
    """The property; None is the whole answer."""

    kind: FieldKind
    rows: int
    """Answers that have a value."""

    missing: int
    """Answers without it, or with null."""

    bars: list[FieldBar] = []
    summary: str = ""

    @property
    def longest(self) -> int:
        """The rows of the longest bar."""
        return max((bar.rows for bar in self.bars), default=0)


def property_names(columns: Iterable[tuple[str | None, str]]) -> dict[str, str]:
    """Return the property of each column of ``answers``.

    Args:
        columns: property and type of each, as ``run.json`` has them.
    """
    names = answer_names(name for name, _ in columns if name is not None)
    return {column: name for name, column in names.items()}


def answer_columns(db: ReportDb) -> dict[str, str]:
    """Return the columns of ``answers`` that hold properties, with their types."""
    described = db.rows("describe answers")
    columns = {row["column_name"]: row["column_type"] for row in described}
    return {name: kind for name, kind in columns.items() if name not in ANSWER_KEY}


def profile_answers(
    db: ReportDb, stage: str | None, names: Mapping[str, str]
) -> list[FieldProfile]:
    """Return the distribution of every property, or else the lengths of the texts.

    See :func:`profile_fields` for the arguments.
    """
    return profile_fields(db, stage, names) or profile_texts(db, stage)


def profile_fields(db: ReportDb, stage: str | None, names: Mapping[str, str]) -> list[FieldProfile]:
    """Return the distribution of every property in the order of the schema.

    Args:
        db: the tables of a run.
        stage: only answers of this stage; None for all.
        names: the property of each column of ``answers``; a column without one holds the answer.
    """
    columns = dict(list(answer_columns(db).items())[:MOST_FIELDS])
    if not columns:
        return []
    source = "answers" if stage is None else f"(from answers where stage = {literal(stage)})"
    sums = db.row(f"select count(*) as total, {', '.join(_sums(columns))} from {source}")
    profiles = []
    for number, (column, kind) in enumerate(columns.items()):
        stats = {key.partition("_")[2]: sums[key] for key in sums if key.startswith(f"f{number}_")}
        profile = _profile(db, source, (column, kind), stats, sums["total"])
        profiles.append(msgspec.structs.replace(profile, name=names.get(column)))
    return [profile for profile in profiles if profile.rows or profile.missing]


def profile_texts(db: ReportDb, stage: str | None) -> list[FieldProfile]:
    """Return the lengths of the texts of ok answers; empty without an answer."""
    condition = "status = 'ok' and text is not null"
    if stage is not None:
        condition += f" and stage = {literal(stage)}"
    source = f"(select text from results where {condition})"
    sums = db.row(
        "select count(*) as count, min(length(text)) as low, max(length(text)) as high,"
        " approx_quantile(length(text), 0.5) as middle,"
        f" approx_quantile(length(text)::double, [0.01, 0.99]) as ends from {source}"
    )
    if not sums["count"]:
        return []
    bars = _bins(db, source, "length(text)", sums, whole=True)
    return [FieldProfile(None, "lengths", sums["count"], 0, bars, _range(sums, " characters"))]


def _sums(columns: dict[str, str]) -> Iterable[str]:
    """Yield SQL for the sums of each column that say how to draw it, in one scan."""
    for number, (name, kind) in enumerate(columns.items()):
        column = quoted(name)
        yield f"count({column}) as f{number}_count"
        measure = _measure(column, kind)
        if kind == "VARCHAR" or kind in _WHOLE:
            yield f"approx_count_distinct({column}) as f{number}_distinct"
        if measure is not None:
            yield f"min({measure}) as f{number}_low"
            yield f"max({measure}) as f{number}_high"
            yield f"approx_quantile({measure}, 0.5) as f{number}_middle"
            yield f"approx_quantile({measure}::double, [0.01, 0.99]) as f{number}_ends"


def _measure(column: str, kind: str) -> str | None:
    """Return SQL for the number by which values of a type are counted in bins."""
    if kind == "VARCHAR":
        return f"length({column})"
    if kind.endswith("[]"):
        return f"len({column})"
    if is_number(kind):
        return f"(case when isfinite({column}::double) then {column}::double end)"
    return None


def is_number(kind: str) -> bool:
    """Return whether a column of this type holds numbers."""
    return kind.startswith("DECIMAL") or kind in ("BIGINT", "DOUBLE", "INTEGER", "FLOAT")


def is_whole(kind: str) -> bool:
    """Return whether numbers of this type are written without a fraction."""
    return kind not in ("DOUBLE", "FLOAT")


def _profile(
    db: ReportDb, source: str, column: tuple[str, str], stats: dict[str, Any], total: int
) -> FieldProfile:
    name, kind = column
    count, missing = stats["count"], total - stats["count"]
    measure = _measure(quoted(name), kind)
    if not count:
        return FieldProfile(name, "other", 0, missing)
    if kind == "BOOLEAN" or _is_enum(kind, stats):
        bars = _values(db, source, name, rising=kind in _WHOLE)
        if len(bars) <= MOST_VALUES:
            return FieldProfile(name, "values", count, missing, bars)
    if measure is None:
        return FieldProfile(name, "other", count, missing)
    whole = is_whole(kind)
    if whole and stats["middle"] is not None:
        stats["middle"] = round(stats["middle"])
    bars = _bins(db, source, measure, stats, whole=whole)
    if kind == "VARCHAR":
        return FieldProfile(name, "lengths", count, missing, bars, _range(stats, " characters"))
    if kind.endswith("[]"):
        return FieldProfile(name, "items", count, missing, bars, _range(stats, " items"))
    return FieldProfile(name, "numbers", count, missing, bars, _range(stats))


def _is_enum(kind: str, stats: dict[str, Any]) -> bool:
    """Return whether each value has a bar: of short texts, and of whole numbers with gaps."""
    distinct = stats.get("distinct")
    if distinct is None:
        return False
    if kind in _WHOLE:
        span = stats["high"] - stats["low"]
        return bool(distinct <= MOST_VALUES // 2 and span > STEPS)
    if stats["high"] > LONGEST_VALUE or distinct > 2 * MOST_VALUES:
        return False
    return bool(distinct < 4 or distinct <= stats["count"] / 2)


def _values(db: ReportDb, source: str, name: str, *, rising: bool) -> list[FieldBar]:
    column = quoted(name)
    order = f"min({column})" if rising else "n desc, 1"
    rows = db.rows(
        f"select {column}::varchar as value, count(*) as n from {source}"
        f" where {column} is not null group by 1 order by {order} limit {MOST_VALUES + 1}"
    )
    return [FieldBar(row["value"] or "(empty)", row["n"], value=row["value"]) for row in rows]


def _bins(
    db: ReportDb, source: str, measure: str, stats: dict[str, Any], *, whole: bool
) -> list[FieldBar]:
    """Count in bins of one width; whole numbers have bins that begin at whole numbers.

    What lies far out has a bin of its own at each end.
    """
    if stats["low"] is None:
        return []
    low, high = float(stats["low"]), float(stats["high"])
    inner_low, inner_high = _without_far_ends(low, high, stats["ends"])
    step = bin_width(inner_low, inner_high, whole=whole)
    first, last = math.floor(inner_low / step), math.floor(inner_high / step)
    end = (last + 1) * step
    if last > first and inner_high == last * step and step != 1:
        last -= 1  # a highest number at an edge is below
        end = inner_high + 1 if whole else math.nextafter(inner_high, math.inf)
    rows = db.rows(
        f"select case when {measure} >= {end!r} then {last + 1} else"
        f" greatest({first - 1}, least(floor({measure} / {step!r})::bigint, {last})) end as bin,"
        f" count(*) as n from {source} where {measure} is not null group by 1 order by 1"
    )
    counts = {row["bin"]: row["n"] for row in rows}
    edges = {first - 1: low, last + 1: end, last + 2: math.nextafter(high, math.inf)}
    return [
        _bar(
            edges.get(number, number * step),
            edges.get(number + 1, (number + 1) * step),
            counts.get(number, 0),
            whole=whole,
            far=not first <= number <= last,
        )
        for number in range(min(counts, default=0), max(counts, default=-1) + 1)
    ]


def _bar(start: float, end: float, rows: int, *, whole: bool, far: bool) -> FieldBar:
    """Return the bar of numbers from ``start`` to below ``end``."""
    top = math.ceil(end) - 1 if whole else float(f"{end:.12g}")
    label = plain_number(start)
    if start != top:
        label += f" to {plain_number(top)}"
    return FieldBar(label, rows, None, start, end, far)


def _without_far_ends(low: float, high: float, ends: list[float] | None) -> tuple[float, float]:
    """Return the range that the bins divide; what lies beyond has a bin at each end.

    It ends at the outermost hundredths where they are far from the others.
    """
    if ends is None or not high - low > FAR * (ends[1] - ends[0]) > 0:
        return low, high
    return max(low, ends[0]), min(high, ends[1])


def bin_width(low: float, high: float, *, whole: bool) -> float:
    """Return a round width that makes at most :data:`STEPS` bins, at least 1 for whole numbers."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return 1.0 if whole or not math.isfinite(span) else max(abs(low), 1.0)
    unit = 10.0 ** math.floor(math.log10(span / STEPS))
    width = next(unit * nice for nice in _NICE if span / (unit * nice) <= STEPS)
    if whole:
        return max(1.0, float(math.ceil(width)))
    return float(f"{width:.12g}")


def _range(stats: dict[str, Any], unit: str = "") -> str:
    """Return the least, greatest and middle value, or the only one."""
    low, high, middle = (plain_number(stats[name]) for name in ("low", "high", "middle"))
    return f"always {low}{unit}" if low == high else f"{low} to {high}{unit}, median {middle}"


def plain_number(value: float) -> str:
    """Return a number without needless digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
