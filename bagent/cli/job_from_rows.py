"""A job file for the rows of a file: an id, a prompt and a schema to start from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bagent.errors import UsageError
from bagent.remote import is_remote
from bagent.types import Row

ROWS = 200
"""Rows whose columns are looked at."""

LONGEST_ID = 64
NEARLY_ALL = 0.75
"""The share of different values from which a column with repeated ones seems to be an id."""
SHOWN_COLUMNS = 20
"""Columns that the comment of the job names."""

_SIMPLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NOT_TEXT = {"null", "true", "false"}
_HIDDEN = {"row", "input", "responses", "n", "level", "loop", "board", "answer"}
"""Names that mean something else in a template."""

JOB = """\
# Made by bagent init --from. Columns of the input: {columns}
# Try it as it is:  bagent run {job}     (a simulated server: no key, no GPU)
# Look first:       bagent check {job}   (the rendered prompts, tokens, cost)
name: {name}

# Your server: vllm://localhost:8000, sglang://..., https://api.example.org/v1, openai, anthropic,
# bedrock, or local (a small model on this machine). sim makes answers up.
backend: sim
input: {input}
{id}
{prompt}
# An answer that does not fit the schema is asked again, with the reason.
output:
  schema:
    type: object
    properties:
      reason: {{type: string, maxLength: 200}}
      label: {{enum: [relevant, irrelevant, unclear]}}      # your own labels
    required: [reason, label]
    additionalProperties: false
sampling: {{temperature: 0, max_tokens: 200}}
"""

PROMPT = """\
prompt:
  # Say here what you want to know.
  system: "Decide whether a text is relevant. Answer with JSON: a short reason, then the label."
  user: |
    {{{{ {expression} }}}}
"""

CONVERSATION = """\
prompt: {{messages_from: {column}}}      # the conversation that stands in this column
"""


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """What a job needs of the columns of a file.

    Attributes:
        names: all columns, in the order of the first rows.
        id: the column that names a row; None: none does.
        text: the column that the prompt shows.
        conversation: whether ``text`` holds lists of messages.
        repeated: which value the column that seems to be the id has twice; empty where none does.
    """

    names: tuple[str, ...]
    id: str | None
    text: str
    conversation: bool
    repeated: str = ""


def make_job(source: str, folder: Path) -> tuple[str, ColumnChoice]:
    """Return the text of ``folder/job.yaml`` for the rows of ``source``, and its columns.

    Raises:
        InputError: the file is missing, or of an unknown format.
        UsageError: no row of it can be read, or it is an OpenAI batch file, which needs no job.
    """
    rows = _first_rows(source)
    columns = inspect_columns([row.data for row in rows], source)
    columns = replace(columns, repeated=_repeated_value(columns, rows))
    path = source
    if not is_remote(source):
        path = os.path.relpath(Path(source).absolute(), folder.absolute())
    listed = ", ".join(map(_expression, columns.names[:SHOWN_COLUMNS]))
    more = len(columns.names) - SHOWN_COLUMNS
    if columns.conversation:
        prompt = CONVERSATION.format(column=_yaml(columns.text))
    else:
        prompt = PROMPT.format(expression=_expression(columns.text))
    text = JOB.format(
        columns=listed + (f" and {more} more" if more > 0 else ""),
        job=_literal(str(folder / "job.yaml")),
        name=_yaml(
            re.sub(r"[^A-Za-z0-9_-]+", "-", Path(source).name.split(".")[0]).strip("-") or "job"
        ),
        input=_yaml(path),
        id=f"id: {_yaml(columns.id)}\n" if columns.id is not None else "",
        prompt=prompt,
    )
    return text, columns


def _first_rows(source: str) -> list[Row]:
    from bagent.rows import RowsConfig, is_batch_row, open_rows

    reader = open_rows(RowsConfig(inputs=(source,), base=Path.cwd()))
    rows = reader.peek(ROWS)
    reader.close()
    readable = [row for row in rows if row.data]
    if readable and is_batch_row(readable[0].data):
        raise UsageError(
            f"{source} is an OpenAI batch file, which needs no job",
            hint=f"bagent run {source} --backend vllm://HOST:8000",
        )
    if not readable:
        problem = next((row.error for row in rows if row.error), "it has no rows")
        raise UsageError(f"{source}: {problem}", hint="name a file of rows, such as rows.csv")
    return readable


def inspect_columns(rows: Sequence[dict[str, Any]], source: str) -> ColumnChoice:
    """Choose the id and the text among the columns of ``rows``.

    Raises:
        UsageError: no column holds a text.
    """
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        if all(_is_conversation(row.get(name)) for row in rows):
            return ColumnChoice(names, _id_column(names, rows), name, conversation=True)
    lengths = {name: sum(_length(row.get(name)) for row in rows) for name in names}
    longest = max(lengths, key=lambda name: lengths[name], default="")
    if not lengths.get(longest):
        raise UsageError(f"{source}: no column holds a text", hint="name a file with a text column")
    others = [name for name in names if name != longest]
    return ColumnChoice(names, _id_column(others, rows), longest, conversation=False)


def _id_column(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str | None:
    """Return the first column of short values that differ; None also for a default of jobs."""
    for name in ("id", "custom_id"):
        if name in names:
            return None  # the default of a job
    for name in names:
        values = [row.get(name) for row in rows]
        if _are_short(values) and len(set(values)) == len(values):
            return name
    return None


def _are_short(values: Sequence[Any]) -> bool:
    return all(
        isinstance(value, str | int) and str(value).strip() and len(str(value)) < LONGEST_ID
        for value in values
    )


def _repeated_value(columns: ColumnChoice, rows: Sequence[Row]) -> str:
    """Return which value repeats in the first column that seems to be an id; empty without one."""
    for name in columns.names:
        if name == columns.id:
            break
        values = [row.data.get(name) for row in rows]
        if name == columns.text or not _are_short(values):
            continue
        lines: dict[Any, list[int]] = {}
        for row, value in zip(rows, values, strict=True):
            lines.setdefault(value, []).append(row.line)
        if NEARLY_ALL * len(values) <= len(lines) < len(values):
            value, repeats = next(item for item in lines.items() if len(item[1]) > 1)
            return f"{name} has {value} on lines {', '.join(map(str, repeats[:5]))}"
    return ""


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) for item in value)
        and ({"role", "content"} <= value[0].keys() or {"from", "value"} <= value[0].keys())
    )


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


def _expression(name: str) -> str:
    """Return the Jinja expression for a field, whatever its name holds."""
    if _SIMPLE.match(name) and name not in _HIDDEN and name.lower() not in _NOT_TEXT | {"none"}:
        return name
    return f"row[{json.dumps(name, ensure_ascii=not name.isprintable())}]"


def _yaml(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_./][A-Za-z0-9_./-]*", text) and text.lower() not in _NOT_TEXT:
        return text
    return _literal(text)


def _literal(text: str) -> str:
    """Return ``text`` as it is where it is simple, else as a JSON string of one line."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
