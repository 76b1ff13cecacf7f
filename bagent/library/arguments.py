"""Arguments of the library: their checks, jobs that are dicts, and errors in its terms.

A job that is a dict becomes a temporary file; errors do not name it, and name arguments for
options, with short tracebacks.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bagent.errors import BagentError, Position, UsageError
from bagent.files import PRIVATE, write_atomic


class ShortTraceback(ContextDecorator):
    """Leaves the frames of this package out of the traceback of a :class:`BagentError`.

    The message says what is wrong; in a notebook the frames would fill the screen above it. Other
    exceptions keep theirs.

    Args:
        debug: change nothing.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self._debug = debug

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Shorten the traceback of an error that ends the block."""
        if isinstance(error, BagentError) and not self._debug:
            error.__traceback__ = error.__cause__ = None
            error.__suppress_context__ = True


Rows = Iterable[Any] | AsyncIterable[Any]
"""Input rows as mappings of a name to a value, or a pandas, polars or Arrow table."""


def check_options(options: Any) -> list[str]:
    """Return options of ``bagent run`` as texts; numbers and paths may be among them.

    Raises:
        UsageError: they are one text, or one of them is an option with its value.
    """
    if isinstance(options, str) or not isinstance(options, Sequence):
        hint = _list_of(options) if isinstance(options, str) else 'options=["--limit", "100"]'
        raise UsageError("options is a list of texts", hint=hint)
    texts = [
        os.fspath(option) if isinstance(option, os.PathLike) else str(option) for option in options
    ]
    for text in texts:
        if re.match(r"-[^\s=]*\s", text):
            raise UsageError(
                f"options: {text!r} is an option and its value in one text", hint=_list_of(text)
            )
    return texts


def check_progress(on_progress: Any) -> None:
    """Refuse what is no function for the progress.

    Raises:
        UsageError: it is neither a function, nor None, nor ``"show"``.
    """
    if on_progress is not None and on_progress != "show" and not callable(on_progress):
        raise UsageError(
            f"on_progress: {on_progress!r} is no function", hint='on_progress="show", or a function'
        )


def _list_of(text: str) -> str:
    try:
        texts = shlex.split(text)
    except ValueError:
        texts = text.split()
    return f"options=[{', '.join(map(_quoted, texts))}]"


def _quoted(text: str) -> str:
    return repr(text) if '"' in text or "\\" in text else f'"{text}"'


def use_python_words(error: BagentError) -> None:
    """Write options of ``bagent run`` in a message as the arguments of the library."""
    if error.at is not None and str(error.at).startswith("-"):
        error.message, error.at = f"{error.at}: {error.message}", None
    error.message = in_python(error.message)
    error.hint = in_python(error.hint)


def in_python(text: str) -> str:
    """Return a message with ``options=["--limit", "5"]`` instead of ``--limit 5``."""
    for phrase, in_library in _PHRASES.items():
        text = text.replace(phrase, in_library)
    return _option_pattern().sub(_argument, text)


_PHRASES = {
    "give -i PATH": "give rows=...",
    "the same command": "the same call",
    "--name: ": "name: ",
    "--set id=COLUMN": "set `id: COLUMN` in the job",
}


def _argument(match: re.Match[str]) -> str:
    option, value = match["option"], match["value"]
    if option == "--ordered":
        return "ordered=True"
    if option == "--name":
        return f"name={_quoted(value)}" if value else "name="
    return f"options=[{', '.join(map(_quoted, filter(None, (option, value))))}]"


_VALUE = r"[A-Z][A-Z_]*\b|\d[\w.%]*|\w[\w.]*=[^\s,;)]+|(?:continue|fresh|refuse|all|none)\b"
"""A placeholder, a number, a setting or a choice; other words go on with the sentence."""


@cache
def _option_pattern() -> re.Pattern[str]:
    """Return a pattern of the options of ``bagent run``, with a value where one follows."""
    from bagent.cli.app import load_command

    names = [name for param in load_command("run").params for name in param.opts]
    listed = "|".join(re.escape(name) for name in names if name.startswith("--"))
    value = rf"(?: (?P<value>{_VALUE}|(?<=--model )[^\s,;)]+))?"
    return re.compile(rf"(?<![\w\"-])'?(?P<option>{listed})'?(?![\w-]){value}")


JOB_NAME = "job"
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
        return JOB_NAME if not key or message.startswith(key) else f"{JOB_NAME}: {key}"

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
