"""``bagent report``, and the job on its page: prompts and settings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagent.cli import options as opt
from bagent.cli.process import log
from bagent.duck import Setting
from bagent.errors import WriteError
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.report import ReportInfo
    from bagent.store.run_dir import RunDir

SETTINGS: dict[str, Setting] = {
    "memory_limit": "300MB",
    "threads": 2,
    "preserve_insertion_order": False,
}
"""Settings of DuckDB, which uses the disk beyond that memory."""

NOT_OWN = "not read, since you did not make this run here"
NOT_KEPT = "what it held then is not kept"
"""Why the page has no text of a file that a prompt names."""


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
    from bagent.store.query import connect_tables, read_unchanged
    from bagent.store.run_dir import find_run

    run_dir = find_run(run, Path("runs"))
    target = output or run_dir.path / "report.html"
    with connect_tables([run_dir], log, settings=SETTINGS) as (connection, folders):
        try:
            page = read_unchanged(folders, lambda: make_page(connection, _about(run_dir)))
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


def prompts_of(job: Json, owner: str = "", *, unread: str = "") -> Iterator[tuple[str, str]]:
    """Yield the owner and the text of each prompt; files are read as they are now.

    Args:
        job: the resolved job of ``run.json``, or a part of it.
        owner: the stage, step or section of the part.
        unread: why the files that it names are not read, which may be any of this user; empty
            where they are.
    """
    if isinstance(job, list):
        for part in job:
            yield from prompts_of(part, owner, unread=unread)
    elif isinstance(job, Mapping):
        owner = str(job.get("name") or owner) if owner else owner
        for key, value in job.items():
            if key == "prompt" and isinstance(value, Mapping):
                yield from _parts(value, owner, unread)
            else:
                yield from prompts_of(value, owner or str(key), unread=unread)


def _parts(prompt: Mapping[str, Json], owner: str, unread: str) -> Iterator[tuple[str, str]]:
    messages = prompt.get("messages") or []
    contents = [(str(message.get("role")), message.get("content")) for message in messages]
    contents += [(name, prompt.get(name)) for name in ("system", "user", "raw")]
    for role, content in contents:
        for part in content if isinstance(content, list) else [content]:
            title, text = _title_and_text(part, unread)
            if text:
                yield " ".join(part for part in (owner, role, title) if part), text


def _title_and_text(part: Json, unread: str) -> tuple[str, str]:
    """Return the file of a text, empty where it is in the job, and the text."""
    import yaml

    from bagent.job.redaction import mask_text

    if not isinstance(part, Mapping):
        return "", "" if part is None else str(part)
    if isinstance(part.get("file"), str):
        if unread:
            return "", f"({part['file']}: {unread})"
        try:
            text = Path(part["file"]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            text = f"the file cannot be read now: {error}"
        return f"({part['file']}, as it is now)", mask_text(text)
    fields = {key: value for key, value in part.items() if value is not None}
    return "", str(part.get("text") or (yaml.safe_dump(fields) if fields else ""))


def settings_of(job: Mapping[str, Json]) -> str:
    """Return the settings that differ from their defaults as YAML, without prompts."""
    import yaml
    from pydantic import BaseModel

    from bagent.job.spec.job import Job

    defaults: dict[str, Json] = {}
    for name, field in Job.model_fields.items():
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", by_alias=True)
        defaults[field.alias or name] = value
    changed = _changed(dict(job), defaults)
    if not changed:
        return ""
    text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True, width=100)
    return str(text)


def _changed(value: dict[str, Json], defaults: Any) -> dict[str, Json]:
    changed: dict[str, Json] = {}
    for name, item in value.items():
        default = defaults.get(name) if isinstance(defaults, Mapping) else None
        if name == "prompt" or item == default or item is None:
            continue
        trimmed = _without_defaults(item, default)
        if trimmed not in (None, {}, []):
            changed[name] = trimmed
    return changed


def _without_defaults(value: Json, default: Json) -> Json:
    if isinstance(value, dict):
        return _changed(value, default)
    return [_without_defaults(item, None) for item in value] if isinstance(value, list) else value
