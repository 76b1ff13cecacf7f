"""Paths in a job: absolute, with the text that the user wrote."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bagent.job.spec.types import TEXT, IntegerKind, Kind, NumberKind, as_number, invalid
from bagent.job.validation import LoadContext
from bagent.job.yaml.scalars import SourceText
from bagent.remote import (
    bucket_folder,
    check_url,
    in_bucket,
    is_pattern,
    is_remote,
    publish_problem,
)
from bagent.text.suggest import describe_value
from bagent.types import Json

STDIN = "-"
_STDIN_NAMES = (STDIN, "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """One path: ``path`` is absolute, ``text`` is how the user wrote it.

    It can be opened as it is, and its text is what the user wrote.
    """

    path: Path
    text: str

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class InputPath:
    """One input: an absolute path, a glob where ``is_glob``, a URL, or ``-`` for stdin."""

    path: str
    text: str
    is_glob: bool = False

    @property
    def local(self) -> Path | None:
        """The file on this machine, ``-`` for stdin; None for a glob and a URL."""
        return None if self.is_glob or is_remote(self.path) else Path(self.path)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class PythonFunction:
    """``function`` in the file ``file``."""

    file: ResolvedPath
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


@dataclass(frozen=True, slots=True)
class AllowFailures:
    """How many rows may fail: a ``count``, or a ``percent`` of all rows; the other is None."""

    count: int | None = 0
    percent: float | None = None

    def allows(self, failed: int, rows: int) -> bool:
        """True if ``failed`` of ``rows`` rows are within the limit."""
        if self.percent is not None:
            return failed * 100.0 <= self.percent * rows
        return failed <= (self.count or 0)

    def __str__(self) -> str:
        return str(self.count) if self.percent is None else f"{self.percent:g}%"


def display_path(path: Path, cwd: Path) -> str:
    """Return ``path`` as it can be opened from ``cwd``: relative where it lies below."""
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def resolve_path(value: Any, context: LoadContext | None, *, base: str = "file") -> ResolvedPath:
    """Return the path written in ``value``.

    Relative ones start at the job's folder, those of options at the current folder, and with
    ``base="cwd"`` all at the current folder.

    Raises:
        PydanticCustomError: not a usable path.
    """
    text = value.text if isinstance(value, ResolvedPath) else getattr(value, "source", value)
    if not isinstance(text, str):
        raise invalid(f"expected a path, got {describe_value(value)}")
    if not text.strip():
        raise invalid("expected a path, got an empty text")
    if "\0" in text:
        raise invalid("a path may not hold a NUL character")
    if context is None:
        return ResolvedPath(Path(text), str(text))
    from_command = base == "cwd" or (isinstance(value, SourceText) and value.from_command)
    return ResolvedPath(context.absolute(str(text), from_command=from_command), str(text))


@dataclass(frozen=True)
class PathKind(Kind):
    """One path; ``base`` is ``file`` (the job's folder) or ``cwd`` (the current folder)."""

    base: Literal["file", "cwd"] = "file"

    def read(self, value: Any, context: LoadContext | None) -> ResolvedPath:
        """Return the path, absolute and as given."""
        return resolve_path(value, context, base=self.base)

    def dump(self, value: Any) -> Json:
        """Return the absolute path."""
        return str(value.path)

    def describe(self) -> Json:
        """Text."""
        return TEXT


@dataclass(frozen=True)
class InputPathsKind(Kind):
    """A path, a glob, a URL, ``-``, or a list of these.

    ``rows``: they are rows, which may also come from stdin or be remote files.
    """

    rows: bool = True
    stdin: bool = True

    def read(self, value: Any, context: LoadContext | None) -> tuple[InputPath, ...]:
        """Return the paths; what is a pattern keeps its marks, the folders before it do not."""
        items = value if isinstance(value, (list, tuple)) else [value]
        if not items:
            raise invalid("expected at least one path, got an empty list")
        return tuple(self._input_path(item, context) for item in items)

    def _input_path(self, value: Any, context: LoadContext | None) -> InputPath:
        if value in _STDIN_NAMES and self.stdin and self.rows:
            return InputPath(STDIN, STDIN)
        if isinstance(value, str) and is_remote(value):
            problem = check_url(value) if self.rows else "only files of this machine are read here"
            if problem:
                raise invalid(problem)
            return InputPath(str(value), str(value), is_pattern(value))
        location = resolve_path(value, context)
        text = str(value) if isinstance(value, str) else location.text
        if not glob.has_magic(text) or location.path.exists():
            return InputPath(str(location.path), text)
        # Only what the user wrote is a pattern; the folders put before it are not.
        full = str(location.path)
        tail = text[2:] if text.startswith("~/") else text
        folder = full[: len(full) - len(tail)] if full.endswith(tail) else ""
        return InputPath(glob.escape(folder) + full[len(folder) :], text, is_glob=True)

    def dump(self, value: Any) -> Json:
        """Return the absolute paths and patterns; None where there is none."""
        return [item.path for item in value] or None

    def describe(self) -> Json:
        """One text, or a list of texts."""
        return {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}]}


