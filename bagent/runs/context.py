"""Preparation of a run: everything that can be checked without a request."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from bagent.answers.schema.schema import OutputSchema
from bagent.backends.openai.raw_request import ROUTES, route_of
from bagent.batches.service import check_batches
from bagent.errors import InputError, JobError, Position, UsageError
from bagent.fleet.hostfile import read_hostfile
from bagent.hpc.allocation import auto_shard
from bagent.job.load import (
    BATCH_KEYS,
    BATCH_SUFFIXES,
    JobRequest,
    batch_lines,
    is_batch_file,
    job_for_batch_file,
    load_job,
    misspelled_key,
    unpacked_suffix,
)
from bagent.job.spec.job import stage_parts
from bagent.job.templates.prompt import Prompt
from bagent.redaction import Redactor
from bagent.rows import RowReader, RowsConfig, open_rows
from bagent.runs.deadline import read_deadline
from bagent.runs.environment import apply_presets, read_environment, rename_old_variables
from bagent.servers.resolve import key_variables
from bagent.stages.prepare import PreparedStage, load_schema, prepare_stages, used_fields
from bagent.stages.topologies import is_single_map
from bagent.stages.validate import check_boards, check_joins, check_stages, check_vote
from bagent.store.journal.done_index import ResumePolicy
from bagent.text.suggest import did_you_mean
from bagent.types import Json, row_location

if TYPE_CHECKING:
    from bagent.job.spec.job import Job
    from bagent.types import Row


MOST_LINES = 50_000
"""Most lines of a batch by OpenAI's API, and so the most that are checked before a run."""

_TABLES = (".csv", ".tsv", ".parquet")
_NUMBERS = 5


def is_batch_file_path(path: Path, typed: Path) -> bool:
    """Return whether ``path``, given as a job file, is a batch file.

    Raises:
        JobError: it is a file of rows.
    """
    suffix = unpacked_suffix(path)
    packed_json = suffix == ".json" and path.suffix != ".json"
    if not (suffix in (*BATCH_SUFFIXES, *_TABLES) or packed_json) or not path.is_file():
        return False
    if suffix in BATCH_SUFFIXES and is_batch_file(path):
        return True
    hint = f"bagent run job.yaml -i {typed}"
    if suffix in BATCH_SUFFIXES:
        hint += "; lines of a batch file have custom_id, method, url and body"
        if (wrong := misspelled_key(path)) is not None:
            hint = f"its first line has {wrong[0]}: did you mean {wrong[1]}?"
    raise JobError(f"{typed} holds rows, not a job", hint=hint)


def check_lines(job: Job, piped: Iterable[dict[str, Json]]) -> None:
    """Refuse lines for routes that no request can be sent to, all in one message.

    Args:
        job: the job, whose input is batch files.
        piped: the first piped lines; the others cannot be checked.

    Raises:
        InputError: some lines cannot be sent.
        JobError: the piped lines are no batch file.
    """
    for data in piped:
        if len(BATCH_KEYS & data.keys()) < len(BATCH_KEYS) - 1:
            raise JobError(
                "the piped rows are no lines of a batch file, and there is no prompt for them",
                hint="bagent run job.yaml -i - takes rows; batch lines have custom_id, method,"
                " url and body",
            )
    for item in job.input.path if job.input else ():
        if item.local is not None and item.path != "-":
            _check_file(item.local)


def _check_file(path: Path) -> None:
    refused = _refused_routes(path)
    if not refused:
        return
    count = sum(map(len, refused.values()))
    groups = "; ".join(f"{url[:80]} ({_numbers(lines)})" for url, lines in refused.items())
    raise InputError(
        f"{count:,} {'line' if count == 1 else 'lines'} cannot be sent: {groups}",
        hint="lines are sent to " + ", ".join(f"/v1{route}" for route in ROUTES),
        at=Position(path, min(lines[0] for lines in refused.values())),
    )


def _numbers(lines: list[int]) -> str:
    first = ", ".join(map(str, lines[:_NUMBERS]))
    more = f" and {len(lines) - _NUMBERS:,} more" if len(lines) > _NUMBERS else ""
    return f"{'line' if len(lines) == 1 else 'lines'} {first}{more}"


