"""The prepared stages of a job: templates, expressions and schemas, loaded and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bagent.answers.schema.schema import OutputSchema
from bagent.errors import JobError, SchemaError
from bagent.job.spec.stages import RESERVED, BoardSection, StagePart, StageSpec
from bagent.job.templates.prompt import Prompt
from bagent.job.templates.template import Expression
from bagent.stages.query import StageTable
from bagent.stages.row import INPUT
from bagent.stages.topologies import StageAt, expand_topology, is_single_map
from bagent.text.suggest import dotted, nearest_name

if TYPE_CHECKING:
    from bagent.job.spec.job import Job

ASKING_KINDS = frozenset({"map", "broadcast", "reduce", "loop", "embed"})
"""Kinds of stages that send requests."""

LOOP_NAMES = frozenset({"board", "round", "section"})


@dataclass(frozen=True)
class StageRequest:
    """The request of a stage, or of a section of it, with the job as it sees it."""

    name: str
    """The section's, else the stage's."""
    job: Job
    part: StagePart
    prompt: Prompt | None
    schema: OutputSchema | None


@dataclass(frozen=True)
class PreparedStage:
    """One checked stage."""

    name: str
    spec: StageSpec
    at: StageAt
    sources: tuple[str, ...]
    """The stages that it reads, and ``input``."""
    requests: tuple[StageRequest, ...]
    """One for a stage that asks, one for each section of a loop, else none."""
    items: Expression | None = None
    until: Expression | None = None
    goal: int = 1
    fields: frozenset[str] | None = field(default=frozenset())


def prepare_stages(job: Job) -> tuple[PreparedStage, ...]:
    """Prepare the stages of ``job``; none where it is one map over its rows.

    Raises:
        JobError: a stage lacks something or its template or expression is wrong.
        SchemaError: a schema is wrong.
    """
    if is_single_map(job):
        return ()
    staged = expand_topology(job)
    prepared: list[PreparedStage] = []
    for at in staged.stages:
        _check(job, at)
        prepared.append(_prepared(staged.base, at, prepared))
    return tuple(prepared)


def _check(job: Job, at: StageAt) -> None:
    spec = at.spec
    position = job.source.position(at.path)
    if spec.agent is not None and spec.agent.command:
        raise JobError(
            f"stage {at.name}: a command cannot be a stage's agent",
            at=position,
            hint="write agent: {command: ...} for the whole job",
        )
    if len(at.sources) > 1 and spec.kind in ("reduce", "sql"):
        return
    if len(set(at.sources)) < len(at.sources):
        raise JobError(
            f"stage {at.name} names a source twice in from", at=position, hint="name it once"
        )


def _prepared(base: Job, at: StageAt, before: Sequence[PreparedStage]) -> PreparedStage:
    spec = at.spec
    requests = tuple(_make_requests(base, at))
    items = until = None
    if spec.items is not None:
        items = _expression(spec.items, "items", at, base)
    if spec.until is not None and spec.kind == "loop":
        until = _expression(spec.until, "until", at, base)
    stage = PreparedStage(
        name=at.name,
        spec=spec,
        at=at,
        sources=_read(at, before),
        requests=requests,
        items=items,
        until=until,
        goal=_goal(spec, at, base),
    )
    return _with_fields(stage, [stage.name for stage in before])


def _expression(text: str, key: str, at: StageAt, base: Job) -> Expression:
    path = at.path_of(key)
    return Expression(text, dotted(path), base.source.position(path))


def _read(at: StageAt, before: Sequence[PreparedStage]) -> tuple[str, ...]:
    """Return the sources of a stage; a query also reads the stages that it mentions."""
    if at.spec.query is None:
        return at.sources
    mentioned = set(re.findall(r"\w+", at.spec.query.casefold()))
    others = [name for name in table_names(before) if name.casefold() in mentioned]
    return tuple(dict.fromkeys((*at.sources, *others)))


def table_names(before: Sequence[PreparedStage]) -> tuple[str, ...]:
    """Return the tables that a query after the stages ``before`` may name."""
    return (INPUT, *(stage.name for stage in before))


def _goal(spec: StageSpec, at: StageAt, base: Job) -> int:
    """Return how many rows a reduction may leave."""
    if spec.kind != "reduce" or spec.until is None:
        return 1
    text = spec.until.strip()
    if not text.isdecimal() or int(text) < 1:
        raise JobError(
            f"stage {at.name}: until of a reduce stage is how many rows may be left, not {text}",
            hint="until: 1",
            at=base.source.position(at.path_of("until")),
        )
    return int(text)


def _make_requests(base: Job, at: StageAt) -> Iterable[StageRequest]:
    spec = at.spec
    if spec.kind not in ASKING_KINDS:
        return
    job = base.for_stage(spec)
    if spec.kind != "loop":
        yield _make_request(at.name, job, spec, at.prompt_at, base)
        return
    for number, section in enumerate(spec.sections):
        own = (*at.path, "sections", number, "prompt")
        path = own if section.prompt is not None else at.prompt_at
        yield _make_request(section.name, job.for_stage(section), section, path, base, spec)


def _make_request(
    name: str,
    job: Job,
    part: StagePart,
    path: tuple[str | int, ...],
    base: Job,
    around: StageSpec | None = None,
) -> StageRequest:
    embeds = isinstance(part, StageSpec) and part.kind == "embed"
    reads_input = isinstance(part, StageSpec) and INPUT in part.from_
    if job.prompt is None and embeds and not reads_input:
        return StageRequest(name, job, part, None, None)
    if job.prompt is None:
        raise JobError(
            f"{name} has no prompt", hint="write prompt: ...", at=base.source.position(path[:-1])
        )
    if isinstance(part, BoardSection) and part.select is None and around is not None:
        part = part.model_copy(update={"select": around.select})
    prompt = job.prompt
    if job.agent is not None and prompt is not None and prompt.raw is not None:
        raise JobError(
            f"{name}: an agent's turns are chats, and its prompt is raw",
            hint="write prompt: with system and user, or messages",
            at=base.source.position(path),
        )
    if part.select and job.hostfile is None:
        raise JobError(
            f"{name}: select chooses among the endpoints of a hostfile, and there is none",
            hint="write hostfile: PATH",
            at=base.source.position((*path[:-1], "select")),
        )
    schema = None if embeds else load_schema(job, path)
    return StageRequest(name, job, part, Prompt(job.prompt, base.source, path), schema)


def load_schema(job: Job, path: tuple[str | int, ...] = ()) -> OutputSchema | None:
    """Load the output schema of ``job``, if it has one; ``path`` is that of its prompt."""
    spec = job.output.schema_
    if spec is None:
        return None
    try:
        if isinstance(spec, dict):
            return OutputSchema.load(spec, base=job.source.folder)
        return OutputSchema.load(spec.path, base=spec.path.parent)
    except SchemaError as error:
        if error.at is None:
            error.at = job.source.position((*path[:-1], "output", "schema"))
        raise


# --- which fields of the input are used -----------------------------------------------------------


def _with_fields(stage: PreparedStage, names: Iterable[str]) -> PreparedStage:
    spec = stage.spec
    fields: frozenset[str] | None = frozenset()
    for request in stage.requests:
        used = request.prompt.fields if request.prompt is not None else frozenset()
        fields = None if fields is None or used is None else fields | used
    if spec.kind == "sql":
        fields = None if INPUT in stage.sources else fields
    if spec.kind == "reduce" and INPUT in stage.sources:
        fields = None
    if fields is not None:
        more = {name.partition(".")[0] for name in spec.by} - {"id"}
        more |= stage.items.names if stage.items is not None else set()
        more |= stage.until.names if stage.until is not None else set()
        if spec.split is not None:
            more.add(spec.split.field)
        sections = {section.name for section in spec.sections}
        fields = (fields | more) - set(names) - RESERVED - LOOP_NAMES - sections - {"answer"}
    return PreparedStage(**{**stage.__dict__, "fields": fields})


def used_fields(stages: Sequence[PreparedStage]) -> tuple[str, ...] | None:
    """Return the fields of the input that any stage uses; None: all."""
    fields: set[str] = set()
    for stage in stages:
        if stage.fields is None:
            return None
        fields |= stage.fields
    return tuple(sorted(fields))


def table_of(stages: Sequence[PreparedStage], name: str) -> StageTable:
    """Return the table of a stage, or of ``input``, with typed columns for its schema."""
    for stage in stages:
        if stage.name == name:
            columns: list[tuple[str | None, str]] = []
            schema = stage.requests[0].schema if stage.requests else None
            if schema is not None and stage.spec.kind != "loop":
                kinds = [kind for _, kind in schema.columns]
                columns = list(zip(schema.column_properties, kinds, strict=True))
            return StageTable(name, columns)
    return StageTable(name)


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Return the nearest of ``names`` as a hint, else the first of them."""
    ordered = list(names)
    nearest = nearest_name(name.strip('"'), ordered)
    return f"did you mean {nearest}?" if nearest else f"there are {', '.join(ordered[:12])}"


def keeping_keys(stage: PreparedStage, stages: Sequence[PreparedStage]) -> tuple[str, ...]:
    """Return the later stages whose rows have the keys of the rows of ``stage``."""
    names = [stage.name]
    for other in stages:
        if other.sources[0] in names and other.spec.kind not in ("reduce", "sql"):
            names.append(other.name)
    return tuple(names[1:])
