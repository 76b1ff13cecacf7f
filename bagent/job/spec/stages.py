"""Stages, and the topologies that expand to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from bagent.job.spec.agent import AgentSpec
from bagent.job.spec.backend import BackendRef
from bagent.job.spec.limits import LimitsSpec
from bagent.job.spec.output import BatchingSpec, OutputSpec, SamplingSpec
from bagent.job.spec.paths import PathKind, ResolvedPath
from bagent.job.spec.prompt import PromptSpec
from bagent.job.spec.types import (
    Choice,
    Flag,
    FreeForm,
    IntegerKind,
    Section,
    Text,
    TextList,
    invalid,
)
from bagent.text.suggest import did_you_mean
from bagent.types import Json

StageKind = Literal["map", "broadcast", "expand", "reduce", "sql", "loop", "embed"]
OnFailure = Literal["include", "drop", "stop"]
Topology = Literal[
    "map",
    "broadcast",
    "reduce",
    "tree_reduce",
    "map_reduce",
    "plan_map_reduce",
    "pipeline",
    "blackboard",
    "self_consistency",
    "judge",
]

RESERVED: frozenset[str] = frozenset({"input", "row", "responses", "n", "level", "loop", "board"})
"""Names that mean something else inside a prompt, so no stage may have them."""

_STAGE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ONLY_FOR: Mapping[str, tuple[str, ...]] = {
    "fanin": ("reduce",),
    "by": ("reduce",),
    "until": ("reduce", "loop"),
    "items": ("expand",),
    "split": ("expand",),
    "query": ("sql",),
    "sections": ("loop",),
    "max_rounds": ("loop",),
    "parallel": ("loop",),
}


class StagePart(Section):
    """The keys of a job that a stage may change; what is not given is the job's."""

    prompt: PromptSpec | None = Field(default=None, description="What is said to the model.")
    model: Annotated[str | None, Text(empty=False)] = Field(default=None, description="The model.")
    backend: BackendRef | None = Field(default=None, description="Which server answers.")
    hostfile: Annotated[ResolvedPath | None, PathKind()] = Field(
        default=None, description="A fleet."
    )
    select: Annotated[Mapping[str, Json] | None, FreeForm(mapping=True)] = Field(
        default=None, description="Only endpoints with these tags.", examples=[{"role": "critic"}]
    )
    answers: Annotated[int | None, IntegerKind(1, 1000)] = Field(
        default=None, description="Answers per row."
    )
    output: OutputSpec | None = Field(default=None, description="What an answer must look like.")
    agent: AgentSpec | None = Field(default=None, description="Turns and tools.")
    sampling: SamplingSpec | None = Field(default=None, description="How tokens are drawn.")
    batching: BatchingSpec | None = Field(default=None, description="How rows become requests.")
    limits: LimitsSpec | None = Field(default=None, description="How much, how often, how long.")
    on_failure: Annotated[OnFailure | None, Choice(OnFailure)] = Field(
        default=None, description="What becomes of rows that failed before."
    )


