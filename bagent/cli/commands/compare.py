"""``bagent compare``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagent.analysis.accuracy import PairScore
from bagent.cli import options as opt
from bagent.cli.process import log
from bagent.cli.render.tables import write_rows
from bagent.duck import Access, Setting, connect
from bagent.errors import EXIT_OK, EXIT_ROWS_FAILED, UsageError
from bagent.store.tables.schema import RESULTS

if TYPE_CHECKING:
    from bagent.analysis.accuracy import GoldFile, PairScore, Score
    from bagent.analysis.compare import Sameness
    from bagent.store.run_dir import RunDir

RUNS = Path("runs")
SETTINGS: dict[str, Setting] = {
    "memory_limit": "800MB",
    "threads": 2,
    "preserve_insertion_order": False,
}
"""Settings of DuckDB, which uses the disk beyond that memory."""


GoldFields = Annotated[
    list[str] | None,
    typer.Option(
        "--gold-field",
        metavar="NAME",
        help="The column of the file that --on is compared with; one for each --on.",
    ),
]
Stage = Annotated[
    str | None,
    typer.Option(
        "--stage",
        metavar="NAME",
        help="Compare only this stage; with known answers the default is the last one.",
    ),
]
KnownAnswers = Annotated[
    str | None,
    typer.Argument(
        metavar="[GOLD]", help="A file of known answers that both runs are compared with."
    ),
]


FirstRun = Annotated[
    str, typer.Argument(metavar="A", help="A run.", autocompletion=opt.complete_run_names)
]
SecondRun = Annotated[
    str,
    typer.Argument(metavar="B", help="A run, or a file of known answers (jsonl, csv, parquet)."),
]
AnswerFields = Annotated[
    list[str] | None,
    typer.Option("--on", metavar="FIELD", help="Compare this field of the answer. Repeatable."),
]
SameSql = Annotated[
    str | None,
    typer.Option(
        "--sql",
        metavar="SQL",
        help="Call rows a and b the same if this holds: a.text = b.text.",
    ),
]
FailIf = Annotated[
    str | None, typer.Option("--fail-if", metavar="EXPR", help="Exit with 1 if this is true.")
]
IdField = Annotated[
    str, typer.Option("--id", metavar="NAME", help="The column of the file that names a row.")
]
ShownRows = Annotated[
    int,
    typer.Option(
        "--rows",
        min=0,
        metavar="N",
        help="Show this many rows that differ.",
        rich_help_panel=opt.OUTPUT,
    ),
]
Form = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="table|json",
        help="Print in this form.",
        rich_help_panel=opt.OUTPUT,
    ),
]


def compare(
    first: FirstRun,
    second: SecondRun,
    gold_file: KnownAnswers = None,
    on: AnswerFields = None,
    sql: SameSql = None,
    fail_if: FailIf = None,
    gold_fields: GoldFields = None,
    name_field: IdField = "id",
    stage: Stage = None,
    rows: ShownRows = 10,
    form: Form = "table",
    as_json: opt.AsJson = False,
) -> int:
    """Compare two runs, or a run with known answers, row by row.

    Accuracies have 95 % intervals (Wilson). With two runs and a file, so has their difference,
    and McNemar's test says how likely it is by chance.

    --fail-if takes SQL over the numbers that --format json shows, such as
    "same_text < joined" or "accuracy < 0.9".

    Example: bagent compare review gold.jsonl --on label --fail-if "accuracy < 0.9"
    """
    form = "json" if as_json else form
    if form not in ("table", "json"):
        raise UsageError(f"--format {form}: no such format", hint="write table or json")
    file = _known_answers(second, gold_file)
    if file is None:
        if gold_fields:
            raise UsageError("--gold-field is for known answers", hint="name their file last")
        same = _compare(first, second, (tuple(on or ()), sql, stage), rows)
        numbers = same.numbers
        _show(same, form, lambda: _show_same(same))
    else:
        if sql is not None:
            raise UsageError("--sql is for two runs", hint="--on FIELD")
        runs = [first] if gold_file is None else [first, second]
        gold = _gold(file, name_field, on, gold_fields)
        numbers = _score_and_show(runs, gold, (stage, rows), form)
    if fail_if is not None and _holds(fail_if, numbers):
        log(f"--fail-if {fail_if}: true")
        return EXIT_ROWS_FAILED
    return EXIT_OK


def _known_answers(second: str, third: str | None) -> Path | None:
    """Return the last argument if it is a file of known answers."""
    from bagent.analysis.accuracy import is_gold

    path = Path(second if third is None else third)
    if is_gold(path):
        return path
    if third is not None:
        raise UsageError(
            f"{path} is no file of known answers", hint="name a jsonl, csv or parquet file"
        )
    return None


def _gold(path: Path, id_: str, on: list[str] | None, columns: list[str] | None) -> GoldFile:
    from bagent.analysis.accuracy import GoldFile

    gold = GoldFile(path, id_, tuple(on or ()), tuple(columns or ()))
    if gold.columns and len(gold.columns) != len(gold.fields):
        raise UsageError(
            "--gold-field goes with --on, one for each",
            hint="--on label --gold-field expected; --on text is the whole answer",
        )
    return gold


def _score_and_show(
    runs: list[str], gold: GoldFile, look: tuple[str | None, int], form: str
) -> dict[str, Any]:
    """Score one or two runs against known answers and print it; returns the numbers."""
    if len(runs) == 2:
        pair = _score_pair(runs, gold, *look)
        _show(pair, form, lambda: show_pair(pair, *runs))
        return pair.numbers
    score = _score(runs[0], gold, *look)
    _show(score, form, lambda: _show_score(score))
    return score.numbers


def _compare(first: str, second: str, question: Any, rows: int) -> Sameness:
    import duckdb

    from bagent.analysis.compare import Question, compare_runs
    from bagent.store.query import connect_tables, read_unchanged
    from bagent.store.run_dir import find_run

    access = Access(everything=question[1] is not None)  # SQL that the user typed may read files
    runs = [find_run(first, RUNS), find_run(second, RUNS)]
    with connect_tables(runs, log, access=access, settings=SETTINGS) as (connection, folders):
        try:
            return read_unchanged(
                folders,
                lambda: compare_runs(connection, folders[0], folders[1], Question(*question), rows),
            )
        except duckdb.Error as error:
            raise UsageError(
                f"--sql: {str(error).splitlines()[0]}",
                hint=f"a and b have {', '.join(RESULTS)}; fields of answers: a.output->>'label'",
            ) from None


def _score(first: str, gold: Any, stage: str | None, rows: int) -> Score:
    from bagent.analysis.accuracy import score_run
    from bagent.store.query import connect_tables, read_unchanged
    from bagent.store.run_dir import find_run

    run = find_run(first, RUNS)
    access = Access(files=[gold.path])
    with connect_tables([run], log, access=access, settings=SETTINGS) as (connection, folders):
        stage = stage or _answer_stage(run)
        return read_unchanged(folders, lambda: score_run(connection, folders[0], gold, stage, rows))


def _score_pair(names: list[str], gold: Any, stage: str | None, rows: int) -> PairScore:
    from bagent.analysis.accuracy import score_pair
    from bagent.store.query import connect_tables, read_unchanged
    from bagent.store.run_dir import find_run

    runs = [find_run(name, RUNS) for name in names]
    stage_a, stage_b = (stage or _answer_stage(run) for run in runs)
    access = Access(files=[gold.path])
    with connect_tables(runs, log, access=access, settings=SETTINGS) as (connection, folders):
        pair, stages = (folders[0], folders[1]), (stage_a, stage_b)
        return read_unchanged(folders, lambda: score_pair(connection, pair, gold, stages, rows))


def _answer_stage(run: RunDir) -> str | None:
    from bagent.store.totals import answer_stage

    return answer_stage(run.load_or_report(log))


def _holds(expression: str, numbers: dict[str, Any]) -> bool:
    """Return whether an SQL expression over the numbers is true; null is not."""
    import duckdb

    from bagent.duck import quoted

    columns = ", ".join(f"? as {quoted(name)}" for name in numbers)
    sql = f"select ({expression}\n) from (select {columns})"
    try:
        with connect(Access()) as connection:
            row = connection.execute(sql, list(numbers.values())).fetchone()
    except duckdb.Error as error:
        raise UsageError(
            f"--fail-if {expression}: {str(error).splitlines()[0]}", hint=", ".join(numbers)
        ) from None
    return bool(row is not None and row[0])


def _show(result: Any, form: str, show: Any) -> None:
    if form == "table":
        show()
        return
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(result, enc_hook=str)).decode())


def _show_same(same: Sameness) -> None:
    from bagent.cli.render.tables import write_rows

    n = same.numbers
    joined = n["joined"]
    counts = [
        ("rows", n["rows_a"], n["rows_b"]),
        ("ok", n["ok_a"], n["ok_b"]),
        ("copied", n["copied_a"] or None, n["copied_b"] or None),
        *((name, n[f"{name}_a"], n[f"{name}_b"]) for name in _SIDES),
    ]
    table_rows = [row for row in counts if row[1:] != (None, None)]
    write_rows(("", "A", "B"), table_rows, "table")
    if n["copied_a"] or n["copied_b"]:
        typer.echo("copied: from equal requests; latency and tokens are of the rows that were sent")
    typer.echo("")
    labels = dict(_PAIRS)
    if len(same.fields) > 1:
        labels |= {f"same_on_{f.field}": f"both ok and equal in {f.field}" for f in same.fields}
    pairs = [
        (label, n[name], f"{100 * n[name] / joined:.2f} %" if joined else "")
        for name, label in labels.items()
        if n.get(name) is not None and (n[name] or name not in _HIDDEN_IF_ZERO)
    ]
    write_rows(("rows in both", "rows", "share"), [("all", joined, ""), *pairs], "table")
    for field in same.fields:
        _section(f"{field.field}: A down, B across", _matrix(field.values))
    for title, rows in (("status changes", same.changes), ("rows that differ", same.rows)):
        _section(title, rows)
    typer.echo(f"\n{same.claim}" + "".join(f"\n  {reason}" for reason in same.why_not))


def _matrix(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how often each value of A met each value of B."""
    first = dict.fromkeys(pair["a"] for pair in pairs)
    second = sorted({_value_text(pair["b"]) for pair in pairs})
    counts = {(pair["a"], _value_text(pair["b"])): pair["rows"] for pair in pairs}
    return [{"": _value_text(a), **{b: counts.get((a, b), 0) for b in second}} for a in first]


