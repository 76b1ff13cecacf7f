"""Views over the tables of a run, created when the run is read."""

from __future__ import annotations

_DIGITS = r"regexp_replace(coalesce(error, finish_reason, ''), '[a-f]*\d[a-f\d]*', '#', 'g')"
_QUOTED = rf"""regexp_replace({_DIGITS}, '"(?:[^"\\]|\\.)*"', '"..."', 'g')"""
_VALUE = (
    r"""'(^|: )("(?:[^"\\]|\\.)*"|\[.*\]|\{.*\}|[-+.#e]+|true|false|null) (is|does|has|was) '"""
)
_LENGTH = 120
ALIKE = (
    f"left(CASE WHEN error LIKE '%is a required property%' THEN {_DIGITS}"
    f" ELSE regexp_replace({_QUOTED}, {_VALUE}, '\\1... \\3 ') END, {_LENGTH})"
)
"""SQL: the start of a result's error without what differs from row to row: decimal and hexadecimal
numbers, quoted words, and the value at the start of a validator's message (``"hgih" is not one of
...``). The name of a missing property stays."""


_PLACE = "(row, coalesce(id, ''), answer)"
"""SQL: the order of a stage's rows; several may be made of one input row."""

_UNIT = ("row", "stage", "id", "answer")


def same_unit(first: str, second: str) -> str:
    """Return SQL for whether rows of two tables are of the same stage, row and answer.

    A stage may make several rows of one input row, so ids are compared too.
    """
    return " AND ".join(f"{first}.{name} IS NOT DISTINCT FROM {second}.{name}" for name in _UNIT)


def _spread(column: str, prefix: str) -> str:
    """Return SQL for the median, 90th, 99th percentile and maximum of a column."""
    quantiles = ", ".join(
        f"round(quantile_disc({column}, {share}), 1) AS {prefix}_p{percent}"
        for share, percent in ((0.5, 50), (0.9, 90), (0.99, 99))
    )
    return f"{quantiles}, round(max({column}), 1) AS {prefix}_max"


VIEWS: dict[str, str] = {
    "errors": f"""
        SELECT error_kind, status, count(*) AS "rows",
               round(100.0 * count(*) / (SELECT count(*) FROM results), 2) AS percent,
               count(DISTINCT endpoint) AS endpoints, min_by(id, {_PLACE}) AS first_id,
               {ALIKE} AS pattern, left(min_by(error, {_PLACE}), 300) AS example, stage
        FROM results WHERE error_kind IS NOT NULL
        GROUP BY stage, error_kind, status, pattern
        ORDER BY "rows" DESC, stage, error_kind, pattern""",
    "latency": f"""
        SELECT stage, count(latency_ms) AS answers, {_spread("latency_ms", "latency")},
               {_spread("ttft_ms", "ttft")}, {_spread("queue_ms", "queue")}
        FROM results WHERE status NOT IN ('failed', 'bad_input') AND copied_from IS NULL
        GROUP BY stage ORDER BY stage""",
    "by_endpoint": f"""
        SELECT endpoint, count(*) AS tries, count(DISTINCT group_id) AS requests,
               count(*) FILTER (error_kind IS NULL) AS ok,
               count(*) FILTER (error_kind IS NOT NULL) AS failed,
               count(*) FILTER (status_code = 429 OR error_kind = 'rate_limited') AS throttled,
               mode(error_kind) AS most_error, {_spread("(done - sent) * 1000", "ms")},
               round(quantile_disc((first_token - sent) * 1000, 0.5), 1) AS first_token_p50,
               sum(prompt_tokens)::BIGINT AS prompt_tokens,
               sum(completion_tokens)::BIGINT AS completion_tokens,
               round(sum(completion_tokens) / nullif(max(done) - min(sent), 0), 1)
                   AS completion_tokens_per_s
        FROM attempts GROUP BY endpoint ORDER BY endpoint""",
    "turns": f"""
        WITH asked AS (
            SELECT row, stage, id, answer, turn, count(*) AS tries,
                   arg_max(endpoint, sent) AS endpoint,
                   max(error_kind) AS error_kind, sum(prompt_tokens)::BIGINT AS prompt_tokens,
                   sum(completion_tokens)::BIGINT AS completion_tokens,
                   round((max(done) - min(sent)) * 1000, 1) AS ms
            FROM attempts GROUP BY row, stage, id, answer, turn),
        called AS (
            SELECT row, stage, id, answer, turn, count(*) AS tool_calls,
                   string_agg(name, ', ' ORDER BY started) AS tools
            FROM tool_calls GROUP BY row, stage, id, answer, turn)
        SELECT a.* EXCLUDE (id), coalesce(tool_calls, 0) AS tool_calls, tools, a.id
        FROM asked AS a LEFT JOIN called AS c ON {same_unit("a", "c")} AND a.turn = c.turn
        ORDER BY a.stage, a.row, a.id, a.answer, a.turn""",
}
"""The SQL of each view: grouped errors, percentiles of times by stage, endpoints, and turns."""
