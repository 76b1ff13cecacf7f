"""The input fields that prompts use: those without a value, and the longest one of failed rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from bagent.job.templates.prompt import Prompt
from bagent.store.run_dir import RunDir, RunInfo
from bagent.types import Json, Row

LONG = 2000
"""Fewest characters of a field for it to be called long."""

MOST_LINES = 200
MOST_CHARACTERS = 8_000_000
"""Lines of failed rows that are read, and the characters of each."""

_TAG = re.compile(r"\{\{(.*?)\}\}|\{%(.*?)%\}", re.DOTALL)
_NAME = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*")


def names_in_prompts(job: Json, *, files: bool) -> frozenset[str] | None:
    """Return the names in all templates of a job, also those in prompt files.

    None where a prompt uses the whole row, none has a tag, or a file may not be read.

    Args:
        job: as ``run.json`` has it.
        files: files may be read; the job of another user may name any file.
    """
    try:
        texts = [part for text in _texts(job, files) for tag in _TAG.findall(text) for part in tag]
    except (OSError, UnicodeDecodeError):
        return None
    names = frozenset(name for text in texts for name in _NAME.findall(text))
    return None if not names or "row" in names else names


def _texts(value: Json, files: bool) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        if isinstance(value.get("file"), str):
            if not files:
                raise PermissionError(value["file"])
            yield Path(value["file"]).read_text(encoding="utf-8")
        for inner in value.values():
            yield from _texts(inner, files)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, files)


def long_field(run: RunDir, info: RunInfo) -> str:
    """Return the field of the prompt that is longest in the failed rows; empty if none is long."""
    names = names_in_prompts(info.job, files=run.is_own(info))
    lengths: dict[str, int] = {}
    try:
        with run.failed.open("rb") as lines:
            for line in islice(iter(lambda: lines.readline(MOST_CHARACTERS), b""), MOST_LINES):
                row = msgspec.json.decode(line, type=dict[str, Json])
                for name, value in row.items():
                    if isinstance(value, str):
                        lengths[name] = max(lengths.get(name, 0), len(value))
    except (OSError, msgspec.DecodeError):
        return ""
    used = [name for name in lengths if name.isidentifier() and (names is None or name in names)]
    longest = max(used, key=lambda name: lengths[name], default="")
    return longest if longest and lengths[longest] > LONG else ""


def required_columns(prompt: Prompt | None) -> list[str]:
    """Return the columns that a prompt always uses: no condition of its templates tests them."""
    if prompt is None or prompt.fields is None:
        return []
    return sorted(prompt.fields - prompt.tested)


EMPTY = (None, "")
"""The values of an empty cell."""


class EmptyCells:
    """Counts the rows to be sent that have no value in a column of the prompt.

    Args:
        prompt: the prompt of the job; None where stages have their own.
    """

    def __init__(self, prompt: Prompt | None) -> None:
        self._columns = required_columns(prompt)
        self.counts: Counter[str] = Counter()
        """The rows by the column in which they have no value."""

    def count(self, rows: Sequence[Row], pending: Sequence[Sequence[int]]) -> None:
        """Count those of ``rows`` that have ``pending`` answers."""
        for row, answers in zip(rows, pending, strict=True):
            if answers and row.error is None:
                for name in self._columns:
                    if row.data.get(name, "-") in EMPTY:
                        self.counts[name] += 1
