"""The section on failures: rows by cause, schema failures by path, attempts that failed."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from typing import Any

from bagent.duck import literal
from bagent.observe.formatting import counted, visible
from bagent.report.html import Html, heading, note, part, percent, section, table
from bagent.report.overview import Cause, causes
from bagent.report.queries import ReportDb, results_command

MOST = 25
FAULTS = 4
"""Groups of failures that have a finding each."""

EXAMPLE = 90
SHORT = 60.0
"""In a shorter run, in seconds, the times of failures mean nothing."""

CLOSE = 0.2
"""Failures within this share of the run's time are close together."""

_FAULT = r"(?:^|asks for: )(/.*?): (.*)$"
"""``POINTER: MESSAGE`` of a validator; the pointer ``/`` is the whole answer."""

_MISSING = r'^"(.*)" is a required property'


def find(db: ReportDb) -> list[dict[str, Any]]:
    """Make and return the table ``faults``: failures of a stage that differ in numbers only.

    The commonest comes first. ``fault`` numbers them from 1; ``percent`` is their share of the
    rows of their stage.
    """
    from bagent.store.tables.schema import ALIKE

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
    """Describe the commonest failures.

    Args:
        shared: what the rows of each of the first groups have in common, or an empty text.
    """
    messages = []
    for row, common in zip(faults[:FAULTS], shared, strict=False):
        where = f"stage {row['stage']}: " if sums["stages"] > 1 else ""
        text = (
            f"{where}{counted(row['rows'], 'row')} ({percent(row['percent'])}) failed"
            f" ({row['error_kind']}): {visible(row['example'] or 'no error text', EXAMPLE)}"
        )
        if common:
            text += f" | What these rows share: {common}"
        if when := _when(row, sums):
            text += f" | {when}"
        messages.append(text)
    remaining = sums["failed"] - sum(row["rows"] for row in faults[:FAULTS])
    if messages and remaining > 0:
        messages.append(f"{counted(remaining, 'more row')} failed for other reasons")
    return messages


def _when(row: dict[str, Any], sums: dict[str, Any]) -> str:
    """When failures ended that are close together in time; else empty."""
    early, late = row["early"], row["late"]
    if early is None or row["rows"] < 5 or sums["seconds"] < SHORT:
        return ""
    if late - early > CLOSE * sums["seconds"]:
        return ""
    first, last = (time.strftime("%H:%M:%S", time.gmtime(at)) for at in (early, late))
    return f"Nearly all of them ended between {first} and {last}"


def failures(
    db: ReportDb, mending: Mapping[str, tuple[str, str]], sums: dict[str, Any], run: str
) -> Html:
    """Make the section: causes with the command that mends each, then details.

    Args:
        db: the tables of a run.
        mending: what to change for each kind of failure, and the command.
        sums: as :func:`bagent.report.run.totals` returns them.
        run: the run as a command names it; empty where it has no name.
    """
    alike = causes(db)
    if not alike and not sums["failed"]:
        return section("Failures", _attempts(db, ()), name="failures")
    commands = [results_command(run, _where(cause, sums["stages"])) for cause in alike]
    return section(
        "Why rows failed",
        part("cause_list", alike, mending, sums["stages"], None, commands),
        _schema(db, [cause for cause in alike if cause.kind == "schema"]),
        _attempts(db, {cause.kind for cause in alike}),
        name="failures",
    )


def _where(cause: Cause, stages: int) -> str:
    """Return SQL for the rows of a cause, and of others of the same kind."""
    condition = f"error_kind = {literal(cause.kind)}"
    return condition + f" and stage = {literal(cause.stage)}" * (stages > 1)


def _schema(db: ReportDb, alike: Sequence[Cause]) -> Html:
    """Answers that the schema refused, by path in the answer; positions in lists are equal.

    Empty where they are one cause, which says the same.
    """
    if len(alike) == 1:
        return Html("")
    rows = db.rows(
        f"""with refused as (
                select regexp_extract(error, '{_FAULT}', 1) as path,
                       regexp_extract(error, '{_FAULT}', 2) as message, error, id, row
                from results where error_kind = 'schema'),
            located as (
                select *, regexp_replace(rtrim(path, '/'), '/\\d+', '/*', 'g') as location,
                       regexp_extract(message, '{_MISSING}', 1) as missing from refused)
            select case when missing <> '' then location || '/' || missing || ' is missing'
                        when location = '' then 'the whole answer' else location end as path,
                   count(*) as "rows", min_by(id, row) as first_id,
                   left(min_by(coalesce(nullif(message, ''), error), row), 240) as example
            from located group by 1 order by "rows" desc, 1 limit {MOST}"""
    )
    if not rows:
        return Html("")
    return Html(heading("answers that the schema refused, by path") + table(rows))


def _attempts(db: ReportDb, described: Container[str]) -> Html:
    """Attempts by kind of failure; the error is left out where a cause has it."""
    kinds = db.rows(
        f"""select error_kind, status_code, count(*) as attempts,
                   count(distinct endpoint) as endpoints,
                   count(*) filter (try = 1) as first_attempts,
                   left(mode(error), 240) as commonest_error
            from attempts where error_kind is not null
            group by 1, 2 order by attempts desc limit {MOST}"""
    )
    if not kinds:
        return Html("")
    for row in kinds:
        if row["error_kind"] in described:
            row["commonest_error"] = None
    often = db.rows(
        """select attempts, count(*) as "rows", count(*) filter (status = 'ok') as ok
           from results where attempts > 0 group by 1 order by 1 limit 20"""
    )
    return Html(
        heading("attempts that failed")
        + note("An attempt is one row's part in one request; most are retried and end well.")
        + table(kinds)
        + heading("rows by their number of attempts")
        + table(often)
    )
