"""``bagent report``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagent.cli import options as opt
from bagent.cli.process import log
from bagent.duck import Setting
from bagent.errors import WriteError

if TYPE_CHECKING:
    from bagent.report import ReportInfo
    from bagent.store.run_dir import RunDir

SETTINGS: dict[str, Setting] = {
    "memory_limit": "300MB",
    "threads": 2,
    "preserve_insertion_order": False,
}
"""Settings of DuckDB, which uses the disk beyond that memory."""


def report(
    run: opt.RunName = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write here instead of RUN/report.html.",
            rich_help_panel=opt.OUTPUT,
        ),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Write one HTML page about a run: what failed, was slow, and cost.

    The page needs no network.

    Example: bagent report review
    """
    import duckdb

    from bagent.report import make_page
    from bagent.store.query import open_tables
    from bagent.store.run_dir import find_run

    run_dir = find_run(run, Path("runs"))
    target = output or run_dir.path / "report.html"
    with open_tables(run_dir, log, settings=SETTINGS) as connection:
        try:
            page = make_page(connection, _about(run_dir))
        except duckdb.Error as error:
            raise WriteError(f"the page cannot be made: {str(error).splitlines()[0]}") from None
    try:
        if output is None:
            # The run directory may be another user's, with a link of that name.
            target.unlink(missing_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise WriteError(
            f"{target}: {error.strerror}", hint="name another file with -o FILE"
        ) from None
    if as_json:
        typer.echo(json.dumps({"path": str(target), "bytes": len(page.encode())}))
        return
    log(f"{target}, {len(page.encode()) / 1000:,.0f} kB: open it in a browser")


def _about(run: RunDir) -> ReportInfo:
    from bagent.cli.render.report_job import NOT_KEPT, NOT_OWN, prompts_of, settings_of
    from bagent.report import EarlierJob, ReportInfo
    from bagent.report.answer_fields import property_names
    from bagent.runs.prompt_fields import names_in_prompts
    from bagent.runs.run_state import describe, mending_commands, run_title
    from bagent.store.run_dir import merge_changes, working_seconds

    state = describe(run, log)
    info = run.load_or_report(lambda _: None)
    model = info.fingerprints.get("model") if info else None
    if info and info.job.get("simulated"):
        model = f"{model} (simulated)"
    pairs = {
        "state": state["state"],
        "exit code": state["exit_code"],
        "model": model,
        "version": ", ".join(sorted({s.version for s in info.starts if s.version})) if info else "",
    }
    now = time.time() if state["state"] == "running" else None
    facts = [(label, str(value)) for label, value in pairs.items() if value not in (None, "")]
    stages = tuple(info.stages) if info else ()
    is_own = info is not None and run.is_own(info)
    return ReportInfo(
        run_title(run, info),
        facts,
        stages,
        names_in_prompts(info.job, files=is_own) if info else None,
        info.prices if info else (),
        tuple(prompts_of(info.job, unread="" if is_own else NOT_OWN)) if info else (),
        settings_of(info.job) if info else "",
        tuple(
            EarlierJob(c.at, ", ".join(c.changed), tuple(prompts_of(c.job, unread=NOT_KEPT)))
            for c in merge_changes(info.changes if info else ())
        ),
        mending=mending_commands(run, state, state["by_kind"]),
        worked_s=working_seconds(info.starts, now) if info else None,
        rows_per_s=state["rows_per_s"],
        run=str(run.path),
        properties=property_names(info.answer_columns) if info else {},
    )
