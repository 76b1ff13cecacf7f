"""``bagent schema``: the JSON Schema of job files, and the reference."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bagent.errors import UsageError


def schema(
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write to this file instead of standard output."
        ),
    ] = None,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Print every option, key, column and code as Markdown."),
    ] = False,
) -> None:
    """Print the JSON Schema of job files, for editors.

    An editor with a YAML language server then completes keys, explains them and marks mistakes.
    Put this line first in the job file: # yaml-language-server: $schema=PATH

    Example: bagent schema -o job.schema.json
    """
    from bagent.job.spec.json_schema import job_schema_text

    if reference:
        from bagent.cli.render.reference import reference_text

        text = reference_text()
    else:
        text = job_schema_text()
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise UsageError(f"cannot write {output}: {reason}") from None
