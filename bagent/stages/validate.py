"""Validation of stages before any request: names in prompts, expressions and queries, and joins.

Names are checked against the fields of the first rows, the columns of queries and the properties of
schemas. What depends on the rows themselves is not refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bagent.answers.schema.schema import OutputSchema
from bagent.errors import JobError
from bagent.job.templates.template import Expression, TemplateFailure, missing_property_hint
from bagent.job.templates.variables import Chain
from bagent.stages.loop import Board
from bagent.stages.prepare import (
    LOOP_NAMES,
    PreparedStage,
    StageRequest,
    suggest_name,
    table_names,
    table_of,
)
from bagent.stages.reduce import BY_ROW
from bagent.stages.row import FIELDS, INPUT
from bagent.types import Row

if TYPE_CHECKING:
    from bagent.job.spec.job import Job, JobSource

REDUCE_NAMES = frozenset({"responses", "n", "level"})
PLAIN = re.compile(r"\w+(\.\w+)*")

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class StageOutputs:
    """The rows that a stage leaves, as far as they are known."""

    rows: Rows | None
    """Examples of their fields; None where they depend on the run."""
    answer: frozenset[str] | None
    """The properties of their answers, none for a text; None where they are not known."""
    rooted: bool = True
    """Each goes back to one input row."""
    single: bool = False
    """It is the only one that goes back to its input row."""


def properties_of(schema: OutputSchema | None) -> frozenset[str] | None:
    """Return the properties that an answer may have: none for a text, None for an open schema."""
    if schema is None:
        return frozenset()
    names = schema.column_properties
    return _named(schema.document, None if None in names else names)


def _named(
    document: Mapping[str, Any], names: Iterable[str | None] | None
) -> frozenset[str] | None:
    """Return the properties ``names`` of a schema's values; None where it allows others."""
    kinds = {"string", "number", "integer", "boolean", "array"}
    values = document.get("enum", [document["const"]] if "const" in document else [])
    if document.get("type") in kinds or (values and not any(isinstance(v, dict) for v in values)):
        return frozenset()
    is_open = document.get("additionalProperties") not in (None, False)
    if names is None or is_open or "patternProperties" in document:
        return None
    return frozenset(name for name in names if name is not None) or None


def check_vote(job: Job, stages: Sequence[PreparedStage]) -> None:
    """Refuse a ``vote`` on a property that no answer has.

    Raises:
        JobError: the schema has no such property, or there is none.
    """
    name = job.topology.vote
    if name is None or job.topology.name != "self_consistency":
        return
    schema = stages[0].requests[0].schema
    properties = properties_of(schema)
    if properties is None or name in properties:
        return
    hint = suggest_name(name, sorted(properties))
    if not properties:
        hint = "output: {schema: ...} gives answers properties; without vote the whole answer votes"
    raise JobError(
        f"topology.vote: answers have no property {name}",
        hint=hint,
        at=job.source.position(("topology", "vote")),
    )


def check_stages(
    stages: Sequence[PreparedStage], sample: Sequence[Row], source: JobSource
) -> list[str]:
    """Check all stages against the first rows; return warnings.

    Args:
        stages: the stages.
        sample: the first rows that can be read; without any, what depends on them is not checked.
        source: the job file.

    Raises:
        JobError: a prompt, expression or query uses a name that is no field and no stage before.
    """
    return _Checks(stages, sample, source).all()


