"""``bagent publish``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bagent.cli import options as opt
from bagent.cli.process import log
from bagent.errors import UsageError


def publish(
    run: opt.RunName = None,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]", help="Bucket or folder; the default is the job's results.publish."
        ),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Copy the tables of a run to a bucket or a folder, whole or not at all.

    The files go there first, then manifest.json, which names them: a reader that begins with it
    sees one complete publication. After a failure the same command resumes. The journal is never
    copied.

    Example: bagent publish review s3://bucket/runs/review
    """
    from bagent.remote import publish_problem
    from bagent.store.publish import publish_tables
    from bagent.store.query import open_tables
    from bagent.store.run_dir import find_run

    run_dir = find_run(run, Path("runs"))
    if target is None:
        info = run_dir.load_or_report(log)
        results = info.job.get("results") if info else None
        target = results.get("publish") if isinstance(results, dict) else None
        if not target:
            raise UsageError(
                f"{run_dir.path}: the job has no results.publish",
                hint=f"bagent publish {run_dir.path.name} s3://BUCKET/FOLDER",
            )
    if problem := publish_problem(target):
        raise UsageError(f"{target}: {problem}", hint="s3://BUCKET/FOLDER, or the path of a folder")
    with open_tables(run_dir, log):
        manifest = publish_tables(run_dir.path, target)
    if as_json:
        typer.echo(json.dumps({"target": target, "folder": manifest.folder}))
        return
    size = sum(file.bytes for file in manifest.tables.values())
    log(f"{target}/manifest.json names {len(manifest.tables)} files, {size / 1e6:,.1f} MB")
