"""Loading of a job file, or of an OpenAI batch file, with options into an immutable job."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bagent.errors import InputError, JobError, Position
from bagent.job import overrides
from bagent.job.env_substitution import Substitution
from bagent.job.files import read_files
from bagent.job.spec.backend import ENGINES
from bagent.job.spec.job import Job, JobSource
from bagent.job.validation import LoadContext, note_faults
from bagent.job.yaml.parser import YamlFile, YamlMap, YamlSpot, at_option, decode, read_yaml
from bagent.job.yaml.scalars import SourceText
from bagent.rows.formats.compression import ByteStream, packing_of
from bagent.rows.formats.json import split_lines
from bagent.text.json import decode_json
from bagent.text.suggest import describe_value, nearest_name
from bagent.types import Json

MAX_BYTES = 16 * 1024 * 1024
"""A larger job file is taken for something else, most likely the input."""

MOST_NEAR = 1000
"""Files among which a job is looked for whose path is wrong."""


@dataclass(frozen=True)
class JobRequest:
    """A request to load a job, with its options and environment.

    Args:
        path: the job file as the user named it; None for a job that is only ``text`` or options.
        text: the job's text instead of the file's content.
        sets: ``dotted.key=value`` texts of ``--set``, applied in order.
        options: values of named options by dotted key, such as ``{"hostfile": "h.txt"}``;
            they win over the file and over ``sets``, None means not given.
        env: the environment, for ``${VAR}``, ``~`` and ``BAGENT_HOSTFILE``.
        cwd: the current folder, absolute.
        needs_input: whether a job without input is an error.
    """

    path: Path | None = None
    text: str | None = None
    sets: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = field(default_factory=Path.cwd)
    needs_input: bool = True


def load_job(request: JobRequest) -> Job:
    """Read and check a whole job; no request is sent and the input is not opened.

    Prompt, schema and Python tool files are read here, so that the job cannot change while it
    runs.

    Raises:
        JobError: the first fault in file order, with file, line and column.
    """
    file = read_yaml(_text(request), request.path or "job")
    if file.data is None and request.text is None:
        raise JobError(
            "the job file is empty", hint="bagent init writes a starter job", at=file.spot.value_at
        )
    data = YamlMap() if file.data is None else file.data
    if not isinstance(data, YamlMap):
        raise JobError(
            f"expected KEY: VALUE lines, got {describe_value(data)}",
            at=Position(file.spot.file, 1, 1),
            hint="write keys such as input: rows.jsonl",
        )
    return _load(request, replace(file, data=data))


def job_for_batch_file(request: JobRequest) -> Job:
    """Make the job for the OpenAI batch file ``request.path`` (``-`` is stdin).

    The lines hold prompts and sampling themselves; options and ``sets`` work as in
    :func:`load_job`.

    Raises:
        JobError: as :func:`load_job`.
    """
    if request.path is None:
        raise JobError("no batch file is named", hint="bagent run batch.jsonl")
    data = YamlMap()
    option = str(request.path)
    value, spot = at_option(SourceText.of(str(request.path), from_command=True), option)
    data.put("input", value, spot)
    if option == "-":
        data.put("name", "stdin", spot)
    return _load(request, YamlFile(data, "", YamlSpot(option)))


def _text(request: JobRequest) -> str:
    if request.text is not None:
        return request.text
    if request.path is None:
        return ""
    try:
        with (request.cwd / request.path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _cannot_read(request.path, request.cwd, error) from None
    if len(content) > MAX_BYTES:
        raise JobError(
            "the job file is larger than 16 MB",
            hint="is it the input? write input: in a job file",
            at=Position(request.path),
        )
    return decode(content, request.path)


def _near_job(path: Path, cwd: Path) -> Path | None:
    """Return a file that the path was probably meant to name, here or one folder below."""
    folder = (cwd / path).parent
    patterns = ("*.y*ml", "*.json*", "*/*.y*ml", "*/*.json*")
    with suppress(OSError):
        files = islice(chain.from_iterable(map(folder.glob, patterns)), MOST_NEAR)
        names = [file.relative_to(folder) for file in files]
        same = [name for name in names if name.name == path.name]
        beside = [name.name for name in names if len(name.parts) == 1]
        near = same[0] if same else nearest_name(path.name, beside)
        return path.parent / near if near else None
    return None


def _cannot_read(path: Path, cwd: Path, error: OSError) -> JobError:
    at = Position(path)
    if error.errno == errno.ENOENT:
        if str(path) == "-":
            hint = "rows are piped in with -i -; the job is a file"
            return JobError("a job cannot be piped in", hint=hint)
        is_batch = unpacked_suffix(path) in BATCH_SUFFIXES
        near = _near_job(path, cwd)
        hint = "check the path" if is_batch else "bagent init writes a starter job"
        hint = f"did you mean {near}?" if near else hint
        return JobError(f"no such {'batch' if is_batch else 'job'} file", hint=hint, at=at)
    if error.errno == errno.EISDIR:
        return JobError("this is a folder", hint="name the job file in it", at=at)
    reason = os.strerror(error.errno) if error.errno else str(error)
    return JobError(f"cannot read the job file: {reason.lower()}", at=at)


def _load(request: JobRequest, file: YamlFile) -> Job:
    cwd = request.cwd
    folder = (cwd / request.path).parent if request.path else cwd
    context = LoadContext(folder=folder, cwd=cwd, env=request.env)
    substitution = Substitution(context, file.text)
    data: YamlMap = substitution.apply(file.data, file.spot)
    for option in request.sets:
        _apply_set(data, option, substitution)
    # What a missing variable would be is not known, so no further check is possible.
    context.problems.raise_first()
    for key, value in request.options.items():
        if value is not None:
            overrides.put(data, key, value, overrides.option_name(key))
    _settle_endpoints(data, request)
    _name(data, request)
    job = _validated(data, file.spot, context)
    texts = read_files(job, data, file.spot, context) if job else {}
    if job and not context.problems.items:
        _check_needed(job, request, data, context)
    context.problems.raise_first()
    if job is None:
        raise JobError(
            "the job is not usable",
            at=Position(file.spot.file),
            hint="bagent guide jobs explains job files",
        )
    return job.with_source(
        JobSource(
            file=request.path,
            folder=folder,
            cwd=cwd,
            text=file.text,
            data=data,
            root=file.spot,
            texts=texts,
            variables=tuple(substitution.uses),
            # A batch renders a row again when its answer comes: it reads no image a second time.
            input_folders=job.input.folders if job.input and not job.batching.in_batches else (),
        )
    )


def _apply_set(data: YamlMap, option: str, substitution: Substitution) -> None:
    key, value = overrides.split_set(option)
    name = f"--set {key}"
    marked, spot = at_option(value, name)
    if isinstance(marked, str) and not option.partition("=")[2].startswith(('"', "'")):
        spot = replace(spot, style="plain")
    path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    overrides.put(data, key, substitution.apply(marked, spot, path), name)


def _validated(data: YamlMap, root: YamlSpot, context: LoadContext) -> Job | None:
    try:
        return Job.model_validate(data, context=context)
    except ValidationError as error:
        note_faults(error, data, root, context.problems)
        return None


def _name(data: YamlMap, request: JobRequest) -> None:
    """Without a name the run is named after the file."""
    if data.get("name") is not None or request.path is None:
        return
    letters = [
        letter if letter.isprintable() and letter not in "/\\" else "-"
        for letter in _stem(request.path)
    ]
    name = "".join(letters).strip().lstrip(".-")
    if name:
        data.put("name", name, YamlSpot(str(request.path)))


def _stem(path: Path) -> str:
    name = path.name
    for suffix in (".gz", ".zst", ".yaml", ".yml", ".jsonl", ".json"):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
    return name


def _settle_endpoints(data: YamlMap, request: JobRequest) -> None:
    """One source of endpoints: an option beats the file, a hostfile an engine's bare name.

    ``--backend`` puts the file's hostfile aside; ``--hostfile`` keeps of the file's backend all
    but its address. ``BAGENT_HOSTFILE``, else the address ``BAGENT_PROXY_URL``, counts only where
    nothing else names one.
    """
    hostfile, backend = data.get("hostfile"), data.get("backend")
    if hostfile is None:
        preset = request.env.get("BAGENT_HOSTFILE", "").strip()
        if preset and _needs_hostfile(backend):
            value = SourceText.of(preset, from_command=True)
            data.put("hostfile", value, YamlSpot("BAGENT_HOSTFILE"))
        front = request.env.get("BAGENT_PROXY_URL", "").strip()
        if front and not preset and backend is None:
            data.put(
                "backend", SourceText.of(front, from_command=True), YamlSpot("BAGENT_PROXY_URL")
            )
        return
    if backend is None or _needs_hostfile(backend):
        return
    host_option = data.spots["hostfile"].line == 0
    back_option = data.spots["backend"].line == 0
    if isinstance(backend, YamlMap) and "url" in backend:
        back_option = backend.spots["url"].line == 0
    if back_option and not host_option:
        del data["hostfile"]
    elif host_option and not back_option:
        _drop_address(data)


def _needs_hostfile(backend: Json) -> bool:
    if backend is None:
        return True
    url = backend.get("url") if isinstance(backend, dict) else backend
    return url is None or (isinstance(url, str) and url.strip() in ENGINES)


def _drop_address(data: YamlMap) -> None:
    spot = data.spots["backend"]
    backend = data["backend"]
    url = backend.get("url") if isinstance(backend, dict) else backend
    engine = str(url).partition("://")[0].partition("+")[0].lower()
    reduced = YamlMap()
    if isinstance(backend, YamlMap):
        for key, value in backend.items():
            if key != "url":
                reduced.put(key, value, backend.spots[key])
    if engine in ENGINES:
        reduced.put("url", engine, spot)
    data.put("backend", reduced, spot)


def _check_needed(job: Job, request: JobRequest, data: YamlMap, context: LoadContext) -> None:
    at = Position(request.path or "job")
    add = context.problems.add
    if job.input is None and request.needs_input:
        add(at, "input is missing", "write input: rows.jsonl, or give -i PATH")
    plain = not job.stages and job.topology.name == "map"
    if job.prompt is None and plain and not (job.agent and job.agent.command):
        paths = job.input.path if job.input else ()
        # Whether piped rows are batch lines is only known once the first of them is there.
        only = paths[0] if len(paths) == 1 else None
        if not (only and (only.path == "-" or (only.local and is_batch_file(only.local)))):
            add(at, "prompt is missing", 'write prompt: "... {{ field }} ..."')
    if (
        job.hostfile
        and job.backend
        and job.backend.url
        and not _needs_hostfile(job.backend.url.text)
    ):
        add(
            data.spots["hostfile"].key_at,
            "backend names an address and hostfile a fleet",
            "keep one of them",
        )


BATCH_KEYS = frozenset({"custom_id", "method", "url", "body"})
BATCH_SUFFIXES = (".jsonl", ".ndjson")
_FIRST_LINES = 100
_FIRST_BYTES = 64 * 1024 * 1024


def is_batch_file(path: str | Path) -> bool:
    """Return whether the first lines of ``path`` are requests of a batch file.

    Such a line is a JSON object with ``custom_id``, ``method``, ``url`` and ``body``. At least one
    line must have all of them, and more than half of the first hundred lines three of them. A
    ``.jsonl`` file without lines is a batch file of no requests. ``.gz`` and ``.zst`` files are
    decompressed. A file that cannot be read is no batch file.
    """
    path = Path(path)
    complete = similar = count = 0
    try:
        for keys in islice(_keys_of_lines(path), _FIRST_LINES):
            count += 1
            complete += keys >= BATCH_KEYS
            similar += len(keys & BATCH_KEYS) >= len(BATCH_KEYS) - 1
    except InputError:
        return False
    if not count:
        return unpacked_suffix(path) in BATCH_SUFFIXES
    return complete > 0 and 2 * similar > count


def misspelled_key(path: Path) -> tuple[str, str] | None:
    """Return a key of the first line that is nearly one of a batch line, and that one."""
    try:
        keys = next(_keys_of_lines(path), frozenset())
    except InputError:
        return None
    if len(keys & BATCH_KEYS) < 2:
        return None
    for key in sorted(keys - BATCH_KEYS):
        near = nearest_name(key, BATCH_KEYS - keys)
        if near:
            return key, near
    return None


def unpacked_suffix(path: Path) -> str:
    """Return the suffix of a file's name in lower case, less that of its compression."""
    name = path.name.lower()
    return Path(name).with_suffix("").suffix if packing_of(path) else Path(name).suffix


def _keys_of_lines(path: Path) -> Iterator[frozenset[str]]:
    """Yield the keys of each line that is not blank, none where it is no JSON object."""
    size = 0
    for line in batch_lines(path):
        size += len(line)
        if size > _FIRST_BYTES:
            return
        line = line.removeprefix(b"\xef\xbb\xbf").strip()
        if line:
            yield _keys_of_line(line)


def _keys_of_line(line: bytes) -> frozenset[str]:
    if not line.startswith(b"{"):
        return frozenset()
    try:
        value = decode_json(line)
    except ValueError:
        return frozenset()
    return frozenset(value)


def batch_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed.

    Raises:
        InputError: it cannot be read, or is a damaged archive.
    """
    if not path.is_file():
        raise InputError("there is no such file", at=Position(path), hint="check the path")
    stream = ByteStream(path, packing_of(path))
    try:
        for lines in split_lines(stream.blocks(), path):
            yield from lines
    finally:
        stream.close()
