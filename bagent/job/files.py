"""The files that belong to a job: prompts, schemas, Python tools, read once at load."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bagent.errors import JobError
from bagent.job.spec.job import Job
from bagent.job.spec.output import OutputSpec
from bagent.job.spec.paths import ResolvedPath, display_path
from bagent.job.spec.types import Section
from bagent.job.validation import LoadContext
from bagent.job.yaml.parser import YamlSpot, decode, find
from bagent.text.json import decode_json
from bagent.types import Json

MAX_BYTES = 64 * 1024 * 1024
"""A larger prompt or schema file is an error."""

_MOST_REFERENCES = 1000

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file named at the key ``path``; ``kind`` is ``text`` or ``schema``."""

    path: KeyPath
    file: ResolvedPath
    kind: str = "text"


def named_files(job: Job) -> Iterator[NamedFile]:
    """Yield every prompt, schema and Python tool file that the job and its stages name."""
    yield from _walk(job, ())


def read_files(job: Job, data: Json, root: YamlSpot, context: LoadContext) -> dict[Path, str]:
    """Return the texts of all named files by absolute path; schemas with the files they refer to.

    A missing, unreadable or non-UTF-8 file is a fault at the key that names it.
    """
    texts: dict[Path, str] = {}
    for item in named_files(job):
        if item.file.path in texts:
            continue
        try:
            texts[item.file.path] = read_text(item.file, context.cwd)
        except JobError as error:
            at = error.at or find(data, item.path, root)[0].value_at
            context.problems.add(at, error.message, error.hint)
    for item in [file for file in named_files(job) if file.kind == "schema"]:
        if item.file.path in texts:
            _add_references(item.file.path, texts, context.cwd)
    return texts


def read_text(location: ResolvedPath, cwd: Path) -> str:
    """Return the text of a file with LF line ends; ``cwd`` is where positions in it are seen from.

    Raises:
        JobError: it is missing, unreadable, too large, or not UTF-8.
    """
    try:
        with location.path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise JobError(
            f"no such file: {location}", hint=f"it was looked for at {location.path}"
        ) from None
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise JobError(f"cannot read {location}: {reason}") from None
    if len(content) > MAX_BYTES:
        raise JobError(
            f"{location} is larger than 64 MB", hint="give rows as input:, not as a file of the job"
        )
    return decode(content, display_path(location.path, cwd)).replace("\r\n", "\n")


def _walk(value: object, path: KeyPath) -> Iterator[NamedFile]:
    if isinstance(value, OutputSpec) and isinstance(value.schema_, ResolvedPath):
        yield NamedFile((*path, "schema"), value.schema_, "schema")
    if isinstance(value, Section):
        for name, field in type(value).model_fields.items():
            key = field.alias or name
            item = getattr(value, name)
            if key == "file" and isinstance(item, ResolvedPath):
                yield NamedFile((*path, key), item)
            elif key == "python" and item is not None:
                yield NamedFile((*path, key), item.file)
            else:
                yield from _walk(item, (*path, key))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


def reference_closure(schema: Path, texts: Mapping[Path, str]) -> list[Path]:
    """Return the files of ``texts`` that ``schema`` refers to by ``$ref``, at any depth."""
    seen = [schema]
    for path in seen:
        for target in _references(path, texts[path]):
            if target in texts and target not in seen:
                seen.append(target)
    return seen[1:]


def _add_references(schema: Path, texts: dict[Path, str], cwd: Path) -> None:
    """Add the files that ``$ref`` in ``schema`` names, however deep; missing ones are left out."""
    todo = [schema]
    while todo and len(texts) < _MOST_REFERENCES:
        path = todo.pop()
        for target in _references(path, texts[path]):
            if target in texts or not target.is_file():
                continue
            try:
                texts[target] = read_text(ResolvedPath(target, str(target)), cwd)
            except JobError:
                continue
            todo.append(target)


def _references(path: Path, text: str) -> list[Path]:
    try:
        schema = decode_json(text)
    except ValueError:
        return []
    files: list[Path] = []
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                file = reference.partition("#")[0]
                if file and "://" not in file and not file.startswith("file:"):
                    files.append(Path(os.path.normpath(path.parent / file)))
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)
    return files