class _Line(msgspec.Struct):
    url: str | None = None


def _refused_routes(path: Path) -> dict[str, list[int]]:
    """Return the numbers of lines with a route that no request can be sent to, by url.

    Lines that cannot be read, or have no url, fail in the run, each by itself.
    """
    refused: dict[str, list[int]] = {}
    decode = msgspec.json.Decoder(_Line).decode
    try:
        for number, line in enumerate(islice(batch_lines(path), MOST_LINES), 1):
            try:
                url = decode(line.removeprefix(b"\xef\xbb\xbf")).url
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                continue
            if url is not None and route_of(url) is None:
                refused.setdefault(url, []).append(number)
    except InputError:
        pass  # the run reports the error
    return refused


@dataclass(frozen=True)
class RunOptions:
    """Options of ``bagent run``; a field without a docstring is the option of that name."""

    job: Path | None
    """None where rows come as an OpenAI batch file and there is no job file."""
    inputs: tuple[str, ...] = ()
    """Paths as typed; ``-`` is stdin."""
    output: str | None = None
    sets: tuple[str, ...] = ()
    """The ``--set`` texts."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Dotted job keys and the values that options set."""
    limit: int | None = None
    sample: int | None = None
    shard: str | None = None
    deadline: str = "auto"
    margin: float | None = None
    fresh: bool = False
    retry: str | None = None
    skip_failed: bool = False
    on_change: str = "refuse"
    reuse: str | None = None
    canary: bool = True
    wait_hosts: float = 0.0
    min_hosts: int = 1
    ordered: bool = False
    progress: str = "auto"
    metrics_port: str | None = None
    debug: bool = False
    tables: bool = True
    """Off where another process makes the tables at the end."""
    command: list[str] = field(default_factory=list)
    """The whole command with its secrets masked."""
    python: str = ""
    """The library started the run: ``job``: with the job's own input; ``rows`` or ``rows:N``: with
    rows of the program, N of them."""
    input_index: str | None = None
    """The file in which another process indexes the input."""
    limit_part: int = 0
    """Which of ``limit_parts`` processes that share the limits of endpoints this one is."""
    limit_parts: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = field(default_factory=Path.cwd)

    @property
    def from_program(self) -> bool:
        """Whether a program gives the rows to the library."""
        return self.python.startswith("rows")

    @property
    def program_rows(self) -> int | None:
        """How many rows the program gives; None where unknown."""
        _, _, count = self.python.partition(":")
        return int(count) if count.isdecimal() else None


SAMPLE_ROWS = 100
STAGE = "main"

WORKER = "worker"
"""The display of a worker process, whose parent shows the run."""


@dataclass(frozen=True)
class RunContext:
    """A checked job and its options; nothing has been sent or written."""

    job: Job
    options: RunOptions
    run_dir: Path
    part: str
    prompt: Prompt | None
    schema: OutputSchema | None
    rows_config: RowsConfig
    own_bodies: bool
    """Rows are request bodies, from an OpenAI batch file."""
    warnings: list[str]
    """What the person should know; :func:`open_input` adds what the first rows show."""
    stages: tuple[PreparedStage, ...] = ()
    routes: set[str] = field(default_factory=set)
    """Routes of the first lines of a batch file; :func:`open_input` adds them."""

    @property
    def piped(self) -> bool:
        """Whether rows come from stdin."""
        return "-" in self.rows_config.inputs

    @property
    def is_named(self) -> bool:
        """Whether an option names the run, so that it may take rows of several inputs."""
        options = self.options
        if options.output not in (None, "-") or "name" in options.overrides:
            return True
        return any(text.split("=")[0].strip() == "name" for text in options.sets)

    def fingerprints(self) -> dict[str, str]:
        """Return the job's fingerprints by part.

        ``input`` is among them where a batch file in place of a job names the run: the path.
        ``model`` is where the job names all models; else a server has to tell.
        """
        parts = self.job.fingerprint_parts()
        jobs = [request.job for stage in self.stages for request in stage.requests] or [self.job]
        models = dict.fromkeys(job.model for job in jobs)
        if "auto" not in models:
            parts["model"] = ", ".join(models)
        path = self.options.job
        if path is not None and unpacked_suffix(path) in BATCH_SUFFIXES and not self.is_named:
            parts["input"] = str((self.options.cwd / path).resolve())
        return parts


