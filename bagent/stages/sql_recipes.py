"""Ready queries for ``sql`` stages, to paste into a job file.

A stage's table has the columns ``id row answer status output text error error_kind`` and one
typed column for each property of its schema. A result row with a text in ``error`` counts as
failed.
"""

from __future__ import annotations

from bagent.duck import literal, quoted


def value(field: str | None) -> str:
    """Return SQL for a property of the output as text, or for the answer as a text."""
    if field is None:
        return "coalesce(CAST(output AS VARCHAR), trim(text))"
    pointer = "/" + field.replace("~", "~0").replace("/", "~1")
    return f"json_extract_string(output, {literal(pointer)})"


def majority(stage: str, field: str | None = None) -> str:
    """Return the query for the value that most answers of a row gave, with its votes and fraction.

    Of values with equal votes the first one (by number of the answer) wins.
    Answers that failed count in ``answers`` and ``failed``, never as votes; truncated ones that
    the job accepts are votes.
    """
    table = quoted(stage)
    return f"""\
WITH votes AS (
  SELECT id, row, {value(field)} AS winner, count(*) AS votes, min(answer) AS first
  FROM {table} WHERE error_kind IS NULL AND {value(field)} IS NOT NULL GROUP BY ALL
), best AS (
  SELECT * FROM votes
  QUALIFY row_number() OVER (PARTITION BY id, row ORDER BY votes DESC, first) = 1
), totals AS (
  SELECT id, row, count(*) AS answers, count(*) FILTER (error_kind IS NOT NULL) AS failed
  FROM {table} GROUP BY id, row
)
SELECT totals.id, totals.row, winner, coalesce(votes, 0) AS votes, answers, failed,
  coalesce(votes, 0) / answers AS fraction,
  CASE WHEN winner IS NULL THEN 'none of ' || answers || ' answers can be counted' END AS error
FROM totals LEFT JOIN best
  ON totals.id IS NOT DISTINCT FROM best.id AND totals.row IS NOT DISTINCT FROM best.row
ORDER BY totals.row"""


def top_k(stage: str, field: str, k: int) -> str:
    """Return the query for the ``k`` good rows with the highest number in ``field``."""
    score = f"TRY_CAST({value(field)} AS DOUBLE)"
    return f"""\
SELECT id, row, answer, {score} AS score, output, text
FROM {quoted(stage)} WHERE status = 'ok' AND isfinite({score})
ORDER BY score DESC, row, answer LIMIT {int(k)}"""


def best_of(stage: str, field: str) -> str:
    """Return the query for each row's answer with the highest number in ``field``."""
    score = f"TRY_CAST({value(field)} AS DOUBLE)"
    return f"""\
SELECT id, row, answer, {score} AS score, output, text
FROM {quoted(stage)} WHERE status = 'ok' AND isfinite({score})
QUALIFY row_number() OVER (PARTITION BY id, row ORDER BY score DESC, answer) = 1
ORDER BY row"""


def merge_lists(stage: str, field: str) -> str:
    """Return the query for the distinct items of all lists in ``field``, with their counts."""
    pointer = "/" + field.replace("~", "~0").replace("/", "~1")
    return f"""\
SELECT item, count(*) AS times, min(row) AS first_row
FROM (
  SELECT row, unnest(json_extract(output, {literal(pointer)})::JSON[]) AS item
  FROM {quoted(stage)}
  WHERE status = 'ok' AND json_type(output, {literal(pointer)}) = 'ARRAY'
)
GROUP BY item ORDER BY first_row, item::VARCHAR"""


def statistics(stage: str, field: str | None = None) -> str:
    """Return the query for count, mean, median, deviation, minimum and maximum of ``field``.

    Other values are counted in ``not_numbers``, failed rows in ``failed``.
    """
    return f"""\
SELECT count(*) AS rows, count(*) FILTER (status <> 'ok') AS failed,
  count(*) FILTER (status = 'ok' AND x IS NULL) AS not_numbers, count(x) AS numbers,
  avg(x) AS mean, median(x) AS median, stddev_samp(x) AS deviation,
  min(x) AS least, max(x) AS greatest
FROM (
  SELECT status, CASE WHEN status = 'ok' AND isfinite(v) THEN v END AS x
  FROM (SELECT status, TRY_CAST({value(field)} AS DOUBLE) AS v FROM {quoted(stage)})
)"""


def failure_report(stage: str) -> str:
    """Return the query for the failures by reason, each with its count and an example."""
    return f"""\
SELECT status, error_kind, count(*) AS rows, min_by(id, row) AS first_id,
  min_by(error, row) AS first_error
FROM {quoted(stage)} WHERE status <> 'ok' GROUP BY ALL ORDER BY rows DESC, status"""
