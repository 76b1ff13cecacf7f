"""What went wrong: failed rows by cause, schema failures by path, tries that had to be repeated."""

from __future__ import annotations

from typing import Any

from bagent.observe.report.ask import Ask
from bagent.observe.report.html import Html, heading, note, section, table

MOST = 25

_FAULT = r"(?:^|asks for: )(/.*?): (.*)$"
"""``POINTER: WORDS`` of a validator; the pointer ``/`` is the whole answer."""

_MISSING = r'^"(.*)" is a required property'


def findings(ask: Ask, sums: dict[str, Any]) -> list[str]:
    """The commonest failures in words."""
    rows = sums["rows"]
    return [
        f"{row['rows']:,} rows ({100 * row['rows'] / rows:.3g} %) are {row['status']}"
        f" ({row['error_kind'] or 'no kind'}): {row['example'] or 'no error text'}"
        for row in ask.rows("select * from errors limit 4")
    ]


def failures(ask: Ask) -> Html:
    """Failed rows and failed tries."""
    by_status = ask.rows(
        """select status, error_kind, count(*) as "rows", 100.0 * count(*)
                  / (select count(*) from results) as percent
           from results where status <> 'ok' group by 1, 2 order by 3 desc limit 40"""
    )
    errors = ask.rows(
        f"""select error_kind, status, "rows", percent, endpoints, first_id, example from errors
            limit {MOST}"""
    )
    return section(
        "Failures",
        table(by_status),
        heading("errors alike but for numbers") if errors else "",
        table(errors),
        _schema(ask),
        _tries(ask),
        name="failures",
    )


def _schema(ask: Ask) -> Html:
    """Answers that the schema refused, by the place in the answer; list positions are one."""
    rows = ask.rows(
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


def _tries(ask: Ask) -> Html:
    kinds = ask.rows(
        f"""select error_kind, status_code, count(*) as tries,
                   count(distinct endpoint) as endpoints,
                   count(*) filter (try = 1) as first_tries,
                   left(mode(error), 240) as commonest_error
            from attempts where error_kind is not null
            group by 1, 2 order by tries desc limit {MOST}"""
    )
    if not kinds:
        return Html("")
    often = ask.rows(
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