def _value_text(value: str | None) -> str:
    return "(no value)" if value is None else value


_SIDES = (
    "latency_p50",
    "latency_p99",
    "ttft_p50",
    "ttft_p99",
    "prompt_tokens",
    "completion_tokens",
    "cost_usd",
)
_PAIRS = {
    "same_prompt": "same prompt",
    "without_prompt": "made without a prompt",
    "same_text": "same text, byte for byte",
    "same_normal": "same text but for blanks and composition",
    "same_json": "same JSON",
    "other_json": "other JSON",
    "without_json": "only text, in both",
    "without_output": "no answer in either",
    "same_on": "both ok and equal in the fields of --on",
    "same_sql": "--sql holds",
    "status_changes": "another status",
}


_HIDDEN_IF_ZERO = frozenset(("without_prompt", "other_json", "without_json", "without_output"))


def _show_score(score: Score) -> None:
    from bagent.cli.render.tables import write_rows

    n = score.numbers
    interval_all = None if n["accuracy"] is None else (n["accuracy_low"], n["accuracy_high"])
    write_rows(
        ("field", "right", "wrong", "unanswered", "accuracy", "95 %"),
        [
            (s.field, s.right, s.wrong, s.unanswered, s.accuracy, interval(s.interval))
            for s in score.fields
        ]
        + [("all of them", n["all_right"], None, None, n["accuracy"], interval(interval_all))],
        "table",
    )
    for field in score.fields:
        _section(f"{field.field}: known and given", _confusion(field.confusion))
    _section("rows with most wrong fields", score.worst)
    typer.echo(f"\n{n['rows']:,} rows, {n['not_ok']:,} not ok, {n['missing']:,} not in the run")
    _show_unlabelled(n)