def prepare(options: RunOptions) -> RunContext:
    """Load and check everything but the rows.

    Raises:
        UsageError: the first error, with its position.
    """
    warnings: list[str] = []
    presets = read_environment(options.env, warnings.append)
    job, batch = read_job(options)
    if batch:
        refuse_keys_of_lines(job, options)
    job = apply_presets(job, presets)
    stages = prepare_stages(job)
    check_vote(job, stages)
    check_joins(stages, job.source)
    if job.agent is not None and (batch or (prompt_is_raw(job) and not job.agent.command)):
        raise JobError(
            "agent: its turns are chats, and this job has raw prompts or an OpenAI batch file",
            hint="write prompt: with system and user, or messages",
            at=job.source.position(("agent",)),
        )
    if job.batching.in_batches:
        check_batches(job, staged=bool(stages))
    check_deadline(options, warnings.append)
    ResumePolicy.parse(options.retry, skip_failed=options.skip_failed, ended=False)
    if job.hostfile is not None:
        read_hostfile(job.hostfile.path)
    schema = None if stages else load_schema(job)
    prompt = None if batch or stages else Prompt.from_job(job)
    if job.batching.in_batches and prompt is not None and prompt.reads_buckets:
        raise JobError(
            f"batching mode {job.batching.mode}: images in buckets are sent with live calls only",
            hint="leave batching.mode out, or name images by https URLs",
            at=job.source.position(("prompt",)),
        )
    run_dir = run_directory(job, options)
    config = make_rows_config(job, options, prompt, run_dir)
    if stages:
        _refuse_parts(stages, config)
        config = replace(config, fields=used_fields(stages))
    part = "all" if config.shard is None else f"{config.shard[0]}-of-{config.shard[1]}"
    warnings += schema.warnings if schema is not None else ()
    return RunContext(job, options, run_dir, part, prompt, schema, config, batch, warnings, stages)


def refuse_keys_of_lines(job: Job, options: RunOptions) -> None:
    """Refuse keys of a job that the lines of its batch file hold themselves.

    Raises:
        JobError: the job has a prompt or sampling.
    """
    chosen = sorted(job.sampling.model_fields_set)
    keys: list[tuple[str, ...]] = [("sampling", key) for key in chosen]
    if options.sample is not None:
        keys = [key for key in keys if key != ("sampling", "seed")]  # it draws the sample
    if job.prompt is not None:
        keys.insert(0, ("prompt",))
    if not keys:
        return
    names = ", ".join(map(".".join, keys))
    raise JobError(
        f"{names}: the lines of a batch file say this themselves, and are sent as they are",
        hint="leave it out, and write it into the body of each line",
        at=job.source.position(keys[0]),
    )


def check_deadline(options: RunOptions, warn: Callable[[str], None]) -> None:
    """Refuse a typed deadline that has passed; a worker may be late for its own.

    Raises:
        UsageError: it has passed, or is no deadline.
    """
    now = time.time()
    deadline = read_deadline(options.deadline, options.env, now, warn=warn)
    typed = options.deadline.strip().lower() != "auto" and options.progress != WORKER
    if deadline is not None and typed and deadline.at <= now:
        raise UsageError(
            f"--deadline {options.deadline}: passed {now - deadline.at:.0f} s ago",
            hint="give a later one, or --deadline none",
        )


def _refuse_parts(stages: tuple[PreparedStage, ...], config: RowsConfig) -> None:
    """Refuse to divide the rows where a stage combines all of them."""
    if config.shard is None:
        return
    for stage in stages:
        combines_all = stage.spec.kind == "sql" or (
            stage.spec.kind == "reduce" and stage.spec.by[:1] != ("id",)
        )
        if combines_all:
            raise UsageError(
                f"stage {stage.name} brings all rows together, so they cannot be divided",
                hint="leave --shard and --workers out, or run the stages before it as a job",
            )


def prompt_is_raw(job: Job) -> bool:
    """Return whether prompts are text without a chat template."""
    return job.prompt is not None and job.prompt.raw is not None


