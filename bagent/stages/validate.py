"""Stages held against the first rows: names in prompts, expressions and queries, before any call.

Each stage is looked at with what its rows will have: the input's fields, what a query gives, the
properties of schemas. Where only the rows will tell, nothing is refused.
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
from bagent.stages.prepare import LOOP_NAMES, PreparedStage, StageRequest, table_of
from bagent.stages.reduce import BY_ROW
from bagent.stages.row import FIELDS, INPUT
from bagent.text.suggest import nearest_name
from bagent.types import Row

if TYPE_CHECKING:
    from bagent.job.spec.job import Job, JobSource

REDUCE_NAMES = frozenset({"responses", "n", "level"})
PLAIN = re.compile(r"\w+(\.\w+)*")
_SHOWN = 12

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class StageOutputs:
    """What is known of the rows that a stage leaves.

    ``rows`` are examples of their fields, None where only the run will tell. ``answer`` are the
    properties of their answers, none for a text, None where they are not known. ``rooted``:
    each goes back to one input row. ``single``: it is the only one that goes back to it.
    """

    rows: Rows | None
    answer: frozenset[str] | None
    rooted: bool = True
    single: bool = False


def properties_of(schema: OutputSchema | None) -> frozenset[str] | None:
    """The properties that an answer may have: none without a schema, when it is a text.

    None where the schema leaves them open.
    """
    if schema is None:
        return frozenset()
    names = schema.column_properties
    return _named(schema.document, None if None in names else names)


def _named(
    document: Mapping[str, Any], names: Iterable[str | None] | None
) -> frozenset[str] | None:
    """The properties ``names`` of values of a schema, unless it leaves room for others."""
    kinds = {"string", "number", "integer", "boolean", "array"}
    values = document.get("enum", [document["const"]] if "const" in document else [])
    if document.get("type") in kinds or (values and not any(isinstance(v, dict) for v in values)):
        return frozenset()
    is_open = document.get("additionalProperties") not in (None, False)
    if names is None or is_open or "patternProperties" in document:
        return None
    return frozenset(name for name in names if name is not None) or None


def check_vote(job: Job, stages: Sequence[PreparedStage]) -> None:
    """Refuse a ``vote`` on what no answer will have.

    Raises:
        JobError: the schema has no such property, or there is none.
    """
    name = job.topology.vote
    if name is None or job.topology.name != "self_consistency":
        return
    schema = stages[0].asking[0].schema
    known = properties_of(schema)
    if known is None or name in known:
        return
    hint = _hint(name, known)
    if not known:
        hint = "output: {schema: ...} gives answers properties; without vote the whole answer votes"
    raise JobError(
        f"topology.vote: answers have no property {name}",
        hint=hint,
        at=job.source.position(("topology", "vote")),
    )


def check_stages(
    stages: Sequence[PreparedStage], sample: Sequence[Row], source: JobSource
) -> list[str]:
    """Hold all stages against the first rows; returns warnings.

    Args:
        sample: the first rows that can be read; none: what depends on them is not looked at.
        source: where the job stands.

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
        self._sights = {INPUT: StageOutputs(rows or None, frozenset(), single=True)}
        self._seen: dict[str, frozenset[str]] = {INPUT: frozenset()}

    def all(self) -> list[str]:
        warnings: list[str] = []
        for stage in self._stages:
            before = [self._sights[name] for name in stage.sources]
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
            self._sights[stage.name] = self._after(stage, before, columns)
            self._seen[stage.name] = self._left(stage) | {stage.name}
        return warnings

    # --- what a stage leaves ----------------------------------------------------------------------

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
            answer, by_row = properties_of(stage.asking[0].schema), _by_row(stage)
            return StageOutputs(self._grouped(stage), answer, by_row and rooted, by_row and rooted)
        if kind == "expand":
            return self._expanded(stage, rows, rooted)
        single = before[0].single and kind != "broadcast"
        if kind == "loop":
            names = frozenset(asking.name for asking in stage.asking)
            return StageOutputs(rows, names, rooted, single)
        if kind == "embed":
            return StageOutputs(rows, frozenset(), rooted, single)
        asking = stage.asking[0]
        return StageOutputs(
            rows, properties_of(asking.schema), rooted, single and asking.job.answers == 1
        )

    def _expanded(self, stage: PreparedStage, rows: Rows | None, rooted: bool) -> StageOutputs:
        """Rows made of pieces of a text keep their fields, items add theirs."""
        if stage.items is None:
            return StageOutputs(rows, None, rooted)
        properties = self._of_items(stage)
        if rows is None or properties is None:
            return StageOutputs(None, properties or None, rooted)
        return StageOutputs([*rows, dict.fromkeys(properties)], properties, rooted)

    def _of_items(self, stage: PreparedStage) -> frozenset[str] | None:
        """The properties of the items that rows are made of; None where only they will tell."""
        source = self._by_name.get(stage.sources[0])
        schema = source.asking[0].schema if source is not None and source.asking else None
        if schema is None or stage.items is None or not PLAIN.fullmatch(stage.items.text):
            return None
        chain = stage.items.text.split(".")
        if chain[0] in (stage.sources[0], "answer"):
            chain = chain[1:]
        found: Any = schema.document
        for name in chain:
            found = found.get("properties", {}).get(name, {})
            found = found if isinstance(found, dict) else {}
        item = found.get("items")
        return None if not isinstance(item, dict) else _named(item, item.get("properties"))

    def _grouped(self, stage: PreparedStage) -> Rows | None:
        """The fields of the rows of a reduction."""
        if not _by_row(stage):
            return [{name.rpartition(".")[2]: None for name in stage.spec.by}]
        before = [self._sights[name] for name in stage.sources]
        if all(sight.rooted for sight in before):
            return self._sights[INPUT].rows
        return _together(before)

    # --- names ------------------------------------------------------------------------------------

    def _visible(self, stage: PreparedStage) -> frozenset[str]:
        """The stages whose answers the rows before a stage still have."""
        return frozenset().union(*(self._seen[name] for name in stage.sources))

    def _shared(self, stage: PreparedStage) -> frozenset[str]:
        """Those that have one answer for a whole group of a reduction."""
        seen = self._visible(stage) if _by_row(stage) else ()
        return frozenset(name for name in seen if self._sights[name].single)

    def _left(self, stage: PreparedStage) -> frozenset[str]:
        """Those that the rows after a stage still have, less itself."""
        if stage.spec.kind == "sql":
            return frozenset()
        return self._shared(stage) if stage.spec.kind == "reduce" else self._visible(stage)

    def _prompts(self, stage: PreparedStage, rows: Rows | None) -> Iterable[str]:
        """Check the prompts of a stage; gives warnings."""
        visible = self._shared(stage) if stage.spec.kind == "reduce" else self._visible(stage)
        names = {name: self._properties(name) for name in visible}
        if stage.spec.kind == "reduce":
            rows = self._grouped(stage)
            names |= dict.fromkeys(REDUCE_NAMES)
        elif stage.spec.kind == "loop":
            names |= dict.fromkeys(LOOP_NAMES | {asking.name for asking in stage.asking})
        for asking in stage.asking if rows is not None else ():
            if asking.prompt is not None:
                yield from asking.prompt.check(rows or (), names)

    def _check_by(self, stage: PreparedStage, rows: Rows | None) -> None:
        """Refuse a field to group by that no row has: all rows would be one group."""
        known = self._known(stage, rows)
        for number, name in enumerate(stage.spec.by):
            chain = tuple(name.split("."))
            missing = None if name == "id" else self._missing(stage, (chain,), known)
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
        known = None if rows is None else _fields(rows) | self._visible(stage)
        if known is not None and name not in known:
            raise JobError(
                f"stage {stage.name}: split.field: there is no field {name}",
                hint=_hint(name, known),
                at=self._source.position((*stage.at.path, "split", "field")),
            )

    def _check_items(self, stage: PreparedStage, items: Expression, rows: Rows | None) -> None:
        known = self._known(stage, rows)
        self._check_expression(stage, items, "items", None if known is None else known | {"answer"})

    def _check_until(self, stage: PreparedStage, until: Expression, rows: Rows | None) -> None:
        answers = [properties_of(asking.schema) for asking in stage.asking]
        known = None
        if rows is not None and None not in answers:
            known = _fields(rows) | self._visible(stage) | LOOP_NAMES
            known |= {asking.name for asking in stage.asking}
            known |= frozenset().union(*(answer for answer in answers if answer is not None))
        self._check_expression(stage, until, "until", known)

    def _known(self, stage: PreparedStage, rows: Rows | None) -> frozenset[str] | None:
        """The names of fields, stages, and properties of the answers that a stage reads."""
        answers = [self._sights[name].answer for name in stage.sources]
        if rows is None or None in answers:
            return None
        named = (answer for answer in answers if answer is not None)
        return frozenset().union(_fields(rows), self._visible(stage), *named)

    def _check_expression(
        self, stage: PreparedStage, found: Expression, key: str, known: frozenset[str] | None
    ) -> None:
        missing = self._missing(stage, found.uses, known)
        if missing is None:
            return
        word = missing[0].rpartition(".")[2]
        origin = self._source.origin(stage.at.path_of(key))
        raise JobError(
            f"{found.where}: there is no {missing[0]}",
            hint=missing[1],
            at=origin.word(found.text, max(found.text.find(word), 0)),
        )

    def _missing(
        self, stage: PreparedStage, chains: Iterable[Chain], known: frozenset[str] | None
    ) -> tuple[str, str] | None:
        """The first name that will not be there, and how to mend it."""
        for chain in chains:
            if known is not None and chain[0] not in known:
                return chain[0], _hint(chain[0], known)
            source = chain[0]
            if source == "answer" and stage.items is not None:
                source = stage.sources[0]
            if chain[0] in self._visible(stage) or chain[0] != source:
                lacks = missing_property_hint(chain, self._properties(source))
                if lacks is not None:
                    return ".".join(chain[:2]), lacks
        return None

    def _properties(self, name: str) -> frozenset[str] | None:
        """What ``NAME.`` may be followed by: properties of answers, and what tells of failures."""
        answer = self._sights[name].answer
        return answer | set(FIELDS) if answer else None

    # --- queries ----------------------------------------------------------------------------------

    def _check_query(self, stage: PreparedStage, query: str) -> tuple[str, ...] | None:
        """The columns that a query gives, None where only the rows will tell."""
        from bagent.stages.sql_validation import QueryError, validate_query  # it needs DuckDB

        if INPUT in stage.sources and not self._sample:
            return None
        tables = [table_of(self._stages, name) for name in stage.sources]
        found = validate_query(query, tables, self._sample)
        if not isinstance(found, QueryError):
            return found.columns
        path = stage.at.path_of("query")
        at = self._source.position(path)
        if found.offset is not None and stage.at.path:
            at = self._source.origin(path).word(query, found.offset)
        raise JobError(f"stage {stage.name}: query: {found.words}", hint=found.hint, at=at)


