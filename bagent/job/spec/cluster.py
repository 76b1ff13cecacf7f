"""The batch job that ``bagent submit`` and the parsl executor start engines with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from bagent.batch_env import SchedulerName
from bagent.job.spec.types import (
    Choice,
    Duration,
    Flag,
    IntegerKind,
    Kind,
    NumberKind,
    Section,
    Text,
    TextList,
    TextMap,
    invalid,
)
from bagent.job.validation import LoadContext
from bagent.text.suggest import describe_value
from bagent.types import Json

Launcher = Literal["srun", "pals", "hydra", "openmpi", "ssh"]
Staging = Literal["none", "copy", "sbcast", "mpi"]

_BLANK = re.compile(r"[\s\x00-\x1f\x7f]")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")


@dataclass(frozen=True)
class PortsKind(Kind):
    """A first port, a range ``8000-8003``, or a list of ports."""

    def read(self, value: Any, context: LoadContext | None) -> tuple[int, ...]:
        """Return the ports, each from 1 to 65535."""
        if isinstance(value, str) and (match := _RANGE.fullmatch(value.strip())):
            first, last = int(match[1]), int(match[2])
            if not 1 <= first <= last <= 65535:
                raise invalid(
                    f"expected a range of ports within 1-65535, got {describe_value(value)}"
                )
            return tuple(range(first, last + 1))
        items = value if isinstance(value, (list, tuple)) else [value]
        ports = [IntegerKind(1, 65535).read(item, context) for item in items]
        return tuple(port for port in ports if isinstance(port, int))

    def dump(self, value: Any) -> Json:
        """Return the ports as a list."""
        return list(value)

    def describe(self) -> Json:
        """Return a port, a range, or a list of ports."""
        port = {"type": "integer", "minimum": 1, "maximum": 65535}
        text = {"type": "string", "pattern": rf"^\s*{_RANGE.pattern}\s*$|\$\{{"}
        return {"anyOf": [port, text, {"type": "array", "items": port}]}


@dataclass(frozen=True)
class SchedulerText(Text):
    """One word for a scheduler's options: a blank in it would begin another option, a line end
    another line of the script."""

    def read(self, value: Any, context: LoadContext | None) -> str:
        """Return the word."""
        text = super().read(value, context)
        if _BLANK.search(text):
            raise invalid(
                f"expected one word without blanks or line ends, got {describe_value(text)}"
            )
        return text


@dataclass(frozen=True)
class Lines(TextList):
    """Texts of one line each."""

    def read(self, value: Any, context: LoadContext | None) -> tuple[str, ...]:
        """Return the lines."""
        texts = super().read(value, context)
        for text in texts:
            if _CONTROL.search(text):
                raise invalid(
                    f"expected single lines, got {describe_value(text)}", "one entry for each line"
                )
        return texts


class ClusterSpec(Section):
    """The batch job that starts the engines and the run."""

    misplaced: ClassVar[Mapping[str, str]] = {
        "partition": "did you mean queue?",
        "time": "did you mean walltime?",
        "project": "did you mean account?",
    }

    scheduler: Annotated[SchedulerName | None, Choice(SchedulerName)] = Field(
        default=None, description="Which scheduler takes the script."
    )
    site: Annotated[str | None, SchedulerText(empty=False)] = Field(
        default=None, description="A known site, whose habits are the defaults."
    )
    account: Annotated[str | None, SchedulerText(empty=False)] = Field(
        default=None, description="The account or project that pays."
    )
    queue: Annotated[str | None, SchedulerText(empty=False)] = Field(
        default=None, description="The queue or partition."
    )
    qos: Annotated[str | None, SchedulerText(empty=False)] = Field(
        default=None, description="SLURM's quality of service."
    )
    reservation: Annotated[str | None, SchedulerText(empty=False)] = Field(
        default=None, description="A reservation to run in."
    )
    constraint: Annotated[str | None, SchedulerText(empty=False)] = Field(
        default=None, description="SLURM's node features."
    )
    filesystems: Annotated[str | None, SchedulerText(empty=False)] = Field(
        default=None, description="PBS file systems that must be up.", examples=["home:flare"]
    )
    nodes: Annotated[int | None, IntegerKind(1)] = Field(
        default=None, description="How many nodes."
    )
    jobs: Annotated[int | None, IntegerKind(1, 1000)] = Field(
        default=None, description="Batch jobs that --executor parsl keeps going at once; default 1."
    )
    chunks: Annotated[int | None, IntegerKind(1, 100_000)] = Field(
        default=None, description="Into how many chunks --executor parsl divides the rows."
    )
    exclude: Annotated[tuple[str, ...], Lines()] = Field(
        default=(), description="Nodes never to be used."
    )
    reserve_node: Annotated[bool, Flag()] = Field(
        default=False, description="Keep the first node free of engines, for the run itself."
    )
    walltime: Annotated[float | None, Duration(clock=True)] = Field(
        default=None, description="Time limit of the batch job.", examples=["2h", "02:00:00"]
    )
    engine: Annotated[tuple[str, ...], TextList(1)] = Field(
        default=(), description="The command that starts one engine.", examples=["vllm serve MODEL"]
    )
    engines_per_node: Annotated[int | None, IntegerKind(1)] = Field(
        default=None, description="Engines on each node."
    )
    nodes_per_engine: Annotated[int | None, IntegerKind(1)] = Field(
        default=None, description="Nodes that one large engine spans."
    )
    ports: Annotated[tuple[int, ...], PortsKind()] = Field(
        default=(), description="The first port, a range, or a list.", examples=["8000-8003"]
    )
    api_servers: Annotated[int | None, IntegerKind(1)] = Field(
        default=None, description="API server processes of each engine (vLLM)."
    )
    restarts: Annotated[int | None, IntegerKind(0, 1000)] = Field(
        default=None, description="How often a dead engine is started again; default 2."
    )
    min_fraction: Annotated[float | None, NumberKind(0, 1, above=True)] = Field(
        default=None, description="The share of engines that is enough to begin; default 0.9."
    )
    start_timeout: Annotated[float | None, Duration()] = Field(
        default=None, description="How long engines may take to start; default 30m."
    )
    requeues: Annotated[int | None, IntegerKind(0, 1000)] = Field(
        default=None, description="How often a job that ran out of time goes on; default 5."
    )
    launcher: Annotated[Launcher | None, Choice(Launcher)] = Field(
        default=None, description="What starts a process on every node."
    )
    gpus_per_node: Annotated[int | None, IntegerKind(0)] = Field(
        default=None,
        description="GPUs that are requested of each node and shared evenly by its engines.",
    )
    gpu_mask: Annotated[str | None, SchedulerText(empty=False)] = Field(
        default=None, description="The variable that picks GPUs.", examples=["CUDA_VISIBLE_DEVICES"]
    )
    stage: Annotated[tuple[str, ...], Lines()] = Field(
        default=(), description="What is copied to each node's own disk before the start."
    )
    stage_by: Annotated[Staging | None, Choice(Staging)] = Field(
        default=None, description="How it gets there: each node copies, sbcast, or MPI."
    )
    stage_to: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="The folder on each node's own disk; {stage} in commands."
    )
    modules: Annotated[tuple[str, ...], Lines()] = Field(
        default=(), description="Environment modules to load."
    )
    env: Annotated[Mapping[str, str], TextMap()] = Field(
        default_factory=dict, description="Environment of the engines.", repr=False
    )
    setup: Annotated[tuple[str, ...], Lines()] = Field(
        default=(), description="Shell lines before the engines start."
    )
    node_setup: Annotated[tuple[str, ...], Lines()] = Field(
        default=(), description="Shell lines on every node, before its engines start."
    )
    directives: Annotated[tuple[str, ...], Lines()] = Field(
        default=(), description="Further lines for the scheduler, without #SBATCH or #PBS."
    )

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        self._check_texts()
        if self.engines_per_node and self.nodes_per_engine and self.nodes_per_engine > 1:
            raise invalid(
                "engines_per_node and nodes_per_engine exclude each other", key="nodes_per_engine"
            )
        return self

    def _check_texts(self) -> None:
        """Refuse what would break the batch script that is made of it."""
        if len(self.engine) == 1:
            try:
                shlex.split(self.engine[0])
            except ValueError as error:
                raise invalid(f"not a command line: {error}".lower(), key="engine") from None
        if self.stage_to is not None and _CONTROL.search(self.stage_to):
            raise invalid("expected a path on one line", key="stage_to")
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                raise invalid(f"{describe_value(name)} cannot name a variable", key="env")
