"""``bagent init``: a starter job, or one for the rows of a file."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import typer

from bagent.cli.process import log
from bagent.errors import UsageError
from bagent.observe.formatting import visible
from bagent.types import Row

JOB = """\
# A starter job: eight human genes, a short text about each, and a schema for the answers.
# Try it as it is:  bagent run job.yaml     (a simulated engine: no key, no GPU)
# Look first:       bagent check job.yaml   (the rendered prompts, tokens, cost)

name: genes

# Which server answers. sim is simulated and only shows how a run goes. For real answers:
#   vllm://localhost:8000          your own engine (also sglang:// and dynamo://)
#   https://api.example.org/v1     any OpenAI-compatible server
#   openai, anthropic, bedrock     hosted models; keys come from the environment
#   local                          a small model on this machine's CPU
backend: sim

# The model to ask for; auto is the one that the server has.
model: auto

# One JSON object per line; also .csv, .parquet, a glob, or - for standard input.
input: rows.jsonl
id: symbol

prompt:
  system: {file: prompt.md}
  # {{ name }} stands for a field of the row.
  user: |
    Gene: {{ symbol }} ({{ name }})
    {{ summary }}

# An answer that does not fit the schema is asked again, with the reason.
output:
  schema: schema.json

sampling:
  temperature: 0
  max_tokens: 200

# How long one request may take; blank = the default, none = no limit.
limits:
  timeout: {total: 5m}
"""

PROMPT = """\
You sort human genes by what their protein mainly does.
Use only the text that you are given. Answer with JSON:
the role, one sentence of reason, and how sure you are from 0 to 1.
"""

SCHEMA = """\
{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "title": "gene role",
  "type": "object",
  "properties": {
    "role": {
      "type": "string",
      "enum": ["tumor suppressor", "oncogene", "transport", "signalling", "other"]
    },
    "reason": {"type": "string", "minLength": 1},
    "confidence": {"type": "number", "minimum": 0, "maximum": 1}
  },
  "required": ["role", "reason", "confidence"],
  "additionalProperties": false
}
"""

ROWS = """\
{"symbol": "TP53", "name": "tumor protein p53", "summary": "Responds to DNA damage by stopping the \
cell cycle or starting cell death; mutated in about half of all human cancers."}
{"symbol": "BRCA1", "name": "BRCA1 DNA repair associated", "summary": "Takes part in the repair of \
double-strand breaks; inherited loss raises the risk of breast and ovarian cancer."}
{"symbol": "KRAS", "name": "KRAS proto-oncogene, GTPase", "summary": "A small GTPase that passes \
growth signals on; single mutations keep it switched on in many tumors."}
{"symbol": "MYC", "name": "MYC proto-oncogene", "summary": "A transcription factor that drives \
growth and division; its amplification is common in cancers."}
{"symbol": "EGFR", "name": "epidermal growth factor receptor", "summary": "A receptor tyrosine \
kinase on the cell surface; binding of a growth factor starts a cascade inside the cell."}
{"symbol": "CFTR", "name": "CF transmembrane conductance regulator", "summary": "A channel that \
lets chloride through the membrane of epithelial cells; its loss causes cystic fibrosis."}
{"symbol": "HBB", "name": "hemoglobin subunit beta", "summary": "Part of the protein that carries \
oxygen in red blood cells; one changed amino acid causes sickle cell disease."}
{"symbol": "INS", "name": "insulin", "summary": "A hormone of the pancreas that tells cells to \
take up glucose; its lack causes type 1 diabetes."}
"""

FILES = {"job.yaml": JOB, "prompt.md": PROMPT, "schema.json": SCHEMA, "rows.jsonl": ROWS}
"""Name and text of every file of the starter job."""

Source = Annotated[
    str | None,
    typer.Option("--from", metavar="FILE", help="Write the job for the rows of this file or URL."),
]

SAMPLED_ROWS = 200
"""Rows whose columns are looked at."""
ID_ROWS = 100_000
"""Rows in which a column has to differ to be the id."""

LONGEST_ID = 64
NEARLY_ALL = 0.75
"""The share of different values from which a column with repeated ones seems to be an id."""
SHOWN_COLUMNS = 20
"""Columns that the comment of the job names."""

_SIMPLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NOT_TEXT = {"null", "true", "false"}
_HIDDEN = {"row", "input", "responses", "n", "level", "loop", "board", "answer"}
"""Names that mean something else in a template."""

JOB_FOR_ROWS = """\
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

PROMPT_FOR_ROWS = """\
prompt:
  # Say here what you want to know.
  system: "Decide whether a text is relevant. Answer with JSON: a short reason, then the label."
  user: |
    {{{{ {expression} }}}}
"""

CONVERSATION = """\
prompt: {{messages_from: {column}}}      # the conversation that stands in this column
"""


def init(
    folder: Annotated[
        Path,
        typer.Argument(metavar="[DIR]", help="The folder to write to; the default is this one."),
    ] = Path(),
    source: Source = None,
) -> None:
    """Write a job to start from, also for your own file.

    Without --from it writes job.yaml, prompt.md, schema.json and rows.jsonl.

    With --from FILE it writes a job.yaml for the rows of that file: the id, a prompt with the
    longest text column, and a schema. Existing files are never overwritten.

    Example: bagent init genes

    Example: bagent init --from papers.csv
    """
    job = folder / "job.yaml"
    if source is None:
        write_starter(folder)
        sys.stderr.write(f"wrote {', '.join(FILES)} to {folder}\nnext: bagent run {job}\n")
        return
    text, columns = make_job(source, folder)
    write_starter(folder, {"job.yaml": text})
    id_text = "the content of a row" if columns.id is None else columns.id
    if columns.id is None and (default := {"id", "custom_id"} & set(columns.names)):
        id_text = max(default)
    if columns.not_id:
        log(visible(columns.not_id))
    if columns.id is None and id_text not in columns.names:
        log("no column names each row, so an edited row will count as a new one (id: COLUMN)")
    sys.stderr.write(
        f"wrote {job}: rows are named by {id_text}, the prompt shows {columns.text}\n"
        f"next: bagent run {job}, then put your server, prompt and labels into it\n"
    )