def _by_row(stage: PreparedStage) -> bool:
    return stage.spec.by == BY_ROW


def _together(sights: Sequence[StageOutputs]) -> Rows | None:
    """The rows of joined sources: each has the fields of all."""
    found: list[Mapping[str, Any]] = []
    seen: list[Rows] = []
    for sight in sights:
        if sight.rows is None:
            return None
        if not any(sight.rows is other for other in seen):
            seen.append(sight.rows)
            found.extend(sight.rows)
    return seen[0] if len(seen) == 1 else found


def _fields(rows: Rows) -> frozenset[str]:
    return frozenset(name for row in rows for name in row)


def _hint(name: str, known: Iterable[str]) -> str:
    """The nearest known name, else the known ones."""
    ordered = sorted(known)
    meant = nearest_name(name, ordered)
    return f"did you mean {meant}?" if meant else f"there are {', '.join(ordered[:_SHOWN])}"


_LACKS = re.compile(r"no field (?:board\.)?(?P<name>\w+)")


def check_boards(stages: Sequence[PreparedStage], sample: Sequence[Row], source: JobSource) -> None:
    """Refuse a section that needs what another one writes, before anything can be written.

    Looked at are sections that begin with an empty board: the first one, and all that write at
    the same time; where they read the input alone, so that their first prompts are known.

    Args:
        sample: the first rows of the input that can be read.

    Raises:
        JobError: the first prompt of a section cannot be rendered for any row.
    """
    for stage in stages:
        if stage.spec.kind != "loop" or stage.sources != (INPUT,):
            continue
        begin = stage.asking if stage.spec.parallel else stage.asking[:1]
        names = {asking.name for asking in stage.asking}
        for number, asking in enumerate(begin):
            missing = _missing(asking, sample)
            if missing in names:
                spec = stage.spec.sections[number]
                own = (*stage.at.path, "sections", number, "prompt")
                guard = f"{{% if board.{missing} is defined %}}...{{% endif %}}"
                raise JobError(
                    f"{asking.name}: in the first round {missing} has not written yet",
                    hint=f"{guard}, or {{{{ board }}}} for all that there is",
                    at=source.position(own if spec.prompt is not None else stage.at.prompt_at),
                )


