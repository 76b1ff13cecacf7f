"""The files that belong to a job, read once at load, and hashes of what changes its answers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagent.errors import JobError
from bagent.job.spec.job import Job
from bagent.job.spec.output import OutputSpec
from bagent.job.spec.paths import InputPath, PythonFunction, ResolvedPath, display_path
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


PARTS = (
    "prompt",
    "schema",
    "sampling",
    "answers",
    "agent",
    "tools",
    "stages",
    "topology",
    "output",
    "id",
)
"""The names of the parts. The model is not among them: only servers know what ``auto`` is."""

# Where and how fast a part runs, not what it answers; and what may hold secrets.
_PLACES = frozenset({"backend", "hostfile", "select", "limits", "batching", "image_folders"})
_WAYS = frozenset({"timeout", "rate_limit", "cache", "coalesce", "env", "headers", "api_key_env"})

# How an answer is processed.
_JUDGEMENT = frozenset({"truncated"})


def fingerprint_parts(job: Job) -> dict[str, str]:
    """SHA-256 (64 hex digits) of every part of ``job`` that changes answers, by part name.

    Files count by content, not by path; a schema file by its values, not by its spacing, and
    with the files that it refers to. A default written out is the same as one left out. Backend,
    hostfile, limits, batching, results and input are in no part. The field that names the rows is
    one: under other names all rows would be sent again.
    """
    texts = job.source.texts
    agent = _values(job.agent, texts, _WAYS)
    tools = agent.pop("tools", [])
    output = _values(job.output, texts, _JUDGEMENT)
    leave_out = _PLACES | _WAYS | _JUDGEMENT
    stages = [_values(stage, texts, leave_out) for stage in job.stages]
    values: dict[str, Json] = {
        "prompt": _values(job.prompt, texts, _PLACES),
        "schema": output.pop("schema", None),
        "sampling": _values(job.sampling, texts),
        "answers": job.answers,
        "agent": agent,
        "tools": tools,
        "stages": stages,
        "topology": _values(job.topology, texts, leave_out),
        "output": output,
        "id": None if job.id == "id" else job.id,  # the default of rows with that field
    }
    return {part: _sha256(values[part]) for part in PARTS}


def _values(
    section: Section | None, texts: Mapping[Path, str], leave_out: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Only what differs from the defaults, so that a new key with a default changes nothing.

    The contents of files replace their paths.
    """
    result: dict[str, Any] = {}
    for name, info in type(section).model_fields.items() if section else ():
        key, value = info.alias or name, getattr(section, name)
        if key in leave_out or value == info.get_default(call_default_factory=True):
            continue
        if key == "file" and isinstance(value, ResolvedPath):
            result["text"] = texts.get(value.path, "")
        elif key == "schema" and isinstance(value, ResolvedPath):
            result[key] = _schema(value.path, texts)
        else:
            result[key] = _value(value, texts, leave_out)
    return result


def _value(value: Any, texts: Mapping[Path, str], leave_out: frozenset[str]) -> Any:
    if isinstance(value, Section):
        return _values(value, texts, leave_out)
    if isinstance(value, tuple):
        return [_value(item, texts, leave_out) for item in value]
    if isinstance(value, PythonFunction):
        return [value.function, texts.get(value.file.path, "")]
    return value.text if isinstance(value, ResolvedPath | InputPath) else value


def _schema(path: Path, texts: Mapping[Path, str]) -> Json:
    schema = _parsed(texts.get(path, ""))
    others = reference_closure(path, texts) if path in texts else []
    if not others:
        return schema
    return [schema, *([other.name, _parsed(texts[other])] for other in others)]


def _parsed(text: str) -> Json:
    try:
        return decode_json(text)
    except ValueError:
        return text


def _sha256(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
