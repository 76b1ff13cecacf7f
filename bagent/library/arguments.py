"""Arguments of the library: their checks, options in messages, and short tracebacks."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import AsyncIterable, Iterable, Sequence
from contextlib import ContextDecorator
from functools import cache
from typing import Any

from bagent.errors import BagentError, UsageError


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
