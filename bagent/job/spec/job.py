"""The whole job file as one frozen model.

It defines the types that other packages read, the messages for invalid files, and
``schemas/job.schema.json``. Only :func:`bagent.job.load.load_job` makes a :class:`Job` from a file;
it adds positions in :attr:`Job.source`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from bagent.errors import Position
from bagent.job.env_substitution import VariableUse
from bagent.job.redaction import written_secrets
from bagent.job.spec.agent import RUNS_CODE, AgentSpec, ToolSpec
from bagent.job.spec.backend import BackendRef
from bagent.job.spec.cluster import ClusterSpec
from bagent.job.spec.limits import LimitsSpec, PricesSpec
from bagent.job.spec.output import BatchingSpec, OutputSpec, ResultsSpec, SamplingSpec
from bagent.job.spec.paths import PathKind, ResolvedPath, display_path
from bagent.job.spec.prompt import InputSpec, PromptSpec
from bagent.job.spec.stages import StagePart, StageSpec, TopologySpec, check_order
from bagent.job.spec.types import Flag, IntegerKind, Kind, Section, Text, invalid
from bagent.job.validation import LoadContext, Origin
from bagent.job.yaml.parser import YamlMap, YamlSpot, find
from bagent.text.suggest import describe_value
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.job.spec.stages import StagePart

_NAME = re.compile(r"[^\s./\\\x00-\x1f\x7f-][^/\\\x00-\x1f\x7f]*")
_LONGEST_NAME = 200


@dataclass(frozen=True)
class NameKind(Kind):
    """A run's name: it becomes a folder, so no slash, no leading dot or dash."""

    def read(self, value: Any, context: LoadContext | None) -> str:
        """Return the name, without blanks around it."""
        text = Text(empty=False).read(value, context).strip()
        if not _NAME.fullmatch(text) or len(text.encode("utf-8", "replace")) > _LONGEST_NAME:
            raise invalid(
                f"{describe_value(text).removeprefix('the text ')} cannot name a run",
                "no / or \\, no . or - at its start, at most 200 bytes",
            )
        return text

    def describe(self) -> Json:
        """Return text of at most 200 characters."""
        return {"type": "string", "minLength": 1, "maxLength": _LONGEST_NAME}


@dataclass(frozen=True, slots=True)
class JobSource:
    """Where a job was read from.

    ``file`` is the job file as given, None for a text. ``folder`` is what its paths are relative
    to, ``cwd`` the current folder at load; both absolute. ``text`` is the file's text, ``data``
    its values with spots after all options. ``texts`` holds the content of prompt, schema and
    tool files by absolute path. ``variables`` are the uses of ``${VAR}``. ``input_folders`` are the
    URLs of the folders in buckets that hold the input's files.
    """

    file: Path | None = None
    folder: Path = Path("/")
    cwd: Path = Path("/")
    text: str = ""
    data: Json = None
    root: YamlSpot = field(default_factory=lambda: YamlSpot("job"))
    texts: Mapping[Path, str] = field(default_factory=dict)
    variables: tuple[VariableUse, ...] = ()
    input_folders: tuple[str, ...] = ()

    @property
    def secrets(self) -> frozenset[str]:
        """Values of variables that are not to be shown, see :mod:`bagent.job.redaction`."""
        return written_secrets(self.variables)

    def spot(self, path: tuple[str | int, ...]) -> YamlSpot:
        """Return the spot of the deepest value on ``path`` that stands in the file."""
        return find(self.data, path, self.root)[0]

    def origin(self, path: tuple[str | int, ...]) -> Origin:
        """Return the position of the text at ``path`` in the file."""
        spot = self.spot(path)
        if not spot.line:
            return Origin(spot.file)
        return Origin(spot.file, self.text, spot.start, spot.end, spot.line, spot.column)

    def display_path(self, location: ResolvedPath) -> str:
        """Return the path of ``location`` as it can be opened from the current folder."""
        return display_path(location.path, self.cwd)

    def position(self, path: tuple[str | int, ...]) -> Position:
        """Return the position of that value."""
        return self.spot(path).value_at


