"""Answers that may be wrong: texts that repeat, numbers far from the others, one endpoint's own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bagent.duck import literal, quoted
from bagent.observe.formatting import counted, visible
from bagent.report.answer_fields import (
    MOST_FIELDS,
    MOST_VALUES,
    FieldBar,
    FieldProfile,
    answer_columns,
    is_number,
    is_whole,
    plain_number,
)
from bagent.report.queries import ReportDb
from bagent.store.tables.schema import RESULTS, pointer

MOST_SUSPECTS = 8
MOST_REPEATED = 3
"""Repeated texts of one field that are named."""

REPEATS = 5
"""Fewest answers with one text for it to be named."""

REPEATED_SHARE = 0.005
"""The same as a share of all answers."""

DIFFERENT_SHARE = 0.5
"""Least share of different texts in a field; below it, a repeated text is usual."""

FAR = 3.0
"""A number is far off if its distance from the middle nine tenths is so many times their width."""

FAR_SHARE = 0.01
"""Largest share of far numbers; more of them are part of the distribution."""

MOST_TEXT = 120
"""Characters of a repeated text that are shown."""

ENDPOINT_ROWS = 30
"""Fewest answers of an endpoint, and of the others, for them to be compared."""

ENDPOINT_POINTS = 0.25
"""Least difference between the share (0 to 1) of a value at an endpoint and at the others."""

ENDPOINT_ERRORS = 6.0
"""Least such difference in standard errors."""

SAMPLE = 40_000
"""About how many rows are searched for repeated texts, and for what one endpoint answers."""


class Suspect(msgspec.Struct, frozen=True):
    """Answers that stand out; ``profile`` and ``bar`` select them, ``endpoint`` one server's."""

    message: str
    profile: FieldProfile
    bar: FieldBar
    endpoint: str | None = None
    stage: str | None = None

    @property
    def condition(self) -> str:
        """SQL over ``results`` that selects them."""
        value = f"json_extract_string(output, {literal(pointer(self.profile.name))})"
        return f"status = 'ok' and {self._test(value, f'try_cast({value} as double)')}"

    def where(self, db: ReportDb) -> str:
        """Return the condition for ``bagent results --where``."""
        name = self.profile.name or "value"
        column = db.plain_name(name)
        if name.casefold() in RESULTS:
            column = f"output ->> {literal(pointer(name))}"
        return self._test(column, column)

    def _test(self, text: str, number: str) -> str:
        """Return the condition on a value, given the SQL of its text and of its number."""
        bar = self.bar
        high = math.nextafter(bar.high or 0.0, -math.inf)
        if bar.value == "":
            parts = [f"trim({text}) = ''"]
        elif bar.value is not None:
            parts = [f"{text} = {literal(bar.value)}"]
        elif bar.low == high:
            parts = [f"{number} = {_number_sql(high)}"]
        else:
            parts = [f"{number} between {_number_sql(bar.low or 0.0)} and {_number_sql(high)}"]
        columns = (("endpoint", self.endpoint), ("stage", self.stage))
        parts += [f"{name} = {literal(value)}" for name, value in columns if value is not None]
        return " and ".join(parts)


def _number_sql(value: float) -> str:
    """Return a number with all its digits, without ``.0`` at its end."""
    return repr(value).removesuffix(".0")


def find_suspects(db: ReportDb, stage: str | None, names: Mapping[str, str]) -> list[Suspect]:
    """Return the ok answers that a person should look at.

    Args:
        db: the tables of a run.
        stage: only answers of this stage; None for all.
        names: the property of each column of ``answers``.
    """
    columns = {
        column: kind
        for column, kind in list(answer_columns(db).items())[:MOST_FIELDS]
        if column in names
    }
    if not columns:
        return []
    source = "answers" if stage is None else f"(from answers where stage = {literal(stage)})"
    measures = {column: _measures(quoted(column), kind) for column, kind in columns.items()}
    columns_sql = ", ".join(
        f"{sql} as f{number}_{name}"
        for number, measure in enumerate(measures.values())
        for name, sql in measure.items()
    )
    sums = db.row(f"select count(*) as total, {columns_sql} from {source}")
    sample = _sample(sums["total"])
    suspects: list[Suspect] = []
    few_values: list[str] = []
    for number, (column, kind) in enumerate(columns.items()):
        stats = {name: sums[f"f{number}_{name}"] for name in measures[column]}
        if kind == "VARCHAR":
            suspects += _texts(db, source, (column, names[column]), stats, sample)
        elif is_number(kind):
            if is_whole(kind) and stats["middle"]:
                stats["middle"] = [*map(round, stats["middle"])]
            suspects += _numbers(db, source, (column, names[column]), stats)
        if 1 < stats.get("distinct", 0) <= MOST_VALUES:
            few_values.append(names[column])
    if few_values:
        suspects = [*_endpoints(db, stage, few_values, sample), *suspects]
    return [msgspec.structs.replace(each, stage=stage) for each in suspects[:MOST_SUSPECTS]]


def count_all(db: ReportDb, suspects: Sequence[Suspect]) -> str:
    """Write how many answers the suspects are; empty unless there are several suspects."""
    if len(suspects) < 2:
        return ""
    condition = " or ".join(f"({suspect.condition})" for suspect in suspects)
    total = db.row(f"select count(*) as n from results where {condition}")["n"]
    return f"{counted(total, 'answer')} in all, each counted once"


def _sample(total: int) -> str:
    """Return the SQL that takes a sample of many rows, empty for few."""
    share = 100 * SAMPLE / total if total else 100.0
    return f"using sample {share:.4f} percent (system, 1)" if share < 50 else ""