def open_input(
    prepared: RunContext, *, stdin: BinaryIO | None = None, whole_rows: bool = True
) -> RowReader:
    """Open the rows and check the prompt against the first of them.

    Args:
        stdin: where piped rows come from.
        whole_rows: read all columns of tables, not only those that the job uses.

    Raises:
        InputError: the input cannot be read as rows.
        JobError: the prompt, or ``id``, uses a name that no row has.
        WriteError: piped rows cannot be kept.
    """
    try:
        columns = None if whole_rows or prepared.prompt is None else prepared.prompt.in_braces
        rows = open_rows(prepared.rows_config, stdin=stdin, columns=columns)
    except InputError as error:
        if error.at is None:
            key = "where" if error.message.startswith("where:") else "input"
            error.at = prepared.job.source.position((key,))
        raise
    if prepared.options.input_index is not None:
        rows.share(Path(prepared.options.input_index))
    in_memory = prepared.options.program_rows is not None
    first = rows.peek(1 if prepared.piped and not in_memory else SAMPLE_ROWS, wait=in_memory)
    readable = [row for row in first if row.error is None]
    if prepared.own_bodies:
        check_lines(prepared.job, [row.data for row in readable] if prepared.piped else [])
        prepared.routes.update(filter(None, (route_of(row.data.get("url")) for row in readable)))
    sample = [row.data for row in readable]
    if sample:
        _check_id(prepared.job, sample)
    if sample and prepared.prompt is not None:
        prepared.warnings.extend(prepared.prompt.check(sample))
    if prepared.stages:
        prepared.warnings.extend(check_stages(prepared.stages, readable, prepared.job.source))
        check_boards(prepared.stages, readable, prepared.job.source)
    if first and not sample:
        row = first[0]
        several = len(first) > 1
        rows_text = (
            f"none of the first {len(first)} rows can" if several else "the first row cannot"
        )
        prepared.warnings.append(
            f"{rows_text} be read:"
            f" {row_location(row.source, row.line)}: {row.error}{_guess_format(row)}"
        )
    rows.keep_rows()
    return rows


def _guess_format(row: Row) -> str:
    """Return what the first line looks like, where it is no line of JSON objects."""
    text = (row.raw or b"").strip()
    if PurePath(row.source).suffix.lower() in (".csv", ".tsv"):
        return ""
    if text[:1] == b"[" or text == b"{":
        return " (is it one JSON document over several lines? its name ends in .json then)"
    if text[:1] not in (b"{", b'"') and (b"," in text or b"\t" in text or b";" in text):
        return " (is it a table? its name ends in .csv or .tsv then)"
    return ""


def _check_id(job: Job, sample: list[dict[str, Any]]) -> None:
    """Refuse an ``id`` that no row of the sample has; a few rows may lack it."""
    if job.id is None or any(job.id in data for data in sample):
        return
    names = list(dict.fromkeys(name for data in sample for name in data))
    suggestion = did_you_mean(job.id, names)
    first = "row" if len(sample) == 1 else f"{len(sample)} rows"
    raise JobError(
        f"id: no field {job.id!r} in the first {first}",
        hint=(f"{suggestion} " if suggestion else "") + f"there are {', '.join(names[:12])}",
        at=job.source.spot(("id",)).key_at,
    )


def read_job(options: RunOptions) -> tuple[Job, bool]:
    """Return the job, and whether its rows are request bodies (an OpenAI batch file)."""
    if options.job is None:
        raise JobError("no job file", hint="bagent run job.yaml; bagent init writes one")
    path = options.cwd / options.job
    overrides: dict[str, Any] = dict(options.overrides)
    if options.inputs:
        overrides["input"] = list(options.inputs)
    request = JobRequest(
        path=options.job,
        sets=options.sets,
        options=overrides,
        env=rename_old_variables(options.env),
        cwd=options.cwd,
    )
    if str(options.job) == "-" or is_batch_file_path(path, options.job):
        return job_for_batch_file(request), True
    job = load_job(request)
    if job.input is None:
        raise JobError("the job names no input", hint="write input: PATH, or give -i PATH")
    if job.prompt is None and is_single_map(job):
        paths = [item.local for item in job.input.path]
        if paths and all(str(p) == "-" or (p and p.is_file() and is_batch_file(p)) for p in paths):
            return job, True
        raise JobError("the job has no prompt", hint="write prompt: ...")
    return job, False


