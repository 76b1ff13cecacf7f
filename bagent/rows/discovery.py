"""The input: what to read, and its files, queries and pipes.

Sources are found and checked before any row is read.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape, glob, has_magic
from pathlib import Path
from typing import Any, Literal

from bagent.errors import InputError, Position
from bagent.remote import (
    InputFile,
    RemoteFile,
    check_url,
    find_remote_files,
    is_pattern,
    is_remote,
    open_remote,
    plain_url,
)
from bagent.rows.formats.compression import Packing, packing_of, unreadable
from bagent.rows.warnings import RowWarnings
from bagent.text.unicode import clean_text

Input = str | Mapping[str, str]
"""One entry of the input: an absolute path, a glob, ``-`` for stdin, ``{"files": GLOB}`` for rows
of ``path`` and ``text``, or ``{"sql": QUERY}`` for what DuckDB reads."""


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of a table that are read, in any case.

    Attributes:
        needed: where one of them is missing, all columns are read: messages name the others.
        optional: read where they are there.
    """

    needed: frozenset[str]
    optional: frozenset[str]

    def of(self, names: Sequence[str]) -> list[int]:
        """Return the indexes of the columns to read."""
        folded = [name.lower() for name in names]
        needed = {name.lower() for name in self.needed}
        if not needed <= set(folded):
            return list(range(len(names)))
        selected = needed | {name.lower() for name in self.optional}
        return [index for index, name in enumerate(folded) if name in selected]


