"""The stages of a job, checked as far as can be without a request."""

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
from bagent.text.suggest import dotted

if TYPE_CHECKING:
    from bagent.job.spec.job import Job

ASKING = frozenset({"map", "broadcast", "reduce", "loop", "embed"})
"""Kinds of stages that ask a model."""

LOOP_NAMES = frozenset({"board", "round", "section"})


@dataclass(frozen=True)
class StageRequest:
    """What one model is asked in a stage: the job as the stage, or a section of it, sees it.

    ``name`` is the section's, else the stage's.
    """

    name: str
    job: Job
    part: StagePart
    prompt: Prompt | None
    schema: OutputSchema | None


@dataclass(frozen=True)
class PreparedStage:
    """One checked stage.

    ``asking`` has one entry for a stage that asks, one for each section of a loop, none for other
    kinds. ``sources`` are the stages that it reads, ``input`` among them.
    """

    name: str
    spec: StageSpec
    at: StageAt
    sources: tuple[str, ...]
    asking: tuple[StageRequest, ...]
    items: Expression | None = None
    until: Expression | None = None
    goal: int = 1
    fields: frozenset[str] | None = field(default=frozenset())


def prepare_stages(job: Job) -> tuple[PreparedStage, ...]:
    """The stages of ``job``; none where it is one map over its rows.

    Raises:
        JobError: a stage lacks something or its template or expression is wrong.
        SchemaError: a schema is wrong.
    """
    if is_single_map(job):
        return ()
    laid = expand_topology(job)
    found: list[PreparedStage] = []
    for at in laid.stages:
        _check(job, at)
        found.append(_prepared(laid.base, at, found))
    return tuple(found)


def _check(job: Job, at: StageAt) -> None:
    spec = at.spec
    place = job.source.position(at.path)
    if spec.agent is not None and spec.agent.command:
        raise JobError(f"stage {at.name}: a command cannot be a stage's agent", at=place)
    if len(at.sources) > 1 and spec.kind in ("reduce", "sql"):
        return
    if len(set(at.sources)) < len(at.sources):
        raise JobError(f"stage {at.name} names a source twice in from", at=place)


def _prepared(base: Job, at: StageAt, before: Sequence[PreparedStage]) -> PreparedStage:
    spec = at.spec
    asking = tuple(_askings(base, at))
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
        asking=asking,
        items=items,
        until=until,
        goal=_goal(spec, at, base),
    )
    return _with_fields(stage, [stage.name for stage in before])


def _expression(text: str, key: str, at: StageAt, base: Job) -> Expression:
    path = at.path_of(key)
    return Expression(text, dotted(path), base.source.position(path))


def _read(at: StageAt, before: Sequence[PreparedStage]) -> tuple[str, ...]:
    """What a stage reads; a query reads also the other stages that it mentions."""
    if at.spec.query is None:
        return at.sources
    words = set(re.findall(r"\w+", at.spec.query.casefold()))
    names = (INPUT, *(stage.name for stage in before))
    others = [name for name in names if name.casefold() in words]
    return tuple(dict.fromkeys((*at.sources, *others)))


def _goal(spec: StageSpec, at: StageAt, base: Job) -> int:
    """How many rows a reduction may leave."""
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


def _askings(base: Job, at: StageAt) -> Iterable[StageRequest]:
    spec = at.spec
    if spec.kind not in ASKING:
        return
    job = base.for_stage(spec)
    if spec.kind != "loop":
        yield _asking(at.name, job, spec, at.prompt_at, base)
        return
    for number, section in enumerate(spec.sections):
        own = (*at.path, "sections", number, "prompt")
        path = own if section.prompt is not None else at.prompt_at
        yield _asking(section.name, job.for_stage(section), section, path, base, spec)


def _asking(
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
    schema = None if embeds else load_schema_of(job, path)
    return StageRequest(name, job, part, Prompt(job.prompt, base.source, path), schema)


def load_schema_of(job: Job, path: tuple[str | int, ...] = ()) -> OutputSchema | None:
    """The output schema of ``job``, if it has one.

    Args:
        path: where its prompt stands; its output stands beside it.
    """
    found = job.output.schema_
    if found is None:
        return None
    try:
        if isinstance(found, dict):
            return OutputSchema.load(found, base=job.source.folder)
        return OutputSchema.load(found.path, base=found.path.parent)
    except SchemaError as error:
        if error.at is None:
            error.at = job.source.position((*path[:-1], "output", "schema"))
        raise


# --- which fields of the input are used -----------------------------------------------------------


def _with_fields(stage: PreparedStage, names: Iterable[str]) -> PreparedStage:
    spec = stage.spec
    fields: frozenset[str] | None = frozenset()
    for asking in stage.asking:
        used = asking.prompt.fields if asking.prompt is not None else frozenset()
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
    """The fields of the input that any stage uses; None: they may use every one."""
    fields: set[str] = set()
    for stage in stages:
        if stage.fields is None:
            return None
        fields |= stage.fields
    return tuple(sorted(fields))


def table_of(stages: Sequence[PreparedStage], name: str) -> StageTable:
    """What a stage, or ``input``, is as a table of a query: its schema's properties, typed."""
    for stage in stages:
        if stage.name == name:
            columns: list[tuple[str | None, str]] = []
            schema = stage.asking[0].schema if stage.asking else None
            if schema is not None and stage.spec.kind != "loop":
                kinds = [kind for _, kind in schema.columns]
                columns = list(zip(schema.column_properties, kinds, strict=True))
            return StageTable(name, columns)
    return StageTable(name)


def keeping_keys(stage: PreparedStage, stages: Sequence[PreparedStage]) -> tuple[str, ...]:
    """The stages after ``stage`` whose rows are its rows, one after the other."""
    found = [stage.name]
    for other in stages:
        if other.sources[0] in found and other.spec.kind not in ("reduce", "sql"):
            found.append(other.name)
    return tuple(found[1:])