class BoardSection(StagePart):
    """One section of a shared board and the model that writes it."""

    name: Annotated[str, Text(empty=False)] = Field(description="The section's name.")

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Expand a text to the name."""
        return {"name": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _check(self) -> BoardSection:
        if self.on_failure is not None:
            raise invalid(
                "a section reads no rows", "write on_failure at the stage", key="on_failure"
            )
        return self


class SplitSpec(Section):
    """Cut a long text into rows."""

    field: Annotated[str, Text(empty=False)] = Field(description="The field with the text.")
    tokens: Annotated[int, IntegerKind(1)] = Field(description="Tokens of a piece.")
    overlap: Annotated[int, IntegerKind(0)] = Field(
        default=0, description="Tokens shared with the piece before."
    )

    @model_validator(mode="after")
    def _check(self) -> SplitSpec:
        if self.overlap >= self.tokens:
            raise invalid(f"overlap must be less than tokens ({self.tokens})", key="overlap")
        return self


class StageSpec(StagePart):
    """One stage."""

    kind: Annotated[StageKind, Choice(StageKind)] = Field(description="What the stage does.")
    name: Annotated[str | None, Text(empty=False)] = Field(
        default=None,
        description="Its name in prompts and results; default: kind and number, as map1.",
    )
    from_: Annotated[tuple[str, ...], TextList()] = Field(
        default=(),
        alias="from",
        description="Stages that it reads, or input; default: the one before.",
    )
    on_failure: Annotated[OnFailure, Choice(OnFailure)] = Field(
        default="include", description="What becomes of rows that failed before."
    )
    fanin: Annotated[int | None, IntegerKind(2)] = Field(
        default=None, description="reduce: answers in one group; more make a tree."
    )
    by: Annotated[tuple[str, ...], TextList()] = Field(
        default=(), description="reduce: fields to group by."
    )
    until: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="reduce, loop: the condition that ends it."
    )
    items: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="expand: an expression on the answer that gives the list of rows."
    )
    split: SplitSpec | None = Field(default=None, description="expand: cut a long text into rows.")
    query: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="sql: a DuckDB query over earlier stages."
    )
    sections: tuple[BoardSection, ...] = Field(
        default=(), description="loop: sections of the board."
    )
    max_rounds: Annotated[int, IntegerKind(1, 10_000)] = Field(
        default=10, description="loop: most rounds."
    )
    parallel: Annotated[bool, Flag()] = Field(
        default=True,
        description="loop: sections write at the same time; false: in order, each sees the last.",
    )

    @model_validator(mode="after")
    def _check(self) -> StageSpec:
        for key, kinds in _ONLY_FOR.items():
            if key in self.model_fields_set and self.kind not in kinds:
                raise invalid(
                    f"{key} belongs to kind {' or '.join(kinds)}, not {self.kind}", key=key
                )
        if self.name is not None and not _STAGE_NAME.fullmatch(self.name):
            raise invalid(
                f"the name {self.name} cannot be used in prompts", "letters, digits, _", key="name"
            )
        if self.name in RESERVED:
            raise invalid(f"the name {self.name} means something else in prompts", key="name")
        self._check_needed()
        return self

    def _check_needed(self) -> None:
        if self.kind == "sql" and self.query is None:
            raise invalid("a sql stage needs query")
        if self.kind == "loop" and not self.sections:
            raise invalid("a loop stage needs sections")
        if self.kind == "expand" and (self.items is None) == (self.split is None):
            raise invalid("an expand stage needs one of items and split")


class TopologySpec(Section):
    """A short name for stages, with their own keys."""

    short_form: ClassVar[list[Json]] = [Choice(Topology).describe()]

    name: Annotated[Topology, Choice(Topology)] = Field(description="Which one.")
    fanin: Annotated[int | None, IntegerKind(2)] = Field(
        default=None, description="reduce: answers in one group; more make a tree."
    )
    by: Annotated[tuple[str, ...], TextList()] = Field(
        default=(), description="reduce: fields to group by."
    )
    plan: StagePart | None = Field(
        default=None, description="plan_map_reduce: how the planner differs."
    )
    reduce: StagePart | None = Field(default=None, description="How the reducing stage differs.")
    judge: StagePart | None = Field(
        default=None, description="judge: how the judging stage differs."
    )
    steps: tuple[StagePart, ...] = Field(
        default=(), description="pipeline: the steps, one after another."
    )
    sections: tuple[BoardSection, ...] = Field(default=(), description="blackboard: the sections.")
    max_rounds: Annotated[int, IntegerKind(1, 10_000)] = Field(
        default=10, description="blackboard: most rounds."
    )
    until: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="blackboard: the condition that ends it."
    )
    parallel: Annotated[bool, Flag()] = Field(
        default=True, description="blackboard: sections write at the same time; false: in order."
    )
    vote: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="self_consistency: the field of the answer that is voted on."
    )
    on_failure: Annotated[OnFailure | None, Choice(OnFailure)] = Field(
        default=None,
        description="What becomes of rows that failed before, for all parts; a part may differ."
        " Unset: drop before a judge, a vote or a reduce, else include.",
    )

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Expand a text to the name."""
        return data if isinstance(data, dict) else {"name": data}


def check_order(stages: tuple[StageSpec, ...], *, has_prompt: bool) -> None:
    """Check that names are unique, ``from`` names earlier stages and prompts are there.

    Raises:
        PydanticCustomError: with ``key`` ``INDEX`` of the stage at fault.
    """
    seen: list[str] = []
    for index, stage in enumerate(stages):
        name = stage.name or f"{stage.kind}{index + 1}"
        if name in seen:
            raise invalid(f"two stages are named {name}", key=f"{index}.name")
        for source in stage.from_:
            if source != "input" and source not in seen:
                meant = did_you_mean(source, ["input", *seen])
                raise invalid(
                    f"stage {name} reads {source}, which is no stage before it",
                    f"{meant} before it: {' '.join(['input', *seen])}".lstrip(),
                    key=f"{index}.from",
                )
        asks = stage.kind in ("map", "broadcast", "reduce")
        command = stage.agent.command if stage.agent else ()
        if asks and not (stage.prompt or has_prompt or command):
            raise invalid(f"stage {name} has no prompt", key=str(index))
        seen.append(name)