@dataclass(frozen=True)
class RowsConfig:
    """Everything needed to read the same rows again, also in another process.

    Attributes:
        inputs: what to read, in this order.
        base: folder that relative paths (and those inside ``sql``) start from.
        id_field: field that names a row; None: ``id``, else ``custom_id``, where present.
        fields: input fields that the job uses; None for all of them. Kept sorted.
        where: a DuckDB SQL condition; rows that it does not hold for are left out.
        sample: deliver only this many rows, drawn evenly from all by ``seed``.
        seed: of ``sample``; the same seed and rows give the same sample.
        limit: deliver at most this many rows.
        shard: ``(i, n)``, i from 1 to n: deliver only the i-th of n disjoint parts.
        stdin_spool: file that keeps what came from stdin; None: it is not kept.
        replace_stdin: what is piped in is the whole input, called ``rows``, and replaces what an
            earlier start kept; else it is added to that.

    Raises:
        InputError: a number is out of its range, or an input has an unknown form.
    """

    inputs: tuple[Input, ...]
    base: Path
    id_field: str | None = None
    fields: tuple[str, ...] | None = None
    where: str | None = None
    sample: int | None = None
    seed: int = 0
    limit: int | None = None
    shard: tuple[int, int] | None = None
    stdin_spool: Path | None = None
    replace_stdin: bool = False

    def __post_init__(self) -> None:
        settle = object.__setattr__  # the way to settle a field of a frozen dataclass
        settle(self, "inputs", tuple(self.inputs))
        settle(self, "base", Path(self.base))
        if self.fields is not None:
            settle(self, "fields", tuple(sorted(set(self.fields))))
        if self.stdin_spool is not None:
            settle(self, "stdin_spool", Path(self.stdin_spool))
        if self.shard is not None:
            settle(self, "shard", tuple(self.shard))
        self._check()

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` takes."""
        values = {
            **vars(self),
            "inputs": [item if isinstance(item, str) else dict(item) for item in self.inputs],
            "base": str(self.base),
            "stdin_spool": None if self.stdin_spool is None else str(self.stdin_spool),
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> RowsConfig:
        """Read what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values)

    def _check(self) -> None:
        if not self.inputs:
            raise InputError("there is no input", hint="name one: input: rows.jsonl, or -i PATH")
        for item in self.inputs:
            if not isinstance(item, str) and (len(item) != 1 or not {"files", "sql"} & set(item)):
                raise InputError(
                    f"unknown form of input: {dict(item)}",
                    hint='a path, a glob, "-", {files: GLOB} or {sql: QUERY}',
                )
        if self.sample is not None and self.sample < 1:
            raise InputError(
                f"sample must be 1 or more, not {self.sample}", hint="write --sample 100"
            )
        if self.limit is not None and self.limit < 0:
            raise InputError(
                f"limit must not be negative, it is {self.limit}", hint="write --limit 100"
            )
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            part, parts = self.shard
            raise InputError(
                f"there is no shard {part} of {parts}", hint=f"shards count from 1 to {parts}"
            )


_ANY_DEPTH = "**"


def matches(pattern: str) -> list[Path]:
    """Return the sorted files that an absolute ``pattern`` matches; ``**`` is any depth.

    A file under several names, as links give it, comes once: under the name with the fewest
    folders. Hidden files and folders are matched only where the pattern names them. A folder that
    links lead back to is entered once, since every way around a circle would double the rest.
    """
    chosen: dict[str, Path] = {}
    for name in sorted(set(_expand_pattern(pattern))):
        path = Path(name)
        if path.is_dir():
            continue
        real = os.path.realpath(name)
        if real not in chosen or len(path.parts) < len(chosen[real].parts):
            chosen[real] = path
    return sorted(chosen.values(), key=str)


def _expand_pattern(pattern: str) -> Iterator[str]:
    parts = pattern.split("/")
    if _ANY_DEPTH not in parts:
        yield from glob(pattern)  # noqa: PTH207  (Path.glob matches hidden files too)
        return
    at = parts.index(_ANY_DEPTH)
    remainder = "/".join(parts[at + 1 :])
    for start in sorted(glob("/".join(parts[:at]) + "/")):  # noqa: PTH207
        for folder in _folders(start, set()):
            yield from _expand_pattern(escape(folder) + (remainder or "*"))


def _folders(folder: str, entered: set[str]) -> Iterator[str]:
    """Yield the folder and all below it, each once, with a ``/`` at its end."""
    real = os.path.realpath(folder)
    if real in entered:
        return
    entered.add(real)
    yield folder
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return  # as the shell does with a folder that may not be read
    for name in names:
        if not name.startswith("."):
            yield from _folders(f"{folder}{name}/", entered)


Format = Literal["jsonl", "json", "csv", "tsv", "parquet", "text"]

TWICE = "files that the input names twice are read once: {count}, first {example}"

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_KNOWN = ".jsonl .ndjson .json .csv .tsv .parquet, and .gz or .zst of the text ones"
_HINTS = {
    ".txt": "for one row a file: input: {files: PATTERN}; for JSON with one row a line: .jsonl",
    ".md": "for one row a file: input: {files: PATTERN}",
    ".xlsx": "save it as CSV in UTF-8",
    ".xls": "save it as CSV in UTF-8",
    ".bz2": "unpack it, or pack it as .gz or .zst",
    ".xz": "unpack it, or pack it as .gz or .zst",
    ".zip": "unpack it, or pack it as .gz or .zst",
    ".db": "input: {sql: \"from sqlite_scan('FILE', 'TABLE')\"}",
    ".duckdb": "input: {sql: \"from read_duckdb('FILE', table_name = 'TABLE')\"}",
}
_BRACES = "braces are no pattern here: write a list, input: [a.jsonl, b.jsonl]"
_URL = re.compile(r"[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
_STDIN_NAMES = ("-", "/dev/stdin", "/dev/fd/0")


@dataclass(frozen=True, slots=True)
class FileSource:
    """One file: ``name`` is its path for rows and people, ``size`` its bytes as stored."""

    path: InputFile
    name: str
    format: Format
    packing: Packing
    size: int


@dataclass(frozen=True, slots=True)
class SqlSource:
    """What one DuckDB query gives."""

    query: str
    name: str


@dataclass(frozen=True, slots=True)
class StdinSource:
    """What is piped in, and what was piped in before."""

    name: str = "stdin"


Source = FileSource | SqlSource | StdinSource


def find_sources(config: RowsConfig, warnings: RowWarnings) -> list[Source]:
    """Return the sources in their order; a glob stands for its files, sorted.

    Raises:
        InputError: something is missing, empty, a folder, unreadable or of unknown format.
    """
    sources: list[Source] = []
    seen: set[object] = set()
    for item in config.inputs:
        queries = sum(isinstance(source, SqlSource) for source in sources)
        for source in _expand(item, config.base, queries + 1):
            identity = _identity(source)
            if identity not in seen:
                seen.add(identity)
                sources.append(source)
            elif isinstance(source, FileSource):
                warnings.add(TWICE, source.name)
            else:
                raise InputError(f"the input names {source.name} twice", hint="name it once")
    return sources


def _identity(source: Source) -> object:
    """Return what is equal for two names of one thing; a link is another name of its file."""
    if isinstance(source, FileSource):
        path = source.path
        name = path.url if isinstance(path, RemoteFile) else os.path.realpath(path)
        return name, source.format == "text"
    return source


def _expand(item: str | Mapping[str, str], base: Path, number: int) -> list[Source]:
    if isinstance(item, str):
        if item in _STDIN_NAMES:
            return [StdinSource()]
        return [_file(path, base) for path in _paths(item, base)]
    if "sql" in item:
        return [SqlSource(item["sql"], "sql" if number == 1 else f"sql {number}")]
    return [_text(path, base) for path in _paths(item["files"], base)]


def _paths(pattern: str, base: Path) -> Sequence[InputFile]:
    """Return the file of that name, else the files that the pattern matches, sorted."""
    if is_remote(pattern):
        return _remote_files(pattern)
    path = base / pattern
    if path.exists() or not has_magic(pattern):
        if path.is_dir():
            raise InputError(
                f"{pattern} is a folder", hint=f"name its files: {pattern.rstrip('/')}/*.jsonl"
            )
        return [path]
    files = matches(str(path))
    if not files:
        hint = _BRACES if "{" in pattern else f"looked from {base}"
        raise InputError(f"no file matches {pattern}", hint=hint)
    return files


def _remote_files(url: str) -> list[RemoteFile]:
    problem = check_url(url)
    if problem:
        raise InputError(problem, at=Position(plain_url(url)))
    try:
        files = find_remote_files(url) if is_pattern(url) else [open_remote(url)]
    except OSError as error:
        raise unreadable(plain_url(url), error) from error
    if not files:
        raise InputError(f"no file matches {url}", hint=_BRACES if "{" in url else "")
    return files


def _file(path: InputFile, base: Path) -> FileSource:
    name = _name(path, base)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    size = _size(path)
    packing = packing_of(path)
    kind = "".join(suffixes[-2:-1]) if packing else "".join(suffixes[-1:])
    if kind not in _FORMATS or (packing and kind == ".parquet"):
        raise InputError(
            f"{name} has no known format",
            hint=_HINTS.get(kind, f"known are {_KNOWN}"),
            at=Position(path),
        )
    return FileSource(path, name, _FORMATS[kind], packing, size)


def _text(path: InputFile, base: Path) -> FileSource:
    return FileSource(path, _name(path, base), "text", packing_of(path), _size(path))


def _size(path: InputFile) -> int:
    """Return bytes of a readable regular file."""
    if isinstance(path, RemoteFile):
        return path.stat.size
    try:
        status = path.stat()
    except FileNotFoundError as error:
        if path.is_symlink():
            message = f"this is a link to {clean_text(str(path.readlink()))}, which is not there"
            raise InputError(message, at=Position(path)) from error
        raise InputError(
            "there is no such file", hint=_nearest_hint(path), at=Position(path)
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            "this is a pipe or a device, which cannot be read a second time",
            hint="pipe it in: ... | bagent run JOB.yaml -i -",
            at=Position(path),
        )
    if not os.access(path, os.R_OK):
        raise InputError(
            "cannot be read: permission denied",
            at=Position(path),
            hint="allow it with chmod, or name another file",
        )
    return status.st_size


_RELATIVE = "paths in a job are relative to the job file"


def _nearest_hint(path: Path) -> str:
    """Return a hint with the nearest name in the folder, if any is near."""
    if any(_URL.match(part + "/") for part in path.parts):
        return (
            "only s3, gs, az, hf, http and https are read by URL: copy it here, or let DuckDB read"
            " it with input: {sql: ...}"
        )
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"there is no folder {path.parent}; {_RELATIVE}"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {near[0]}?" if near else _RELATIVE


def _name(path: InputFile, base: Path) -> str:
    """Return the path from the base folder on, or whole where it is not below it; valid UTF-8."""
    if isinstance(path, RemoteFile):
        return clean_text(str(path))
    relative = path.relative_to(base) if path.is_relative_to(base) else path
    return clean_text(str(relative))
