"""Which of two runs is right more often, held against one file of known answers?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.observe.compare import dicts
from bagent.observe.gold import GoldFile, Score, score_run
from bagent.observe.intervals import mcnemar, paired_difference, wilson
from bagent.types import Json

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


class FieldPair(msgspec.Struct, frozen=True):
    """One field, or all of them: the accuracy of both runs over the same rows.

    ``difference`` is that of B less that of A; intervals are of 95 %; ``p`` is McNemar's.
    """

    field: str
    accuracy_a: float | None
    interval_a: tuple[float, float] | None
    accuracy_b: float | None
    interval_b: tuple[float, float] | None
    difference: float | None
    interval: tuple[float, float] | None
    only_a: int
    only_b: int
    p: float


class PairScore(msgspec.Struct, frozen=True):
    """Two runs against known answers; ``a`` and ``b`` are each of them alone."""

    numbers: dict[str, Json]
    fields: list[FieldPair]
    a: Score
    b: Score


ALL = "all of them"


def score_pair(
    connection: DuckDBPyConnection,
    folders: tuple[Path, Path],
    gold: GoldFile,
    stages: tuple[str | None, str | None],
    examples: int,
) -> PairScore:
    """Hold the tables of two runs against ``gold``; see :func:`bagent.observe.gold.score_run`.

    Raises:
        UsageError: as that function.
        InputError: the file cannot be read.
    """
    a = score_run(connection, folders[0], gold, stages[0], examples)
    connection.execute("create or replace temp table scored_a as from scored")
    fields = tuple(one.field for one in a.fields)
    same = msgspec.structs.replace(gold, fields=fields)
    b = score_run(connection, folders[1], same, stages[1], examples)
    pairs = [
        *(_pair(connection, field, f"right{number}") for number, field in enumerate(fields)),
        *([_every(connection, len(fields))] if len(fields) > 1 else []),
    ]
    whole = pairs[-1]
    numbers: dict[str, Json] = {
        "rows": a.numbers["rows"],
        "accuracy_a": whole.accuracy_a,
        "accuracy_b": whole.accuracy_b,
        "difference": whole.difference,
        "difference_low": whole.interval[0] if whole.interval else None,
        "difference_high": whole.interval[1] if whole.interval else None,
        "only_a_right": whole.only_a,
        "only_b_right": whole.only_b,
        "p": whole.p,
    }
    for pair in pairs[: len(fields)]:
        name = pair.field.replace(".", "_")
        numbers |= {
            f"accuracy_{name}_a": pair.accuracy_a,
            f"accuracy_{name}_b": pair.accuracy_b,
            f"p_{name}": pair.p,
        }
    return PairScore(numbers, pairs, a, b)


def _every(connection: DuckDBPyConnection, fields: int) -> FieldPair:
    return _pair(connection, ALL, *(f"right{number}" for number in range(fields)))


def _pair(connection: DuckDBPyConnection, field: str, *columns: str) -> FieldPair:
    """Count a field, or several together, over the rows of both runs."""
    a, b = (
        " and ".join(f"coalesce({side}.{column}, false)" for column in columns)
        for side in ("scored_a", "scored")
    )
    # A row that one run lacks is wrong there, whichever of its answers the other has.
    (counts,) = dicts(
        connection,
        f"""select count(*) as n, count(*) filter ({a}) as a, count(*) filter ({b}) as b,
               count(*) filter (({a}) and not ({b})) as only_a,
               count(*) filter (({b}) and not ({a})) as only_b
        from scored_a full join scored on scored_a.name = scored.name
             and coalesce(scored_a.answer::varchar, '0') = coalesce(scored.answer::varchar, '0')""",
    )
    n, right_a, right_b, only_a, only_b = (int(str(counts[k])) for k in _COUNTS)
    return FieldPair(
        field,
        round(right_a / n, 6) if n else None,
        wilson(right_a, n),
        round(right_b / n, 6) if n else None,
        wilson(right_b, n),
        round((right_b - right_a) / n, 6) if n else None,
        paired_difference(only_a, only_b, n),
        only_a,
        only_b,
        mcnemar(only_a, only_b),
    )


_COUNTS = ("n", "a", "b", "only_a", "only_b")