_DATA_FILES = frozenset({".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".xlsx"})
"""Endings of files that ``-o`` does not write."""


def run_directory(job: Job, options: RunOptions) -> Path:
    """Return the run directory: ``-o DIR``, else the job's name under the results folder."""
    if options.output == "":
        raise UsageError("--output: the name is empty", hint="name the folder of the run")
    if options.output not in (None, "-"):
        path = options.cwd / str(options.output)
        if path.suffix.lower() in _DATA_FILES and not path.is_dir():
            raise UsageError(
                f"--output {options.output}: this is the name of a file, and -o names the folder"
                " of the run",
                hint=f"-o - > {options.output}, or afterwards bagent results -o {options.output}",
            )
        if problem := _obstacle(path):
            raise UsageError(
                f"--output {options.output}: {problem}",
                hint="name the folder of the run; -o - prints the rows",
            )
        return path
    folder = job.results.dir.path if job.results.dir else options.cwd / "runs"
    if problem := _obstacle(folder):
        raise UsageError(
            f"no run can be made in {folder}: {problem}", hint="name its folder with -o DIR"
        )
    return folder / job.name


def _obstacle(path: Path) -> str:
    """Return what is in the way of a folder: a file or a broken link; empty if nothing is."""
    for part in (path, *path.parents):
        if part.is_symlink() and not part.exists():
            return f"{part} is a link to {part.readlink()}, which does not exist"
        if part.exists():
            return "" if part.is_dir() else f"{part} is a file"
    return ""


def make_rows_config(
    job: Job, options: RunOptions, prompt: Prompt | None, run_dir: Path
) -> RowsConfig:
    """Return how to read the rows, in this process and again when tables are made."""
    source = job.input
    if source is None:
        raise InputError("no input", hint="name one: input: rows.jsonl, or -i PATH")
    inputs: list[Any] = [item.path for item in source.path]
    inputs += [{"files": item.path} for item in source.files]
    if source.sql is not None:
        inputs.append({"sql": source.sql})
    fields = prompt.fields if prompt is not None else None
    return RowsConfig(
        inputs=tuple(inputs),
        base=job.source.folder,
        id_field=job.id,
        fields=None if fields is None else tuple(sorted(fields)),
        where=job.where,
        sample=options.sample,
        seed=job.sampling.seed or 0,
        limit=options.limit,
        shard=read_shard(options.shard, options.env),
        stdin_spool=run_dir / "input.jsonl",
        replace_stdin=options.from_program,
    )


def read_shard(text: str | None, env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return ``I/N`` as numbers, I from 1 to N; ``auto`` is this process's rank in its launch."""
    if text is None:
        return None
    if text.strip().lower() == "auto":
        part, count = auto_shard(env)
        return (part, count) if count > 1 else None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise UsageError(f"--shard {text}: not a part", hint="write I/N, for example 1/4, or auto")
    part, count = int(match[1]), int(match[2])
    if not 1 <= part <= count:
        raise UsageError(f"--shard {text}: I must be from 1 to N", hint="--shard 1/4 is the first")
    return part, count


def make_redactor(job: Job, env: Mapping[str, str]) -> Redactor:
    """Return the redactor of the secrets of ``job``: its variables and the keys that it names.

    The endpoint masks keys that an ``api_key_command`` prints.
    """
    values = {env[name].strip() for name in _key_variables(job, env) if env.get(name)}
    return Redactor(values | job.source.secrets)


def _key_variables(job: Job, env: Mapping[str, str]) -> Iterator[str]:
    for part in (job, *(job.for_stage(part) for _, part in stage_parts(job))):
        yield from key_variables(part.backend, env)
        if part.hostfile is not None:
            for host in read_hostfile(part.hostfile.path):
                if "api_key_env" in host.tags:
                    yield host.tags["api_key_env"]
        for tool in part.agent.tools if part.agent is not None else ():
            if tool.api_key_env:
                yield tool.api_key_env
            elif tool.builtin == "web_search":
                from bagent.tools.builtin.web_search import search_target

                yield search_target(tool.url, None, env)[0]
