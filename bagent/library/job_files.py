"""The temporary file of a job that is a dict, and errors without it."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagent.errors import BagentError, Position, UsageError
from bagent.files import PRIVATE, write_atomic

NAME = "job"
"""What messages call the job."""


@dataclass(frozen=True)
class JobText:
    """A job that is a dict, as its file holds it."""

    path: Path
    text: str

    def hide_file(self, error: BagentError) -> None:
        """Name the job, and its key, in an error instead of a line of the file."""
        error.message = self._without_file(error.message)
        error.hint = self._without_file(error.hint)
        if error.at is not None and Path(str(error.at.file)).name == self.path.name:
            error.at = Position(self._name(error.at.line, error.message))

    def _name(self, line: int, message: str) -> str:
        """Return the name of the job with the key on a line, unless the message begins with it."""
        key = key_path(self.text, line)
        return NAME if not key or message.startswith(key) else f"{NAME}: {key}"

    def _without_file(self, message: str) -> str:
        def name(match: re.Match[str]) -> str:
            after = match.string[match.end() :].removeprefix(": ")
            return self._name(int(match["line"] or 0), after)

        names = "|".join(re.escape(str(path)) for path in (self.path.absolute(), self.path))
        return re.sub(rf"(?:{names})(?::(?P<line>\d+)(?::\d+)?)?", name, message)


@contextmanager
def job_text(job: Mapping[str, Any]) -> Iterator[JobText]:
    """Write the file of a job that is a dict into the current folder for the time of the block.

    Raises:
        UsageError: a job file cannot hold the dict, or the folder cannot be written.
    """
    try:
        text = json.dumps({"name": "job", **job}, indent=1, default=_as_json, ensure_ascii=False)
        text.encode()  # raises where UTF-8 cannot hold it
    except (TypeError, ValueError) as error:
        raise UsageError(f"the job cannot be written as a job file: {error}") from None
    # In this folder, since the paths of a job are relative to its file.
    path = Path(f".bagent-{secrets.token_hex(8)}.yaml")
    try:
        write_atomic(path, text, mode=PRIVATE)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"a job that is a dict needs a file in the current folder: {reason}",
            hint="write the job into a file, and give its path",
        ) from error
    try:
        yield JobText(path, text)
    finally:
        path.unlink(missing_ok=True)


def _as_json(value: Any) -> Any:
    """Return a path as its text, and a pydantic model as its JSON Schema.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")


_KEY = re.compile(r'"((?:[^"\\]|\\.)*)": ')


def key_path(text: str, line: int) -> str:
    """Return the dotted path of the key or item on a line, from 1, of JSON with ``indent=1``."""
    steps: list[str | int] = []
    for content in text.split("\n")[:line]:
        item = content.lstrip(" ")
        depth = len(content) - len(item)
        if item[:1] in ("}", "]"):
            del steps[depth:]
        elif depth:
            del steps[depth:]
            key = _KEY.match(item)
            before = steps.pop() if len(steps) == depth else -1
            steps.append(json.loads(f'"{key[1]}"') if key else int(before) + 1)
    return ".".join(map(str, steps))
