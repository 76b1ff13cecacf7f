"""``bagent init``: a starter job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from bagent.cli.process import log
from bagent.errors import UsageError
from bagent.observe.formatting import visible

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
    from bagent.cli.job_from_rows import make_job

    text, columns = make_job(source, folder)
    write_starter(folder, {"job.yaml": text})
    id_text = "the content of a row" if columns.id is None else columns.id
    if columns.id is None and (default := {"id", "custom_id"} & set(columns.names)):
        id_text = max(default)
    if columns.repeated:
        log(f"repeated values: {visible(columns.repeated)}")
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
