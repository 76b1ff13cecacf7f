"""``bagent results``."""

from __future__ import annotations

import heapq
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from bagent.cli.options import complete_run_names
from bagent.cli.process import log
from bagent.cli.results_export import ResultsRequest, stages_of_shards, write_by_tables
from bagent.errors import EXIT_OK, EXIT_ROWS_FAILED, UsageError, WriteError
from bagent.text.terminal import data_stdout

RUNS = Path("runs")
FORMATS = ("jsonl", "csv", "parquet", "table", "openai-batch")
ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
"""Formats that the ending of a file names."""
SPREADSHEETS = (".xlsx", ".xls", ".ods")
"""Endings of files that bagent does not write."""


Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Run directories, or names under runs; the default is the latest run.",
        autocompletion=complete_run_names,
    ),
]
Form = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="|".join(FORMATS),
        help="Print rows in this form; the default is that of the ending of -o, else jsonl.",
    ),
]
Statuses = Annotated[
    list[str] | None,
    typer.Option(
        "--status",
        metavar="STATUS",
        help="Print only rows with this status; failed stands for all failures. Repeatable.",
    ),
]
Stages = Annotated[
    list[str] | None,
    typer.Option("--stage", metavar="NAME", help="Print only results of this stage. Repeatable."),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="SQL",
        help="Print only rows for which this holds; names are those of --columns.",
    ),
]
ColumnNames = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="NAME,...",
        help="Print these: columns of results, fields of the answers or of the input.",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=0, metavar="N", help="Print only the first N.")
]
Ordered = Annotated[
    bool,
    typer.Option(
        "--ordered/--as-finished", help="Print in the order of the input, or as rows were finished."
    ),
]
WithInput = Annotated[
    bool,
    typer.Option("--with-input", help="With jsonl or csv: print the input beside each result."),
]
AllColumns = Annotated[
    bool, typer.Option("--all-columns", help="With csv: print every column, the answers first.")
]
Excel = Annotated[
    bool,
    typer.Option(
        "--excel",
        help="With csv: write for Excel alone: a UTF-8 mark, no formulas, and texts such as SEPT2"
        " and 0012 as text.",
    ),
]
Redact = Annotated[
    list[str] | None,
    typer.Option(
        "--redact",
        metavar="FIELD",
        help="Print *** in place of these fields, parted by commas. Repeatable.",
    ),
]
OutputFile = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file.")
]


def results(
    runs: Runs = None,
    form: Form = None,
    statuses: Statuses = None,
    stages: Stages = None,
    where: Where = None,
    columns: ColumnNames = None,
    limit: Limit = None,
    ordered: Ordered = True,
    with_input: WithInput = False,
    all_columns: AllColumns = False,
    excel: Excel = False,
    redact: Redact = None,
    output: OutputFile = None,
) -> None:
    """Print rows as jsonl, csv, parquet or a table.

    These are the current results of all rows in the order of the input, also while the run goes
    on. Several runs come as one: parts of one input are merged in its order, others follow each
    other. --redact also hides texts that may repeat the field.

    Example: bagent results review --status ok --columns id,output | head

    Example: bagent results --where "label = 'bug' and confidence < 3" --with-input

    Example: bagent results --excel --with-input -o labels.csv
    """
    from bagent.store.run_dir import find_run

    form = _form(form, output)
    _check_options(form, where, redact, output)
    if (all_columns or excel) and form != "csv":
        option = "--all-columns" if all_columns else "--excel"
        raise UsageError(f"{option} is for --format csv", hint="add --format csv")
    if with_input and form not in ("jsonl", "csv"):
        raise UsageError("--with-input is for jsonl and csv", hint="add --format csv")
    request = ResultsRequest(
        runs=[find_run(r, RUNS) for r in runs] if runs else [find_run(None, RUNS)],
        form=form,
        statuses=_statuses(statuses),
        stages=frozenset(stages or ()),
        where=where,
        names=[n.strip() for n in columns.split(",") if n.strip()] if columns else None,
        ordered=ordered,
        with_input=with_input,
        limit=limit,
        redact=tuple(n.strip() for names in redact or () for n in names.split(",")),
        output=output,
        all_columns=all_columns,
        excel=excel,
    )
    _check_stages(request)
    _write_to(_lines(request), output if form in ("jsonl", "openai-batch") else None)
    _log_unfinished(request)


def _log_unfinished(request: ResultsRequest) -> None:
    """Say on standard error how many rows of a run have no result yet."""
    from bagent.observe.formatting import counted
    from bagent.store.totals import read_progress

    for run in request.runs:
        info = run.load_or_report(lambda _: None)
        if info is None or info.exit_code in (EXIT_OK, EXIT_ROWS_FAILED):
            continue
        progress = read_progress(run.path, info.parts)
        if progress is not None and progress.remaining:
            about = "" if progress.total_is_exact else "about "
            log(
                f"{about}{counted(progress.remaining, info.unit)} of {run.path} without a result;"
                f" bagent status {shlex.quote(str(run.path))} says what to type"
            )