class _Checks:
    def __init__(
        self, stages: Sequence[PreparedStage], sample: Sequence[Row], source: JobSource
    ) -> None:
        self._stages = stages
        self._sample = sample
        self._source = source
        self._by_name = {stage.name: stage for stage in stages}
        rows = [row.data for row in sample]
        self._outputs = {INPUT: StageOutputs(rows or None, frozenset(), single=True)}
        self._seen: dict[str, frozenset[str]] = {INPUT: frozenset()}

    def all(self) -> list[str]:
        warnings: list[str] = []
        for stage in self._stages:
            before = [self._outputs[name] for name in stage.sources]
            rows = _together(before)
            columns: tuple[str, ...] | None = None
            if stage.spec.kind == "reduce":
                self._check_by(stage, rows)
            if stage.spec.split is not None:
                self._check_split(stage, rows)
            if stage.items is not None:
                self._check_items(stage, stage.items, rows)
            if stage.until is not None:
                self._check_until(stage, stage.until, rows)
            if stage.spec.query is not None:
                columns = self._check_query(stage, stage.spec.query)
            warnings.extend(self._prompts(stage, rows))
            self._outputs[stage.name] = self._after(stage, before, columns)
            self._seen[stage.name] = self._remaining(stage) | {stage.name}
        return warnings

    # --- the outputs of a stage -------------------------------------------------------------------

    def _after(
        self, stage: PreparedStage, before: Sequence[StageOutputs], columns: tuple[str, ...] | None
    ) -> StageOutputs:
        kind = stage.spec.kind
        if kind == "sql":
            if columns is None:
                return StageOutputs(None, None, rooted=False)
            return StageOutputs([dict.fromkeys(columns)], frozenset(columns), rooted=False)
        rows, rooted = _together(before), before[0].rooted
        if kind == "reduce":
            answer, by_row = properties_of(stage.requests[0].schema), _by_row(stage)
            return StageOutputs(self._grouped(stage), answer, by_row and rooted, by_row and rooted)
        if kind == "expand":
            return self._expanded(stage, rows, rooted)
        single = before[0].single and kind != "broadcast"
        if kind == "loop":
            names = frozenset(request.name for request in stage.requests)
            return StageOutputs(rows, names, rooted, single)
        if kind == "embed":
            return StageOutputs(rows, frozenset(), rooted, single)
        request = stage.requests[0]
        return StageOutputs(
            rows, properties_of(request.schema), rooted, single and request.job.answers == 1
        )

    def _expanded(self, stage: PreparedStage, rows: Rows | None, rooted: bool) -> StageOutputs:
        """Return the outputs of an expand stage: items add their properties to the fields."""
        if stage.items is None:
            return StageOutputs(rows, None, rooted)
        properties = self._of_items(stage)
        if rows is None or properties is None:
            return StageOutputs(None, properties or None, rooted)
        return StageOutputs([*rows, dict.fromkeys(properties)], properties, rooted)

    def _of_items(self, stage: PreparedStage) -> frozenset[str] | None:
        """Return the properties of the items that rows are made of; None if they are not known."""
        source = self._by_name.get(stage.sources[0])
        schema = source.requests[0].schema if source is not None and source.requests else None
        if schema is None or stage.items is None or not PLAIN.fullmatch(stage.items.text):
            return None
        chain = stage.items.text.split(".")
        if chain[0] in (stage.sources[0], "answer"):
            chain = chain[1:]
        schema_part: Any = schema.document
        for name in chain:
            schema_part = schema_part.get("properties", {}).get(name, {})
            schema_part = schema_part if isinstance(schema_part, dict) else {}
        item = schema_part.get("items")
        return None if not isinstance(item, dict) else _named(item, item.get("properties"))

    def _grouped(self, stage: PreparedStage) -> Rows | None:
        """Return the fields of the rows of a reduction."""
        if not _by_row(stage):
            return [{name.rpartition(".")[2]: None for name in stage.spec.by}]
        before = [self._outputs[name] for name in stage.sources]
        if all(outputs.rooted for outputs in before):
            return self._outputs[INPUT].rows
        return _together(before)

    # --- names ------------------------------------------------------------------------------------

    def _visible(self, stage: PreparedStage) -> frozenset[str]:
        """Return the stages whose answers the rows before a stage have."""
        return frozenset().union(*(self._seen[name] for name in stage.sources))

    def _shared(self, stage: PreparedStage) -> frozenset[str]:
        """Return the visible stages with one answer for all of a reduction's group."""
        seen = self._visible(stage) if _by_row(stage) else ()
        return frozenset(name for name in seen if self._outputs[name].single)

    def _remaining(self, stage: PreparedStage) -> frozenset[str]:
        """Return the stages whose answers the rows after a stage have, without itself."""
        if stage.spec.kind == "sql":
            return frozenset()
        return self._shared(stage) if stage.spec.kind == "reduce" else self._visible(stage)

    def _prompts(self, stage: PreparedStage, rows: Rows | None) -> Iterable[str]:
        """Check the prompts of a stage; yield warnings."""
        visible = self._shared(stage) if stage.spec.kind == "reduce" else self._visible(stage)
        names = {name: self._properties(name) for name in visible}
        if stage.spec.kind == "reduce":
            rows = self._grouped(stage)
            names |= dict.fromkeys(REDUCE_NAMES)
        elif stage.spec.kind == "loop":
            names |= dict.fromkeys(LOOP_NAMES | {request.name for request in stage.requests})
        for request in stage.requests if rows is not None else ():
            if request.prompt is not None:
                yield from request.prompt.check(rows or (), names)

    def _check_by(self, stage: PreparedStage, rows: Rows | None) -> None:
        """Refuse a field to group by that no row has."""
        names = self._names_before(stage, rows)
        for number, name in enumerate(stage.spec.by):
            chain = tuple(name.split("."))
            missing = None if name == "id" else self._missing(stage, (chain,), names)
            if missing:
                path = stage.at.path_of("by")
                raise JobError(
                    f"stage {stage.name}: by: there is no field {missing[0]}",
                    hint=missing[1],
                    at=self._source.position((*path, number)),
                )

    def _check_split(self, stage: PreparedStage, rows: Rows | None) -> None:
        assert stage.spec.split is not None
        name = stage.spec.split.field
        names = None if rows is None else _fields(rows) | self._visible(stage)
        if names is not None and name not in names:
            raise JobError(
                f"stage {stage.name}: split.field: there is no field {name}",
                hint=suggest_name(name, sorted(names)),
                at=self._source.position((*stage.at.path, "split", "field")),
            )

    def _check_items(self, stage: PreparedStage, items: Expression, rows: Rows | None) -> None:
        names = self._names_before(stage, rows)
        self._check_expression(stage, items, "items", None if names is None else names | {"answer"})

    def _check_until(self, stage: PreparedStage, until: Expression, rows: Rows | None) -> None:
        answers = [properties_of(request.schema) for request in stage.requests]
        names = None
        if rows is not None and None not in answers:
            names = _fields(rows) | self._visible(stage) | LOOP_NAMES
            names |= {request.name for request in stage.requests}
            names |= frozenset().union(*(answer for answer in answers if answer is not None))
        self._check_expression(stage, until, "until", names)

    def _names_before(self, stage: PreparedStage, rows: Rows | None) -> frozenset[str] | None:
        """Return the names of fields, stages, and properties of the answers before a stage."""
        answers = [self._outputs[name].answer for name in stage.sources]
        if rows is None or None in answers:
            return None
        named = (answer for answer in answers if answer is not None)
        return frozenset().union(_fields(rows), self._visible(stage), *named)

    def _check_expression(
        self, stage: PreparedStage, expression: Expression, key: str, names: frozenset[str] | None
    ) -> None:
        missing = self._missing(stage, expression.uses, names)
        if missing is None:
            return
        word = missing[0].rpartition(".")[2]
        origin = self._source.origin(stage.at.path_of(key))
        raise JobError(
            f"{expression.where}: there is no {missing[0]}",
            hint=missing[1],
            at=origin.word(expression.text, max(expression.text.find(word), 0)),
        )

    def _missing(
        self, stage: PreparedStage, chains: Iterable[Chain], names: frozenset[str] | None
    ) -> tuple[str, str] | None:
        """Return the first name that will not exist, and a hint."""
        for chain in chains:
            if names is not None and chain[0] not in names:
                return chain[0], suggest_name(chain[0], sorted(names))
            source = chain[0]
            if source == "answer" and stage.items is not None:
                source = stage.sources[0]
            if chain[0] in self._visible(stage) or chain[0] != source:
                problem = missing_property_hint(chain, self._properties(source))
                if problem is not None:
                    return ".".join(chain[:2]), problem
        return None

    def _properties(self, name: str) -> frozenset[str] | None:
        """Return the names that may follow ``NAME.``: properties and response fields."""
        answer = self._outputs[name].answer
        return answer | set(FIELDS) if answer else None

    # --- queries ----------------------------------------------------------------------------------

    def _check_query(self, stage: PreparedStage, query: str) -> tuple[str, ...] | None:
        """Return the columns of a query's result; None where they depend on the rows."""
        from bagent.stages.sql import QueryError, validate_query  # it needs DuckDB

        if INPUT in stage.sources and not self._sample:
            return None
        tables = [table_of(self._stages, name) for name in stage.sources]
        names = table_names(self._stages[: self._stages.index(stage)])
        check = validate_query(query, tables, self._sample, names)
        if not isinstance(check, QueryError):
            return check.columns
        path = stage.at.path_of("query")
        at = self._source.position(path)
        if check.offset is not None and stage.at.path:
            at = self._source.origin(path).word(query, check.offset)
        raise JobError(f"stage {stage.name}: query: {check.message}", hint=check.hint, at=at)