def _show_unlabelled(numbers: Mapping[str, Any]) -> None:
    count = numbers["unlabelled"]
    if count:
        rows = "1 row" if count == 1 else f"{count:,} rows"
        typer.echo(f"left out: {rows} of the file without an expected value")


MOST_VALUES = 8


def _confusion(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a matrix where there are few values, else the commonest wrong pairs."""
    expected = sorted({str(pair["known"]) for pair in pairs})
    answered = sorted({_answer_text(pair["given"]) for pair in pairs})
    if max(len(expected), len(answered)) > MOST_VALUES:
        return [pair for pair in pairs if pair["known"] != pair["given"]][:20]
    counts = {(str(p["known"]), _answer_text(p["given"])): p["rows"] for p in pairs}
    return [{"known": k, **{g: counts.get((k, g), 0) for g in answered}} for k in expected]


def _answer_text(value: str | None) -> str:
    return "(no answer)" if value is None else value


def _section(title: str, rows: list[dict[str, Any]]) -> None:
    from bagent.cli.render.tables import write_rows

    if rows:
        typer.echo(f"\n{title}")
        write_rows(list(rows[0]), [list(row.values()) for row in rows], "table")


def interval(ends: Any) -> str | None:
    """Write the ends of an interval for people."""
    return None if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def show_pair(score: PairScore, first: str, second: str) -> None:
    """Print the accuracy of both runs and their difference."""
    n = score.numbers
    typer.echo(f"A is {first}, B is {second}; intervals are of 95 %, p is McNemar's\n")
    write_rows(
        ("field", "A", "A 95 %", "B", "B 95 %", "B - A", "B - A 95 %", "only A", "only B", "p"),
        [
            (
                *(pair.field, pair.accuracy_a, interval(pair.interval_a)),
                *(pair.accuracy_b, interval(pair.interval_b)),
                *(pair.difference, interval(pair.interval)),
                *(pair.only_a, pair.only_b, float(f"{pair.p:.3g}")),
            )
            for pair in score.fields
        ],
        "table",
    )
    typer.echo("")
    for name, side in (("A", score.a.numbers), ("B", score.b.numbers)):
        rows, not_ok, missing = (f"{side[key]:,}" for key in ("rows", "not_ok", "missing"))
        typer.echo(f"{name}: {rows} rows, {not_ok} not ok, {missing} not in the run")
    _show_unlabelled(n)
    if n["p"] is not None and n["rows"]:
        sure = "is" if float(str(n["p"])) < 0.05 else "may be chance, it is not"
        typer.echo(f"the difference {sure} significant at 5 %")