def _form(form: str | None, output: Path | None) -> str:
    """Return the format that was chosen, or that of the file's ending.

    Raises:
        UsageError: no format has this ending, or ``--format`` is another one.
    """
    ending = "" if output is None else output.suffix.lower()
    named = ENDINGS.get(ending)
    if form is None and ending and named is None:
        hint = ", ".join(ENDINGS) if ending not in SPREADSHEETS else "-o FILE.csv --excel"
        raise UsageError(f"-o {output}: no format has the ending {ending}", hint=hint)
    chosen = "jsonl" if form == "openai-batch" else form
    differs = ending in SPREADSHEETS or named not in (None, chosen)
    if form in FORMATS and form != "table" and differs:
        raise UsageError(
            f"-o {output}: {ending} is not an ending of --format {form}", hint="change one of them"
        )
    return form or named or "jsonl"


def _check_options(
    form: str, where: str | None, redact: list[str] | None, output: Path | None
) -> None:
    if form not in FORMATS:
        raise UsageError(f"--format {form}: no such format", hint=", ".join(FORMATS))
    if where is not None and not where.strip():
        raise UsageError("--where: the condition is empty", hint="leave --where out")
    if form == "parquet" and output is None:
        raise UsageError("parquet needs a file to go to", hint="add -o results.parquet")
    if form == "table" and output is not None:
        raise UsageError("--format table goes to the terminal", hint="write --format csv -o FILE")
    if form == "openai-batch" and (where or redact):
        option = "--where" if where else "--redact"
        raise UsageError(
            f"{option} does not go with openai-batch", hint="leave it out; --status works"
        )


def _check_stages(request: ResultsRequest) -> None:
    """Refuse a stage that no run has; parts of a stage are named ``STAGE.PART``."""
    infos = [run.load_or_report(lambda _: None) for run in request.runs] if request.stages else []
    stages = {name for info in infos if info is not None for name in info.stages}
    for stage in sorted(request.stages):
        if stages and stage not in stages and stage.partition(".")[0] not in stages:
            raise UsageError(f"--stage {stage}: no such stage", hint=", ".join(sorted(stages)))


def _lines(request: ResultsRequest) -> Iterator[bytes]:
    """Yield the lines to write; none where DuckDB writes them itself."""
    if request.form == "openai-batch":
        return islice(_batch_lines(request), request.limit)
    plain = (
        request.form == "jsonl"
        and request.only_results
        and not request.where
        and not request.redact
    )
    if not plain or _quicker_by_tables(request):
        return write_by_tables(request)
    return islice(_json_lines(request), request.limit)


def _quicker_by_tables(request: ResultsRequest) -> bool:
    """Whether fresh tables answer sooner: a few rows in order need not the whole journal."""
    if request.limit is None or not request.ordered:
        return False
    from bagent.store.query import has_fresh_tables

    return all(map(has_fresh_tables, request.runs))


def _write_to(lines: Iterator[bytes], output: Path | None) -> None:
    """Write to a file or to stdout; a closed pipe is the caller's error."""
    if output is None:
        _write(lines, data_stdout())
        return
    try:
        with output.open("wb") as file:
            _write(lines, file)
    except OSError as error:
        raise WriteError(f"{output}: {error.strerror}") from None


def _write(lines: Iterator[bytes], file: BinaryIO) -> None:
    for line in lines:
        file.write(line)
    file.flush()


def _statuses(options: list[str] | None) -> frozenset[str]:
    from bagent.store.results import check_statuses

    names = (name.strip() for text in options or () for name in text.split(","))
    return check_statuses(names, "--status")


def _json_lines(request: ResultsRequest) -> Iterator[bytes]:
    from bagent.store.results import encode_result, iter_results
    from bagent.store.run_input import find_input

    query = _query(request)
    names = request.json_columns

    def of_run(run: Any) -> Iterator[dict[str, Any]]:
        info = run.load_or_report(log)
        find = None
        if "input" in names and info is not None:
            find = partial(find_input, run, info, report=log)
        return iter_results(run.path, query, report=log, find_input=find)

    def position(result: dict[str, Any]) -> tuple[str, int, int]:
        return result["stage"], result["row"], result["answer"]

    for result in _as_one(request, [of_run(run) for run in request.runs], position):
        yield encode_result({name: result.get(name) for name in names})


def _batch_lines(request: ResultsRequest) -> Iterator[bytes]:
    from bagent.store.export_batch import batch_line
    from bagent.store.results import iter_outcomes

    query = _query(request)
    several = [iter_outcomes(run.path, query, report=log) for run in request.runs]
    yield from map(batch_line, _as_one(request, several, lambda o: (o.stage, o.row, o.answer)))


def _query(request: ResultsRequest) -> Any:
    from bagent.store.results import ResultQuery

    ordered = request.ordered or request.form == "openai-batch"
    return ResultQuery(
        statuses=request.statuses or None, stages=request.stages or None, ordered=ordered
    )


def _as_one(
    request: ResultsRequest,
    iterators: list[Iterator[Any]],
    position: Callable[[Any], tuple[str, int, int]],
) -> Iterator[Any]:
    """Merge several runs in the order of their common input, else chain them."""
    stages = stages_of_shards(request.runs) if _query(request).ordered else None
    if stages is None:
        return chain.from_iterable(iterators)
    order = {stage: number for number, stage in enumerate(stages)}

    def key(item: Any) -> tuple[int, int, int]:
        stage, row, answer = position(item)
        return order.setdefault(stage, len(order)), row, answer

    return heapq.merge(*iterators, key=key)