def _by_row(stage: PreparedStage) -> bool:
    return stage.spec.by == BY_ROW


def _together(sights: Sequence[StageOutputs]) -> Rows | None:
    """Return the rows of joined sources, each with the fields of all."""
    rows: list[Mapping[str, Any]] = []
    seen: list[Rows] = []
    for outputs in sights:
        if outputs.rows is None:
            return None
        if not any(outputs.rows is other for other in seen):
            seen.append(outputs.rows)
            rows.extend(outputs.rows)
    return seen[0] if len(seen) == 1 else rows


def _fields(rows: Rows) -> frozenset[str]:
    return frozenset(name for row in rows for name in row)


_LACKS = re.compile(r"no field (?:board\.)?(?P<name>\w+)")


def check_boards(stages: Sequence[PreparedStage], sample: Sequence[Row], source: JobSource) -> None:
    """Refuse a section that needs another section's answer before it can be written.

    Only sections that begin with an empty board and read only the input are checked.

    Raises:
        JobError: the first prompt of a section cannot be rendered for any row of ``sample``.
    """
    for stage in stages:
        if stage.spec.kind != "loop" or stage.sources != (INPUT,):
            continue
        begin = stage.requests if stage.spec.parallel else stage.requests[:1]
        names = {request.name for request in stage.requests}
        for number, request in enumerate(begin):
            missing = _missing(request, sample)
            if missing in names:
                spec = stage.spec.sections[number]
                own = (*stage.at.path, "sections", number, "prompt")
                guard = f"{{% if board.{missing} is defined %}}...{{% endif %}}"
                raise JobError(
                    f"{request.name}: in the first round {missing} has not written yet",
                    hint=f"{guard}, or {{{{ board }}}} for all that there is",
                    at=source.position(own if spec.prompt is not None else stage.at.prompt_at),
                )


