"""Commands of runs that the Python library started, as the calls that they stand for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

OPTION = "--python"
"""Marks the command of a run that the library started."""

_DROPPED = (OPTION, "-o", "-i", "--progress")
_TEMPORARY = re.compile(r"(?:.*/)?\.bagent-[0-9a-f]+\.yaml")
"""The file of a job that is a dict."""


def command_text(command: Sequence[str]) -> str:
    """Return a command to type, or the call to make where the library started the run."""
    return python_call(command) if OPTION in command else shlex.join(command)


def python_call(command: Sequence[str]) -> str:
    """Return what to do in Python for the command of a run that the library started."""
    arguments = list(command[2:])
    job = arguments.pop(0) if arguments else ""
    parts = ["job" if _TEMPORARY.fullmatch(job) else _quoted(job)]
    options: list[str] = []
    same = "the same job"
    while arguments:
        argument = arguments.pop(0)
        if argument in _DROPPED:
            value = arguments.pop(0) if arguments else ""
            if argument == OPTION and value.startswith("rows"):
                parts.append("rows=rows")
                same = "the same job and rows"
        elif argument == "--name" and arguments:
            parts.append(f"name={_quoted(arguments.pop(0))}")
        elif argument == "--ordered":
            parts.append("ordered=True")
        else:
            options.append(argument)
    if options:
        parts.append(f"options=[{', '.join(map(_quoted, options))}]")
    return f"call run({', '.join(parts)}) again in Python, with {same}"


def _quoted(text: str) -> str:
    quote = "'" if '"' in text and "'" not in text else '"'
    return repr(text) if quote in text or not text.isprintable() else f"{quote}{text}{quote}"
