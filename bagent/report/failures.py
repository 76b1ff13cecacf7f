"""The section on failures: rows by cause, schema failures by path, attempts that failed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec

from bagent.duck import literal
from bagent.observe.formatting import counted, visible
from bagent.report.html import Html, heading, note, part, percent, section, table, time_of_day
from bagent.report.queries import FIRST_IDS, ReportDb, results_command

MOST = 25
MOST_CAUSES = 12
FAULTS = 4
"""Causes of failure that have a finding each."""

EXAMPLE = 90
SHORT = 60.0
"""In a shorter run, in seconds, the times of failures mean nothing."""

CLOSE = 0.2
"""Failures within this share of the run's time are close together."""

ERROR_HASH = "hash(error, finish_reason)"
"""SQL: the hash of what the pattern of a failed row is made of."""

_FAULT = r"(?:^|asks for: )(/.*?): (.*)$"
"""``POINTER: MESSAGE`` of a validator; the pointer ``/`` is the whole answer."""

_MISSING = r'^"(.*)" is a required property'


class Cause(msgspec.Struct, frozen=True):
    """Failed rows that are alike: of one stage, kind, and error but for numbers and quotes."""

    stage: str
    status: str
    kind: str
    rows: int
    percent: float
    """Their share of the rows of their stage."""

    endpoints: int
    example: str | None


class FailedRows(msgspec.Struct, frozen=True):
    """The first rows of a cause, and when nearly all of them ended, in Unix seconds."""

    ids: list[str]
    early: float | None
    late: float | None


def causes(db: ReportDb) -> list[Cause]:
    """Return the commonest causes of failure, largest first.

    The table ``faults`` is made of them, which numbers them from 1 as ``fault``. The table
    ``patterns`` has the pattern of each error by :data:`ERROR_HASH`.
    """
    from bagent.store.tables.schema import ALIKE

    # Each distinct error is evaluated once: to find what differs from row to row takes long.
    db.run(
        f"""create or replace temp table patterns as
            select {ERROR_HASH} as error_hash, {ALIKE} as pattern
            from (select distinct error, finish_reason from results where error_kind is not null)"""
    )
    db.run(
        f"""create or replace temp table faults as
            with equal as (select stage, status, error_kind, error, endpoint, count(*) as n,
                                  {ERROR_HASH} as error_hash
                           from results where error_kind is not null group by all),
                 alike as (select stage, status, error_kind, pattern,
                                  sum(n)::bigint as "rows", count(distinct endpoint) as endpoints,
                                  left(arg_min(error, (length(error), error)), 400) as example
                           from equal join patterns using (error_hash) group by all),
                 stages as (select stage, count(*) as n from results group by stage)
            select row_number() over (order by "rows" desc, stage, error_kind, pattern) as fault,
                   alike.*, 100.0 * "rows" / n as percent
            from alike join stages using (stage) order by fault limit {MOST_CAUSES}"""
    )
    rows = db.rows(
        """select stage, status, error_kind as kind, "rows", percent, endpoints, example
           from faults order by fault"""
    )
    return [Cause(**row) for row in rows]


def failed_rows(db: ReportDb) -> list[FailedRows]:
    """Return the rows of each cause, after :func:`causes`."""
    rows = db.rows(
        f"""select {FIRST_IDS} as ids, quantile_cont(finished_at, 0.02) as early,
                   quantile_cont(finished_at, 0.98) as late
            from (select *, {ERROR_HASH} as error_hash from results where error_kind is not null)
            join patterns using (error_hash)
            join faults using (stage, status, error_kind, pattern)
            group by fault order by fault"""
    )
    return [FailedRows(**row) for row in rows]


def findings(
    alike: Sequence[Cause],
    failed: Sequence[FailedRows],
    sums: dict[str, Any],
    shared: Sequence[str],
) -> list[str]:
    """Describe the commonest failures.

    Args:
        alike: as :func:`causes` returns them.
        failed: as :func:`failed_rows` returns them.
        sums: as :func:`bagent.report.run.totals` returns them.
        shared: what the rows of each of the first causes have in common, or an empty text.
    """
    messages = []
    for cause, rows, common in zip(alike[:FAULTS], failed, shared, strict=False):
        where = f"stage {cause.stage}: " if sums["stages"] > 1 else ""
        text = (
            f"{where}{counted(cause.rows, 'row')} ({percent(cause.percent)}) failed"
            f" ({cause.kind}): {visible(cause.example or 'no error text', EXAMPLE)}"
        )
        if common:
            text += f" | What these rows share: {common}"
        if when := _when(cause, rows, sums["seconds"]):
            text += f" | {when}"
        messages.append(text)
    remaining = sums["failed"] - sum(cause.rows for cause in alike[:FAULTS])
    if messages and remaining > 0:
        messages.append(f"{counted(remaining, 'more row')} failed for other reasons")
    return messages


def _when(cause: Cause, rows: FailedRows, seconds: float) -> str:
    """When failures ended that are close together in a run of ``seconds``; else empty."""
    early, late = rows.early, rows.late
    if early is None or late is None or cause.rows < 5 or seconds < SHORT:
        return ""
    if late - early > CLOSE * seconds:
        return ""
    first, last = map(time_of_day, (early, late))
    return f"Nearly all of them ended between {first} and {last}"


def failures(
    db: ReportDb,
    alike: Sequence[Cause],
    failed: Sequence[FailedRows],
    sums: dict[str, Any],
    *,
    mending: Mapping[str, tuple[str, str]],
    run: str,
) -> Html:
    """Make the section: causes with the command that mends each, then details.

    Args:
        mending: what to change for each kind of failure, and the command.
        run: the run as a command names it; empty where it has no name.

    See :func:`findings` for the others.
    """
    commands = [results_command(run, _where(cause, sums["stages"])) for cause in alike]
    first_rows = [(rows.ids, command) for rows, command in zip(failed, commands, strict=True)]
    return section(
        "Why rows failed" if alike else "Failures",
        part("cause_list", alike, mending, sums["stages"], None, first_rows),
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
