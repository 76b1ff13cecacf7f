"""What went wrong: failed rows by cause, schema failures by path, tries that had to be repeated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bagent.observe.formatting import counted, visible
from bagent.report.html import Html, heading, note, section, table
from bagent.report.queries import ReportDb

MOST = 25
FAULTS = 4
"""So many groups of failures are looked at closely."""

EXAMPLE = 220
SHORT = 60.0
"""Seconds of a run that is too short for its times to mean anything."""

CLOSE = 0.2
"""Failures within this share of the run's time stand close together."""

_FAULT = r"(?:^|asks for: )(/.*?): (.*)$"
"""``POINTER: WORDS`` of a validator; the pointer ``/`` is the whole answer."""

_MISSING = r'^"(.*)" is a required property'


def find(db: ReportDb) -> list[dict[str, Any]]:
    """Make ``faults``: failures alike but for numbers, in each stage, the commonest first.

    ``fault`` numbers them from 1; ``percent`` is their share of their stage's rows. Returns all.
    """
    from bagent.store.tables.views import ALIKE

    db.run(
        f"""create or replace temp table faults as
            with alike as (select *, {ALIKE} as pattern from results where error_kind is not null),
                 stages as (select stage, count(*) as n from results group by stage),
                 counted as (
                    select stage, status, error_kind, pattern, count(*) as "rows",
                           count(distinct endpoint) as endpoints, min_by(id, row) as first_id,
                           left(min_by(error, row), 300) as example,
                           quantile_cont(finished_at, 0.02) as early,
                           quantile_cont(finished_at, 0.98) as late
                    from alike group by stage, status, error_kind, pattern
                    order by "rows" desc, stage, error_kind, pattern limit {MOST})
            select row_number() over (order by "rows" desc, stage, error_kind, pattern) as fault,
                   counted.*, 100.0 * "rows" / n as percent
            from counted join stages using (stage)"""
    )
    return db.rows("select * from faults order by fault")


def findings(
    faults: list[dict[str, Any]], sums: dict[str, Any], shared: Sequence[str]
) -> list[str]:
    """The commonest failures in words.

    Args:
        shared: what the rows of each of the first groups have in common, empty: nothing.
    """
    messages = []
    for row, common in zip(faults[:FAULTS], shared, strict=False):
        where = f"stage {row['stage']}: " if sums["stages"] > 1 else ""
        text = (
            f"{where}{counted(row['rows'], 'row')} ({row['percent']:.3g} %) {_is(row['rows'])}"
            f" {row['status']} ({row['error_kind'] or 'no kind'}):"
            f" {visible(row['example'] or 'no error text', EXAMPLE)}"
        )
        if common:
            text += f" | What these rows share: {common}"
        if when := _when(row, sums):
            text += f" | {when}"
        messages.append(text)
    remaining = sums["rows"] - sums["ok"] - sum(row["rows"] for row in faults[:FAULTS])
    if messages and remaining > 0:
        messages.append(f"{counted(remaining, 'more row')} failed for other reasons")
    return messages


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _when(row: dict[str, Any], sums: dict[str, Any]) -> str:
    """Where failures stand close together in time, when that was."""
    early, late = row["early"], row["late"]
    if early is None or row["rows"] < 5 or sums["seconds"] < SHORT:
        return ""
    if late - early > CLOSE * sums["seconds"]:
        return ""
    first, last = (time.strftime("%H:%M:%S", time.gmtime(at)) for at in (early, late))
    return f"Nearly all of them ended between {first} and {last}"


def failures(db: ReportDb, faults: list[dict[str, Any]], sums: dict[str, Any]) -> Html:
    """Failed rows and failed tries."""
    stage = "stage, " * (sums["stages"] > 1)
    by_status = db.rows(
        f"""select {stage}status, error_kind, count(*) as "rows", 100.0 * count(*)
                   / {"(select count(*) from results)" if not stage else "any_value(n)"} as percent
            from results {
            "join (select stage, count(*) as n from results group by stage) using (stage)"
            if stage
            else ""
        }
            where error_kind is not null group by all order by "rows" desc limit 40"""
    )
    names = ("error_kind", "status", "rows", "percent", "endpoints", "first_id", "example")
    columns = ["stage"] * bool(stage) + list(names)
    return section(
        "Failures",
        table(by_status),
        heading("errors alike but for numbers and quoted values") if faults else "",
        table([{name: row[name] for name in columns} for row in faults]),
        _schema(db),
        _attempts(db),
        name="failures",
    )


def _schema(db: ReportDb) -> Html:
    """Answers that the schema refused, by the place in the answer; list positions are one."""
    rows = db.rows(
        f"""with told as (
                select regexp_extract(error, '{_FAULT}', 1) as path,
                       regexp_extract(error, '{_FAULT}', 2) as words, error, id, row
                from results where error_kind = 'schema'),
            placed as (
                select *, regexp_replace(rtrim(path, '/'), '/\\d+', '/*', 'g') as place,
                       regexp_extract(words, '{_MISSING}', 1) as missing from told)
            select case when missing <> '' then place || '/' || missing || ' is missing'
                        when place = '' then 'the whole answer' else place end as place,
                   count(*) as "rows", min_by(id, row) as first_id,
                   left(min_by(coalesce(nullif(words, ''), error), row), 240) as example
            from placed group by 1 order by "rows" desc, 1 limit {MOST}"""
    )
    if not rows:
        return Html("")
    return Html(heading("answers that the schema refused, by path") + table(rows))


def _attempts(db: ReportDb) -> Html:
    kinds = db.rows(
        f"""select error_kind, status_code, count(*) as tries,
                   count(distinct endpoint) as endpoints,
                   count(*) filter (try = 1) as first_tries,
                   left(mode(error), 240) as commonest_error
            from attempts where error_kind is not null
            group by 1, 2 order by tries desc limit {MOST}"""
    )
    if not kinds:
        return Html("")
    often = db.rows(
        """select attempts as tries, count(*) as "rows", count(*) filter (status = 'ok') as ok
           from results where attempts > 0 group by 1 order by 1 limit 20"""
    )
    return Html(
        heading("tries that failed")
        + note("A try is one row's part in one request; most are repeated and end well.")
        + table(kinds)
        + heading("rows by their number of tries")
        + table(often)
    )