class Job(Section):
    """A job of bagent: rows through prompts to validated answers."""

    misplaced: ClassVar[Mapping[str, str]] = {
        "schema": "it belongs to output: {schema: ...}",
        "temperature": "it belongs to sampling: {temperature: ...}",
        "max_tokens": "it belongs to sampling: {max_tokens: ...}",
        "seed": "it belongs to sampling: {seed: ...}",
        "concurrency": "it belongs to limits: {concurrency: ...}",
        "timeout": "it belongs to limits: {timeout: ...}",
        "retries": "it belongs to limits: {retries: ...}",
        "tools": "it belongs to agent: {tools: [...]}",
        "system": "it belongs to prompt: {system: ..., user: ...}",
        "user": "it belongs to prompt: {user: ...}",
        "messages": "it belongs to prompt: {messages: [...]}",
        "n": "did you mean answers?",
        "base_url": "it belongs to backend: {url: ...}",
        "url": "it belongs to backend: {url: ...}",
        "api": "it belongs to backend: {url: ..., api: responses}",
        "api_key": "it belongs to backend: {url: ..., api_key_env: NAME_OF_THE_VARIABLE}",
        "api_key_env": "it belongs to backend: {url: ..., api_key_env: ...}",
        "headers": "it belongs to backend: {url: ..., headers: {...}}",
        "top_p": "it belongs to sampling: {top_p: ...}",
        "stop": "it belongs to sampling: {stop: ...}",
        "extra": "it belongs to sampling: {extra: {...}}",
        "max_turns": "it belongs to agent: {max_turns: ...}",
        "steps": "it belongs to topology: {name: pipeline, steps: [...]}",
        "sections": "it belongs to topology: {name: blackboard, sections: [...]}",
        "judge": "it belongs to topology: {name: judge, judge: {prompt: ...}}",
        "reduce": "it belongs to topology: {name: map_reduce, reduce: {prompt: ...}}",
        "plan": "it belongs to topology: {name: plan_map_reduce, plan: {prompt: ...}}",
        "vote": "it belongs to topology: {name: self_consistency, vote: FIELD}",
        **{
            key: f"it belongs to topology: {{name: ..., {key}: ...}}, or to a stage"
            for key in ("fanin", "by", "max_rounds", "until", "parallel", "on_failure")
        },
    }

    name: Annotated[str, NameKind()] = Field(
        default="job", description="Run name; default: the file name."
    )
    backend: BackendRef | None = Field(
        default=None,
        description="Which server answers: a name, a URL, or a mapping around one.",
        examples=["vllm", "vllm://host:8000", "https://api.example.org/v1", "sim://?replicas=2"],
    )
    hostfile: Annotated[ResolvedPath | None, PathKind()] = Field(
        default=None, description="A fleet instead of one URL."
    )
    model: Annotated[str, Text(empty=False)] = Field(
        default="auto", description="The model; auto is what the endpoint serves."
    )
    input: InputSpec | None = Field(
        default=None,
        description="Where rows come from: path, glob, list, -, {files: ...} or {sql: ...}.",
        examples=["rows.jsonl", {"files": "papers/*.txt"}],
    )
    id: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="The field that names a row; default: id or custom_id if present."
    )
    where: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="A DuckDB SQL condition over the input."
    )
    prompt: PromptSpec | None = Field(
        default=None,
        description="What is said to the model; {{ field }} stands for a field of the row.",
        examples=["Summarise: {{ text }}"],
    )
    answers: Annotated[int, IntegerKind(1, 1000)] = Field(default=1, description="Answers per row.")
    output: OutputSpec = Field(
        default_factory=OutputSpec, description="What an answer must look like."
    )
    sampling: SamplingSpec = Field(
        default_factory=SamplingSpec, description="How tokens are drawn."
    )
    batching: BatchingSpec = Field(
        default_factory=BatchingSpec, description="How rows become requests."
    )
    dedupe: Annotated[bool | Literal["auto"], Flag(("auto",))] = Field(
        default="auto", description="Equal requests are sent once: auto does so at temperature 0."
    )
    stream: Annotated[bool | Literal["auto"], Flag(("auto",))] = Field(
        default="auto", description="Stream answers: auto does so where it buys something."
    )
    agent: AgentSpec | None = Field(default=None, description="Turns and tools.")
    topology: TopologySpec = Field(
        default_factory=lambda: TopologySpec(name="map"), description="A short name for stages."
    )
    stages: tuple[StageSpec, ...] = Field(default=(), description="Stages written out.")
    limits: LimitsSpec = Field(
        default_factory=LimitsSpec, description="How much at once, how often, how long, how dear."
    )
    prices: PricesSpec | None = Field(
        default=None,
        description="What tokens cost, in dollars per million.",
        examples=[{"input": 0.15, "output": 0.6}],
    )
    results: ResultsSpec = Field(default_factory=ResultsSpec, description="Where results go.")
    cluster: ClusterSpec = Field(
        default_factory=ClusterSpec, description="For bagent submit and parsl."
    )
    allow_code: Annotated[bool, Flag()] = Field(
        default=False, description="Allow the tools python_eval and shell."
    )

    _source: JobSource = PrivateAttr(default_factory=JobSource)

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Drop the keys that begin with ``x-``, which hold YAML anchors."""
        if not isinstance(data, dict):
            return data
        values = without(data, [key for key in data if key.startswith("x-")])
        if values.get("results") is None:
            # Read like a written one, so that its folder is made absolute.
            values["results"] = YamlMap()
        return values

    @model_validator(mode="after")
    def _check(self) -> Job:
        if self.stages and self.topology.name != "map":
            raise invalid("topology and stages exclude each other", key="topology")
        command = self.agent.command if self.agent else ()
        try:
            check_order(self.stages, has_prompt=bool(self.prompt or command))
        except type(invalid("")) as error:
            context = error.context or {}
            raise invalid(
                context["message"], context["hint"], key=f"stages.{context['key']}"
            ) from None
        self._check_code()
        return self

    def _check_code(self) -> None:
        for path, tool in self.all_tools():
            agent_allows = self.agent is not None and self.agent.allow_code
            if tool.builtin in RUNS_CODE and not (self.allow_code or agent_allows):
                hint = "write allow_code: true if the job may run code on this machine"
                raise invalid(f"the tool {tool.builtin} runs code", hint, key=path)

    def all_tools(self) -> list[tuple[str, ToolSpec]]:
        """Return every tool of the job and of its stages, with its dotted path."""
        agents = [("agent", self.agent)]
        agents += [(f"stages.{index}.agent", item.agent) for index, item in enumerate(self.stages)]
        return [
            (f"{path}.tools.{index}", tool)
            for path, agent in agents
            if agent is not None
            for index, tool in enumerate(agent.tools)
        ]

    @property
    def source(self) -> JobSource:
        """Where the job was read from."""
        return self._source

    def with_source(self, source: JobSource) -> Self:
        """Return the same job with ``source``."""
        job = self.model_copy()
        job._source = source
        return job

    def for_stage(self, stage: StagePart) -> Self:
        """Return the job as ``stage`` sees it: the keys that the stage sets, over the job's.

        In output, sampling, batching and limits single keys are replaced; prompt, backend and
        agent as a whole. A backend of the stage puts the job's hostfile aside, and the other way.
        """
        changes: dict[str, Any] = {}
        for key in ("prompt", "model", "backend", "hostfile", "answers", "agent"):
            if getattr(stage, key) is not None:
                changes[key] = getattr(stage, key)
        for key in ("output", "sampling", "batching", "limits"):
            part = getattr(stage, key)
            if part is not None:
                changes[key] = _merged(getattr(self, key), part)
        if "backend" in changes and "hostfile" not in changes and stage.backend is not None:
            changes["hostfile"] = None if stage.backend.base else self.hostfile
        if "hostfile" in changes and "backend" not in changes and self.backend is not None:
            changes["backend"] = self.backend.without_url()
        return self.model_copy(update=changes)

    def fingerprint_parts(self) -> dict[str, str]:
        """SHA-256 (hex) of each part that changes answers; see :mod:`bagent.job.fingerprint`."""
        from bagent.job.fingerprint import fingerprint_parts

        return fingerprint_parts(self)

    def masked(self) -> dict[str, Json]:
        """Return the resolved job as JSON values with secrets masked."""
        from bagent.job.redaction import masked

        return masked(self)


def without(data: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Return a copy of ``data`` less ``keys``; spots are kept."""
    if not isinstance(data, YamlMap):
        return {key: value for key, value in data.items() if key not in keys}
    remaining = YamlMap()
    for key, value in data.items():
        if key not in keys:
            remaining.put(key, value, data.spots[key])
    return remaining


def _merged(base: Section, part: Section) -> Section:
    changes = {}
    for key in part.model_fields_set:
        value = getattr(part, key)
        old = getattr(base, key)
        changes[key] = _merged(old, value) if isinstance(value, Section) else value
    return base.model_copy(update=changes)


KeyPath = tuple[str | int, ...]
"""The position of a value in a job file."""


def stage_parts(job: Job) -> Iterator[tuple[KeyPath, StagePart]]:
    """Yield the stages of ``job``, their sections and its topology's parts, with their paths."""
    for number, stage in enumerate(job.stages):
        yield ("stages", number), stage
        for index, section in enumerate(stage.sections):
            yield ("stages", number, "sections", index), section
    topology = job.topology
    for key, part in (
        ("plan", topology.plan),
        ("reduce", topology.reduce),
        ("judge", topology.judge),
    ):
        if part is not None:
            yield ("topology", key), part
    for key, parts in (("steps", topology.steps), ("sections", topology.sections)):
        for index, part in enumerate(parts):
            yield ("topology", key, index), part