def write_starter(folder: Path, files: Mapping[str, str] = FILES) -> None:
    """Write the files of a starter job into ``folder``, which is made if missing.

    Raises:
        UsageError: one of the files is there already, or the folder cannot be written to.
    """
    there = [name for name in files if os.path.lexists(folder / name)]
    if there:
        raise UsageError(
            f"{folder / there[0]} is there already, nothing was written",
            hint="name another folder: bagent init DIR",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise UsageError(f"cannot write to {folder}: {reason}") from None


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """What a job needs of the columns of a file.

    Attributes:
        names: all columns, in the order of the first rows.
        id: the column that names a row; None: none does.
        text: the column that the prompt shows.
        conversation: whether ``text`` holds lists of messages.
        not_id: why the column that seems to be the id is none; empty where there is no such one.
    """

    names: tuple[str, ...]
    id: str | None
    text: str
    conversation: bool
    not_id: str = ""


def make_job(source: str, folder: Path) -> tuple[str, ColumnChoice]:
    """Return the text of ``folder/job.yaml`` for the rows of ``source``, and its columns.

    Raises:
        InputError: the file is missing, or of an unknown format.
        UsageError: no row of it can be read, or it is an OpenAI batch file, which needs no job.
    """
    from bagent.remote import is_remote

    rows = _first_rows(source)
    columns = inspect_columns([row.data for row in rows], source)
    columns = _with_id(columns, rows, source)
    path = source
    if not is_remote(source):
        path = os.path.relpath(Path(source).absolute(), folder.absolute())
    listed = ", ".join(map(_expression, columns.names[:SHOWN_COLUMNS]))
    more = len(columns.names) - SHOWN_COLUMNS
    if columns.conversation:
        prompt = CONVERSATION.format(column=_yaml(columns.text))
    else:
        prompt = PROMPT_FOR_ROWS.format(expression=_expression(columns.text))
    text = JOB_FOR_ROWS.format(
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
    from bagent.rows import is_batch_row

    rows = list(islice(_read(source), SAMPLED_ROWS))
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


def _read(source: str) -> Iterator[Row]:
    from bagent.rows import RowsConfig, open_rows

    reader = open_rows(RowsConfig(inputs=(source,), base=Path.cwd()))
    try:
        yield from chain.from_iterable(reader.batches())
    finally:
        reader.close()


def inspect_columns(rows: Sequence[dict[str, Any]], source: str) -> ColumnChoice:
    """Choose the id and the text among the columns of ``rows``.

    Raises:
        UsageError: no column holds a text.
    """
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        if all(_is_conversation(row.get(name)) for row in rows):
            return ColumnChoice(names, None, name, conversation=True)
    lengths = {name: sum(_length(row.get(name)) for row in rows) for name in names}
    longest = max(lengths, key=lambda name: lengths[name], default="")
    if not lengths.get(longest):
        raise UsageError(f"{source}: no column holds a text", hint="name a file with a text column")
    return ColumnChoice(names, None, longest, conversation=False)


@dataclass(slots=True)
class _IdCandidate:
    """A column of short values, most of them different."""

    name: str
    lines: dict[str | int, int] = field(default_factory=dict)
    """Each value and its first line."""
    fault: str = ""
    """Why the column names no rows."""

    def add(self, row: Row) -> None:
        """Look at one more row."""
        value = row.data.get(self.name)
        if self.fault:
            return
        if not _is_short(value):
            self.fault = f"no short value is on line {row.line}"
        elif value in self.lines:
            self.fault = f"{value} is on lines {self.lines[value]} and {row.line}"
        else:
            self.lines[value] = row.line


def _with_id(columns: ColumnChoice, sample: Sequence[Row], source: str) -> ColumnChoice:
    """Add the first column of short values that differ in all rows, and why another one is none.

    The id is None also for the default of jobs.
    """
    default = next((name for name in ("id", "custom_id") if name in columns.names), None)
    names = [name for name in columns.names if name != columns.text]
    candidates = [
        _IdCandidate(name)
        for name in ([default] if default else names)
        if _nearly_differs([row.data.get(name) for row in sample])
    ]
    for row in islice(_read(source), ID_ROWS) if candidates else ():
        for candidate in candidates if row.data else ():
            candidate.add(row)
    id_column = next((c.name for c in candidates if not c.fault and c.name != default), None)
    first = next((c for c in candidates if c.fault or c.name == id_column), None)
    not_id = f"{first.name} does not name every row: {first.fault}" if first and first.fault else ""
    return replace(columns, id=id_column, not_id=not_id)


def _nearly_differs(values: Sequence[Any]) -> bool:
    short = [value for value in values if _is_short(value)]
    return len(set(short)) >= NEARLY_ALL * len(values)


def _is_short(value: Any) -> TypeGuard[str | int]:
    text = str(value) if isinstance(value, str | int) else ""
    return 0 < len(text) < LONGEST_ID and not text.isspace()


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
