"""The accuracy of runs against a gold file of expected answers.

Values are compared as text, numbers as numbers. A row without a usable answer counts as wrong:
otherwise the accuracy would rise with each failure. A row without an expected value is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.analysis.compare import (
    check_field,
    dicts,
    equal_sql,
    field_sql,
    has_property,
    mcnemar,
    paired_difference,
    side_numbers,
    source_sql,
    wilson,
)
from bagent.duck import file_source, literal, quoted
from bagent.errors import InputError, UsageError
from bagent.store.tables.schema import pointer
from bagent.types import Json

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
MOST_PAIRS = 400
_NOT_FIELDS = frozenset({"id", "answer", "stage", "row", "source", "line", "output"})


class FieldScore(msgspec.Struct, frozen=True):
    """The accuracy of one field, with its 95 % interval.

    ``confusion`` has the commonest pairs of ``known`` (expected) and ``given`` value with their
    ``rows``; ``given`` is None where a row has no usable answer.
    """

    field: str
    right: int
    wrong: int
    unanswered: int
    accuracy: float | None
    interval: tuple[float, float] | None
    confusion: list[dict[str, Json]]


class Score(msgspec.Struct, frozen=True):
    """The accuracy of a run; ``worst`` are the rows with most wrong fields."""

    numbers: dict[str, Json]
    fields: list[FieldScore]
    worst: list[dict[str, Json]]


class GoldFile(msgspec.Struct, frozen=True):
    """A file of expected answers."""

    path: Path
    id: str = "id"
    """The column that identifies a row."""

    fields: tuple[str, ...] = ()
    """The fields to compare; empty compares every column that the answers have too."""

    columns: tuple[str, ...] = ()
    """The columns with the expected values of ``fields``; empty takes those of the same names."""


def is_gold(path: Path) -> bool:
    """Return whether a path is a file of rows, not a run."""
    return path.is_file() and (path.suffixes[-1:] != [] and _suffix(path) in SUFFIXES)


def _suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix in (".gz", ".zst") else path.suffix


def score_run(
    connection: DuckDBPyConnection,
    folder: Path,
    gold: GoldFile,
    stage: str | None,
    examples: int,
) -> Score:
    """Score the tables in ``folder`` against ``gold``.

    Args:
        stage: the stage to score; None where there is one only.
        examples: how many of the worst rows to show.

    Raises:
        UsageError: the file has no such field, no ids, or an id twice; the run has several stages
            and none is named, or not that one.
        InputError: the file cannot be read.
    """
    connection.execute(source_sql("a", folder, stage))
    _check_stage(connection, stage)
    columns = _load(connection, gold)
    chosen = list(gold.fields) or _common(connection, folder, columns, gold)
    numbered = _numbered(connection, columns)
    _check_ids(connection, gold, "name, g_answer" if numbered else "name")
    answer = "b.g_answer as answer" if numbered else "a.answer"
    parts = [f"a.status = 'ok' as usable, a.name is not null as found, b.name, {answer}"]
    for number, field in enumerate(chosen):
        source = gold.columns[number] if gold.columns else field
        expected, labelled = _gold_sql(connection, source, columns, gold)
        answered = field_sql(connection, field, "a")
        check_field(connection, field, "a")
        parts.append(f"{expected} as known{number}, {answered} as given{number}")
        right = equal_sql(expected, answered)
        usable = "coalesce(a.status = 'ok', false)"
        parts.append(f"case when {labelled} then {usable} and {right} end as right{number}")
    connection.execute(
        f"create or replace temp table scored as select {', '.join(parts)}"
        " from b left join a on a.name = b.name" + " and a.answer::varchar = b.g_answer" * numbered
    )
    names = [f"right{number}" for number in range(len(chosen))]
    no_label = f"coalesce({', '.join(names)}) is null"
    ((unlabelled,),) = _rows(connection, f"select count(*) from scored where {no_label}")
    connection.execute(f"delete from scored where {no_label}")
    every = " and ".join(f"coalesce({name}, true)" for name in names)
    (numbers,) = dicts(
        connection,
        f"""select count(*) as "rows", count(*) filter (usable) as answered,
               count(*) filter (not found) as missing,
               count(*) filter (found and not usable) as not_ok,
               count(*) filter ({every}) as all_right,
               round(avg(({every})::int), 6) as accuracy from scored""",
    )
    numbers |= {"unlabelled": unlabelled, **side_numbers(connection, "a")}
    interval = wilson(int(str(numbers["all_right"])), int(str(numbers["rows"])))
    numbers |= dict(zip(("accuracy_low", "accuracy_high"), interval or (None, None), strict=True))
    scores = [_field_score(connection, field, n) for n, field in enumerate(chosen)]
    numbers |= {f"accuracy_{s.field.replace('.', '_')}": s.accuracy for s in scores}
    return Score(numbers, scores, dicts(connection, _worst_sql(chosen, examples)))


def _load(connection: DuckDBPyConnection, gold: GoldFile) -> list[str]:
    """Load the file as table ``b`` of texts, with the id as ``name``; returns its columns.

    Columns whose name begins with ``null_`` say whether a value is a JSON null.
    """
    import duckdb

    nulls: dict[str, str] = {}
    file, suffix = file_source(gold.path), _suffix(gold.path)
    try:
        if suffix == ".parquet":
            names = [row[0] for row in _rows(connection, f"describe from read_parquet({file})")]
            values = {name: f"to_json({quoted(name)})->>'$'" for name in names}
            source = f"read_parquet({file})"
        elif suffix in (".csv", ".tsv"):
            source = f"read_csv({file}, header=true, all_varchar=true)"
            names = [row[0] for row in _rows(connection, f"describe from {source}")]
            values = {name: quoted(name) for name in names}
        else:
            connection.execute(
                f"create or replace temp view lines as from read_json_objects({file},"
                " maximum_object_size=268435456)"
            )
            keys = _rows(
                connection, "select distinct unnest(json_keys(json)) from lines order by 1"
            )
            names = [row[0] for row in keys]
            pointers = {name: literal(pointer(name)) for name in names}
            values = {name: f"json_extract_string(json, {pointers[name]})" for name in names}
            nulls = {name: f"json_type(json, {pointers[name]}) = 'NULL'" for name in names}
            source = "lines"
    except duckdb.Error as error:
        raise InputError(f"{gold.path}: {str(error).splitlines()[0]}") from None
    if gold.id not in names:
        raise UsageError(
            f"{gold.path} has no column {gold.id}",
            hint=f"--id NAME; it has {', '.join(names[:12])}",
        )
    columns = ", ".join(
        f"{sql} as {quoted('g_' + name)},"
        f" coalesce({nulls.get(name, 'false')}, false) as {quoted('null_' + name)}"
        for name, sql in values.items()
    )
    connection.execute(
        f"create or replace temp table b as select {values[gold.id]} as name, {columns}"
        f" from {source}"
    )
    return names


def _rows(connection: DuckDBPyConnection, sql: str) -> list[Any]:
    return list(connection.execute(sql).fetchall())


def _common(
    connection: DuckDBPyConnection, folder: Path, columns: list[str], gold: GoldFile
) -> list[str]:
    file = file_source(folder / "answers.parquet")
    answer_columns = [row[0] for row in _rows(connection, f"describe from read_parquet({file})")]
    properties = set(answer_columns) - _NOT_FIELDS
    properties |= {name for name in _NOT_FIELDS & set(columns) if has_property(connection, name)}
    common = [name for name in columns if name in properties and name != gold.id]
    if not common and "text" in columns:
        common = ["text"]
    if not common:
        raise UsageError(
            f"{gold.path} and the answers have no field in common",
            hint=f"--on FIELD; the answers have {', '.join(sorted(properties)) or 'no fields'}",
        )
    return common


def _gold_sql(
    connection: DuckDBPyConnection, field: str, columns: list[str], gold: GoldFile
) -> tuple[str, str]:
    """Return SQL of the expected value, and of whether there is one.

    It is a column, else a property of ``output``. A blank is no value, and a JSON null is one.
    """
    bare = field.removeprefix("output.")
    for name in (field, bare):
        if name in columns:
            value, null = f"b.{quoted('g_' + name)}", f"b.{quoted('null_' + name)}"
            return value, f"(coalesce(trim({value}) <> '', false) or {null})"
    for name in ("output", bare.split(".")[0]):
        if name in columns:
            steps = bare.split(".") if name == "output" else bare.split(".")[1:]
            path = literal("".join(map(pointer, steps)))
            parsed = f"try_cast(b.{quoted('g_' + name)} as json)"
            value, kind = (f"{f}({parsed}, {path})" for f in ("json_extract_string", "json_type"))
            if _rows(connection, f"select 1 from b where {value} is not null limit 1"):
                return value, f"coalesce(trim({value}) <> '', {kind} is not null)"
    raise UsageError(
        f"{gold.path} has no field {field}",
        hint=f"--gold-field NAME names its column; there are {', '.join(columns[:12])}",
    )


def _check_stage(connection: DuckDBPyConnection, stage: str | None) -> None:
    """Refuse several stages: every row would count several times."""
    here = [row[0] for row in _rows(connection, "select distinct stage from a order by 1")]
    if stage is None and len(here) > 1:
        raise UsageError(
            f"the run has the stages {', '.join(here[:12])}: compare one of them",
            hint="choose it with --stage NAME",
        )
    if stage is not None and not here:
        raise UsageError(
            f"--stage {stage}: the run has no rows of such a stage",
            hint="bagent status RUN lists the stages",
        )


def _numbered(connection: DuckDBPyConnection, columns: list[str]) -> bool:
    """Return whether the column ``answer`` of the file numbers the answers of a row.

    It is an expected answer where the run has one answer a row, or a property of that name.
    """
    if "answer" not in columns or has_property(connection, "answer"):
        return False
    return bool(_rows(connection, "select 1 from a where answer > 0 limit 1"))


def _check_ids(connection: DuckDBPyConnection, gold: GoldFile, keys: str) -> None:
    twice = _rows(connection, f"select name from b group by {keys} having count(*) > 1 limit 1")
    if twice:
        raise UsageError(
            f"{gold.path} has the id {twice[0][0]} twice", hint="keep one line for each id"
        )


def _field_score(connection: DuckDBPyConnection, field: str, number: int) -> FieldScore:
    (counts,) = dicts(
        connection,
        f"""select count(*) filter (right{number}) as "right",
               count(*) filter (usable and not right{number}) as wrong,
               count(*) filter (not coalesce(usable, false) and right{number} is not null)
                   as unanswered,
               round(avg(right{number}::int), 6) as accuracy from scored""",
    )
    confusion = dicts(
        connection,
        f"""select left(known{number}, 60) as known,
               case when usable then coalesce(left(given{number}, 60), 'null') end as given,
               count(*) as "rows" from scored where right{number} is not null
               group by 1, 2 order by 3 desc, 1, 2
               limit {MOST_PAIRS}""",
    )
    right, wrong, unanswered = (int(counts[name]) for name in ("right", "wrong", "unanswered"))
    interval = wilson(right, right + wrong + unanswered)
    return FieldScore(field, **counts, interval=interval, confusion=confusion)


def _worst_sql(fields: list[str], examples: int) -> str:
    wrong = " + ".join(f"coalesce((not right{n})::int, 0)" for n in range(len(fields)))
    values = ", ".join(
        f"left(known{n}, 80) as {quoted(field + ' known')},"
        f" left(given{n}, 80) as {quoted(field + ' given')}"
        for n, field in enumerate(fields)
    )
    return (
        f"select name as id, answer, {wrong} as wrong, {values} from scored"
        f" where {wrong} > 0 order by wrong desc, usable, name limit {examples}"
    )


class FieldPair(msgspec.Struct, frozen=True):
    """The accuracy of both runs in one field, or in all of them, over the same rows.

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
    """The accuracy of two runs; ``a`` and ``b`` are that of each alone."""

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
    """Score the tables of two runs against ``gold``, each as :func:`score_run` does.

    Raises:
        UsageError: as that function.
        InputError: the file cannot be read.
    """
    a = score_run(connection, folders[0], gold, stages[0], examples)
    connection.execute("create or replace temp table scored_a as from scored")
    fields = tuple(score.field for score in a.fields)
    same = msgspec.structs.replace(gold, fields=fields)
    b = score_run(connection, folders[1], same, stages[1], examples)
    pairs = [
        *(_pair(connection, field, f"right{number}") for number, field in enumerate(fields)),
        *([_every(connection, len(fields))] if len(fields) > 1 else []),
    ]
    total = pairs[-1]
    numbers: dict[str, Json] = {
        "rows": a.numbers["rows"],
        "unlabelled": a.numbers["unlabelled"],
        "accuracy_a": total.accuracy_a,
        "accuracy_b": total.accuracy_b,
        "difference": total.difference,
        "difference_low": total.interval[0] if total.interval else None,
        "difference_high": total.interval[1] if total.interval else None,
        "only_a_right": total.only_a,
        "only_b_right": total.only_b,
        "p": total.p,
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
    """Compare a field, or several together, over the rows of both runs."""
    a, b = (
        " and ".join(f"coalesce({side}.{column}, {side}.name is not null)" for column in columns)
        for side in ("scored_a", "scored")
    )
    labelled = ", ".join(f"scored_a.{column}, scored.{column}" for column in columns)
    # A row that one run lacks is wrong there, whichever of its answers the other has.
    (counts,) = dicts(
        connection,
        f"""select count(*) as n, count(*) filter ({a}) as a, count(*) filter ({b}) as b,
               count(*) filter (({a}) and not ({b})) as only_a,
               count(*) filter (({b}) and not ({a})) as only_b
        from scored_a full join scored on scored_a.name = scored.name
             and coalesce(scored_a.answer::varchar, '0') = coalesce(scored.answer::varchar, '0')
        where coalesce({labelled}) is not null""",
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
