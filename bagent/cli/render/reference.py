"""The reference of options, job keys, tables and codes, made from their definitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bagent.cli.app import COMMANDS, load_command
from bagent.cli.help import help_record
from bagent.errors import EXIT_CODES
from bagent.job.spec.json_schema import job_schema
from bagent.store.tables.schema import COLUMN_DESCRIPTIONS, ERROR_KINDS, STATUSES

HEAD = """# Reference

Every option, key of a job file, column, status and exit code. Made by `bagent schema --reference`
from the definitions that the program itself uses; not edited by hand.
"""


def reference_text() -> str:
    """Return the reference as Markdown."""
    lines = [HEAD, "## Commands and options", ""]
    for name in COMMANDS:
        lines += _command(name)
    lines += ["## Keys of a job file", ""]
    schema = job_schema()
    lines += _keys("The job", schema)
    for name, section in sorted(schema["$defs"].items()):
        if "properties" in section:
            lines += _keys(name, section)
    lines += ["## Tables and views of a run", ""]
    for table, columns in COLUMN_DESCRIPTIONS.items():
        lines += [f"### {table}", "", *_table(("column", ""), columns), ""]
    for title, descriptions in (("Statuses", STATUSES), ("Error kinds", ERROR_KINDS)):
        lines += [f"## {title}", "", *_table((title.lower(), ""), descriptions), ""]
    codes = {str(code): descriptions for code, descriptions in EXIT_CODES.items()}
    lines += ["## Exit codes", "", *_table(("code", ""), codes)]
    return "\n".join(lines) + "\n"


def _table(heads: tuple[str, str], rows: Mapping[str, str]) -> Iterator[str]:
    yield f"| {heads[0]} | {heads[1]} |"
    yield "|---|---|"
    for name, text in rows.items():
        yield f"| `{_cell(name)}` | {_cell(text)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _command(name: str) -> Iterator[str]:
    command = load_command(name)
    yield f"### bagent {name}"
    yield ""
    yield " ".join((command.help or "").split("\n\n")[0].split())
    yield ""
    context = command.make_context(name, [], resilient_parsing=True)
    records = [help_record(param, context) for param in command.params if not param.hidden]
    options = {usage: text for usage, text in filter(None, records) if "--help" not in usage}
    yield from _table(("option", ""), options)
    yield ""


def _keys(name: str, section: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if parts := section.get("description"):
        yield _cell(parts)
        yield ""
    rows = {}
    for key, item in section["properties"].items():
        parts = [item.get("description", "")]
        default = item.get("default")
        if default not in (None, [], {}):
            parts.append(f"Default: {_value(default)}.")
        parts += [f"See {inner}." for inner in _sections(item)]
        rows[key] = " ".join(filter(None, parts))
    yield from _table(("key", ""), rows)
    yield ""


def _value(default: Any) -> str:
    if isinstance(default, dict):
        percent = default.get("percent")
        share = default.get("count") if percent is None else f"{percent}%"
        default = default.get("given", share)
    return str(default).lower() if isinstance(default, bool) else f"{default}"


def _sections(item: Any) -> list[str]:
    """Return the names of the sections that a key refers to."""
    names = dict[str, None]()
    if isinstance(item, dict):
        if isinstance(item.get("$ref"), str):
            names[item["$ref"].rsplit("/", 1)[-1]] = None
        for inner in item.values():
            names.update(dict.fromkeys(_sections(inner)))
    elif isinstance(item, list):
        for inner in item:
            names.update(dict.fromkeys(_sections(inner)))
    return list(names)