@dataclass(frozen=True)
class BucketFoldersKind(Kind):
    """A list of folders in buckets by their URLs, or one of them."""

    def read(self, value: Any, context: LoadContext | None) -> tuple[str, ...]:
        """Return the URLs, each with a slash at its end."""
        return tuple(map(self._folder, value if isinstance(value, list | tuple) else [value]))

    def _folder(self, value: Any) -> str:
        if not isinstance(value, str) or not in_bucket(value):
            raise invalid(
                f"expected a folder of a bucket, got {describe_value(value)}",
                "write s3://BUCKET/FOLDER/, gs://, az:// or hf://",
            )
        problem = "name a folder, no pattern" if is_pattern(value) else check_url(value)
        if problem:
            raise invalid(problem)
        return bucket_folder(f"{value.rstrip('/')}/")

    def dump(self, value: Any) -> Json:
        """Return the list."""
        return list(value)

    def describe(self) -> Json:
        """One text, or a list of texts."""
        return {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}


@dataclass(frozen=True)
class PublishTargetKind(Kind):
    """The URL of a folder in a bucket, or a path relative to the current folder."""

    def read(self, value: Any, context: LoadContext | None) -> str | None:
        """Return the URL, or the absolute path."""
        if isinstance(value, str) and "://" in value:
            problem = publish_problem(value)
            if problem:
                raise invalid(problem)
            return str(value).rstrip("/")
        return str(resolve_path(value, context, base="cwd").path)

    def dump(self, value: Any) -> Json:
        """Return the same text."""
        return None if value is None else str(value)

    def describe(self) -> Json:
        """Text."""
        return TEXT


@dataclass(frozen=True)
class PythonFunctionKind(Kind):
    """``file.py:function``."""

    def read(self, value: Any, context: LoadContext | None) -> PythonFunction:
        """Return the file and the name of the function in it."""
        text = value if isinstance(value, str) else ""
        file, colon, function = text.rpartition(":")
        if not colon or not file or not function.isidentifier():
            raise invalid(f"expected file.py:function, got {describe_value(value)}")
        from_command = isinstance(value, SourceText) and value.from_command
        return PythonFunction(
            resolve_path(SourceText.of(file, from_command=from_command), context), function
        )

    def dump(self, value: Any) -> Json:
        """Return the same text with the absolute path."""
        return f"{value.file.path}:{value.function}"

    def describe(self) -> Json:
        """Return text of that form."""
        return {"type": "string", "pattern": r"^.+:\w+$"}


@dataclass(frozen=True)
class AllowFailuresKind(Kind):
    """``N`` rows or ``P%`` of the rows."""

    def read(self, value: Any, context: LoadContext | None) -> AllowFailures:
        """Return the count, or the share in percent."""
        if isinstance(value, str) and value.strip().endswith("%"):
            text = value.strip().removesuffix("%").strip()
            number = as_number(SourceText.of(text, from_variable=True))
            if number is None:
                raise invalid(
                    f"expected a number of rows or a share like 5%, got {describe_value(value)}"
                )
            share = NumberKind(0, 100).read(number, context)
            return AllowFailures(None, float(share or 0))
        if isinstance(value, str) and as_number(value) is None:
            raise invalid(
                f"expected a number of rows or a share like 5%, got {describe_value(value)}"
            )
        count = IntegerKind(0).read(value, context)
        return AllowFailures(int(count or 0))

    def dump(self, value: Any) -> Json:
        """Return the count, or the share as text."""
        return value.count if value.percent is None else str(value)

    def describe(self) -> Json:
        """Return a whole number, or a text that ends in ``%``."""
        text = {"type": "string", "pattern": r"^\s*[0-9.]+\s*%\s*$|\$\{"}
        return {"anyOf": [{"type": "integer", "minimum": 0}, text]}