def _missing(asking: StageRequest, sample: Sequence[Row]) -> str | None:
    """The name that the first prompt lacks for every row; None where some row has its prompt."""
    if asking.prompt is None:
        return None
    extra = {"board": Board(), "round": 1, "section": asking.name}
    missing = None
    for row in sample:
        try:
            if asking.prompt.raw:
                asking.prompt.render_raw(row.data, extra)
            else:
                asking.prompt.render(row.data, extra)
        except TemplateFailure as failure:
            lacks = _LACKS.search(str(failure))
            if lacks is None:
                return None
            missing = lacks["name"]
        else:
            return None
    return missing


Descent = tuple[str, ...]
"""What the rows of a stage go back to: the input or a reduction that brought rows together, and
then each stage that made several rows of one."""


def check_joins(stages: Sequence[PreparedStage], source: JobSource) -> None:
    """Refuse a stage that reads several others of which no row belongs to just one row of another.

    Rows of a query are joined by the ids that it gives, which only the run knows.

    Raises:
        JobError: at the source that cannot be joined.
    """
    known: dict[str, Descent | None] = {INPUT: (INPUT,)}
    for stage in stages:
        before = [known[name] for name in stage.sources]
        if stage.spec.kind not in ("reduce", "sql"):
            _check(stage, before, source)
        known[stage.name] = _after(stage, before)


def _check(stage: PreparedStage, before: Sequence[Descent | None], source: JobSource) -> None:
    first, base = before[0], stage.sources[0]
    for number, (name, other) in enumerate(zip(stage.sources, before, strict=True)):
        if first is None or other is None or other == first[: len(other)]:
            continue
        words, hint = (
            f"{name} brought rows together, none of its rows belongs to one of {base}",
            "a sql stage joins any rows: SELECT ... FROM a, b",
        )
        if other[0] == first[0]:
            words = f"{name} may have several rows for one of {base}"
            hint = f"write {name} first in from, or reduce it by: id before"
        raise JobError(
            f"stage {stage.name}: from: {words}",
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
        several = stage.asking[0].job.answers > 1
    return (*first, stage.name) if several and first is not None else first


def _reduced(stage: PreparedStage, before: Sequence[Descent | None]) -> Descent | None:
    if stage.spec.by != BY_ROW:
        return (stage.name,)
    if None in before:
        return None
    if any(one is not None and one[0] != INPUT for one in before):
        return (stage.name,)
    return (INPUT,) if stage.goal == 1 else (INPUT, stage.name)