def _missing(request: StageRequest, sample: Sequence[Row]) -> str | None:
    """Return the name that the first prompt lacks for every row; None if a row has all names."""
    if request.prompt is None:
        return None
    extra = {"board": Board(), "round": 1, "section": request.name}
    missing = None
    for row in sample:
        try:
            if request.prompt.raw:
                request.prompt.render_raw(row.data, extra)
            else:
                request.prompt.render(row.data, extra)
        except TemplateFailure as failure:
            problem = _LACKS.search(str(failure))
            if problem is None:
                return None
            missing = problem["name"]
        else:
            return None
    return missing


Descent = tuple[str, ...]
"""The stages that the rows of a stage descend from: the input or a reduction that joined rows, then
each stage that made several rows of one."""


def check_joins(stages: Sequence[PreparedStage], source: JobSource) -> None:
    """Refuse a stage that reads several sources whose rows cannot be joined one to one.

    Rows of a query are joined by their ids, which only the run knows.

    Raises:
        JobError: at the source that cannot be joined.
    """
    descents: dict[str, Descent | None] = {INPUT: (INPUT,)}
    for stage in stages:
        before = [descents[name] for name in stage.sources]
        if stage.spec.kind not in ("reduce", "sql"):
            _check(stage, before, source)
        descents[stage.name] = _after(stage, before)


def _check(stage: PreparedStage, before: Sequence[Descent | None], source: JobSource) -> None:
    first, base = before[0], stage.sources[0]
    for number, (name, other) in enumerate(zip(stage.sources, before, strict=True)):
        if first is None or other is None or other == first[: len(other)]:
            continue
        message, hint = (
            f"{name} brought rows together, none of its rows belongs to one of {base}",
            "a sql stage joins any rows: SELECT ... FROM a, b",
        )
        if other[0] == first[0]:
            message = f"{name} may have several rows for one of {base}"
            hint = f"write {name} first in from, or reduce it by: id before"
        raise JobError(
            f"stage {stage.name}: from: {message}",
            hint=hint,
            at=source.position((*stage.at.path_of("from"), number)),
        )


def _after(stage: PreparedStage, before: Sequence[Descent | None]) -> Descent | None:
    kind, first = stage.spec.kind, before[0]
    if kind == "sql":
        return None
    if kind == "reduce":
        return _reduced(stage, before)
    several = kind in ("expand", "broadcast")
    if kind == "map":
        several = stage.requests[0].job.answers > 1
    return (*first, stage.name) if several and first is not None else first


def _reduced(stage: PreparedStage, before: Sequence[Descent | None]) -> Descent | None:
    if stage.spec.by != BY_ROW:
        return (stage.name,)
    if None in before:
        return None
    if any(descent is not None and descent[0] != INPUT for descent in before):
        return (stage.name,)
    return (INPUT,) if stage.goal == 1 else (INPUT, stage.name)