def _measures(column: str, kind: str) -> dict[str, str]:
    measures = {"count": f"count({column})"}
    if kind == "VARCHAR":
        measures["distinct"] = f"approx_count_distinct({column})"
        measures["blank"] = f"count(*) filter (trim({column}) = '')"
    elif kind == "BOOLEAN":
        measures["distinct"] = "2"
    elif is_number(kind):
        measures["middle"] = (
            f"approx_quantile({column}::double, [0.05, 0.95]) filter (isfinite({column}::double))"
        )
    return measures


def _texts(
    db: ReportDb, source: str, column: tuple[str, str], stats: dict[str, Any], sample: str
) -> Iterator[Suspect]:
    """Yield texts that are blank, or repeat where most differ."""
    name, count = column[1], stats["count"]
    profile = FieldProfile(name, "values", count, 0)
    if stats["blank"]:
        bar = FieldBar("", stats["blank"], value="")
        yield Suspect(f"{counted(stats['blank'], 'answer')} with a blank {name}", profile, bar)
    if not count or stats["distinct"] < DIFFERENT_SHARE * count:
        return
    column_sql = quoted(column[0])
    common = db.rows(
        f"select {column_sql} as value from (select {column_sql} from {source} {sample})"
        f" where {column_sql} is not null group by 1 having count(*) > 1"
        f" order by count(*) desc limit {MOST_REPEATED + 1}"
    )
    if not common:
        return
    values = ", ".join(literal(row["value"]) for row in common)
    rows = db.rows(
        f"select {column_sql} as value, count(*) as n from {source}"
        f" where {column_sql} in ({values}) and trim({column_sql}) <> '' group by 1"
        f" having n >= {max(REPEATS, REPEATED_SHARE * count)} order by n desc limit {MOST_REPEATED}"
    )
    for row in rows:
        text = visible(row["value"], MOST_TEXT)
        message = f"{counted(row['n'], 'answer')} with the same {name}, which differs elsewhere: "
        yield Suspect(f'{message}"{text}"', profile, FieldBar(text, row["n"], value=row["value"]))


def _numbers(
    db: ReportDb, source: str, column: tuple[str, str], stats: dict[str, Any]
) -> Iterator[Suspect]:
    """Yield numbers that lie far from nearly all others."""
    if not stats["count"] or not stats["middle"]:
        return
    low, high = stats["middle"]
    width = high - low
    if not width > 0 or not math.isfinite(width):
        return
    value = f"{quoted(column[0])}::double"
    for side in (f"< {low - FAR * width!r}", f"> {high + FAR * width!r}"):
        far = db.row(
            f"select count(*) as n, min({value}) as low, max({value}) as high"
            f" from {source} where isfinite({value}) and {value} {side}"
        )
        if not 0 < far["n"] <= FAR_SHARE * stats["count"]:
            continue
        ends = [plain_number(end) for end in (far["low"], far["high"])]
        numbers = ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
        message = (
            f"{counted(far['n'], 'answer')} with {column[1]} {numbers}; "
            f"most have {plain_number(low)} to {plain_number(high)}"
        )
        end = math.nextafter(far["high"], math.inf)
        bar = FieldBar(numbers, far["n"], None, far["low"], end)
        yield Suspect(message, FieldProfile(column[1], "numbers", stats["count"], 0), bar)


def _endpoints(
    db: ReportDb, stage: str | None, names: Sequence[str], sample: str
) -> Iterator[Suspect]:
    """Yield for each property the value that one endpoint gives much more often than the others."""
    condition = "status = 'ok' and endpoint is not null and copied_from is null"
    if stage is not None:
        condition += f" and stage = {literal(stage)}"
    values = ", ".join(
        f"json_extract_string(output, {literal(pointer(name))}) as f{number}"
        for number, name in enumerate(names)
    )
    db.run(
        f"create or replace temp table served as select endpoint, {values} from"
        f" (select endpoint, output from results where {condition} {sample})"
    )
    for number, name in enumerate(names):
        rows = db.rows(
            f"select endpoint, f{number} as value, count(*) as n from served group by all"
        )
        yield from _one_endpoint(name, {(row["endpoint"], row["value"]): row["n"] for row in rows})


def _one_endpoint(name: str, counts: Mapping[tuple[str, str | None], int]) -> Iterator[Suspect]:
    """Yield the value that stands out most, if one does; ``counts`` are by endpoint and value."""
    total = sum(counts.values())
    by_endpoint, by_value = Counter[str](), Counter[str | None]()
    for (endpoint, value), n in counts.items():
        by_endpoint[endpoint] += n
        by_value[value] += n
    candidates: list[tuple[float, Suspect]] = []
    for (endpoint, value), n in counts.items():
        own, other = by_endpoint[endpoint], total - by_endpoint[endpoint]
        if value is None or own < ENDPOINT_ROWS or other < ENDPOINT_ROWS:
            continue
        share, elsewhere = n / own, (by_value[value] - n) / other
        overall = by_value[value] / total
        error = math.sqrt(overall * (1 - overall) * (1 / own + 1 / other))
        if share - elsewhere < max(ENDPOINT_POINTS, ENDPOINT_ERRORS * error):
            continue
        message = (
            f"{visible(endpoint, 60)} answers {name} = {visible(value, 40)} in {100 * share:.0f} %"
            f" of its rows, the others in {100 * elsewhere:.0f} %"
        )
        bar = FieldBar(value, n, value=value)
        suspect = Suspect(message, FieldProfile(name, "values", total, 0), bar, endpoint)
        candidates.append((share - elsewhere, suspect))
    yield from [suspect for _, suspect in sorted(candidates, key=lambda item: -item[0])[:1]]
