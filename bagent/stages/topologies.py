"""Topologies, which are short names for stages, and their expansion to stages.

The job's own ``prompt``, ``agent``, ``answers`` and ``output.schema`` belong to the stage that does
the main work; planner, reducer and judge have their own, and share everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from bagent.errors import JobError
from bagent.job.redaction import mask_text
from bagent.job.spec.job import Job
from bagent.job.spec.output import OutputSpec
from bagent.job.spec.stages import OnFailure, StagePart, StageSpec, TopologySpec
from bagent.stages import sql_recipes
from bagent.stages.row import INPUT
from bagent.types import Json

TREE_FANIN = 10
"""Answers in a group of ``tree_reduce`` where the job sets no ``fanin``."""

VOTES = 5
"""Answers per row of ``self_consistency`` where the job sets none."""

PLAN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {}, "minItems": 1}},
    "required": ["items"],
    "additionalProperties": False,
}
"""The schema of a planner's answer where the job has none."""

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class StageAt:
    """One stage: its definition with name and sources filled in, and its path in the job file."""

    spec: StageSpec
    path: KeyPath
    prompt_at: KeyPath
    """The path of its prompt: its own, else the job's."""

    @property
    def name(self) -> str:
        """Its name in prompts and results."""
        return self.spec.name or self.spec.kind

    def path_of(self, key: str) -> KeyPath:
        """Return the path of its ``key`` in the job file."""
        return (*self.path, key) if self.path[:1] == ("stages",) else ("topology", key)

    @property
    def sources(self) -> tuple[str, ...]:
        """The stages that it reads, or ``input``."""
        return self.spec.from_


@dataclass(frozen=True)
class StagedJob:
    """A job as stages; ``base`` is the job that the stages change."""

    base: Job
    stages: tuple[StageAt, ...]


def is_single_map(job: Job) -> bool:
    """Return whether the job is one ``map`` over its rows."""
    return not job.stages and job.topology.name == "map"


def expand_topology(job: Job) -> StagedJob:
    """Expand ``job`` to its stages, in order.

    Raises:
        JobError: the topology lacks something.
    """
    if job.stages:
        return StagedJob(job, _linked(_written(job)))
    made = _MAKERS[job.topology.name](job, job.topology)
    base = job.model_copy(
        update={
            "prompt": None,
            "agent": None,
            "answers": 1,
            "output": job.output.model_copy(update={"schema_": None}),
        }
    )
    return StagedJob(base, _linked(made))


def _written(job: Job) -> list[StageAt]:
    stages: list[StageAt] = []
    for number, spec in enumerate(job.stages):
        name = spec.name or f"{spec.kind}{number + 1}"
        path = ("stages", number)
        at: KeyPath = (*path, "prompt") if spec.prompt is not None else ("prompt",)
        if spec.kind == "expand" and spec.prompt is not None:
            # A map stage asks with its prompt first; then the answer becomes rows.
            asks = _changed(spec, kind="map", name=f"{name}_answer", items=None, split=None)
            stages.append(StageAt(asks, path, at))
            spec = _changed(spec, prompt=None, from_=(f"{name}_answer",))
        stages.append(StageAt(_changed(spec, name=name), path, at))
    return stages


def _changed(spec: StageSpec, **keys: Any) -> StageSpec:
    return spec.model_copy(update=keys)


def _linked(stages: list[StageAt]) -> tuple[StageAt, ...]:
    """Give each stage without a source the one before it, the first one the input."""
    linked: list[StageAt] = []
    before = INPUT
    for at in stages:
        spec = at.spec if at.spec.from_ else _changed(at.spec, from_=(before,))
        linked.append(StageAt(spec, at.path, at.prompt_at))
        before = at.name
    return tuple(linked)


# --- the topologies -----------------------------------------------------------------------------


def _stage(kind: str, name: str, part: StagePart | None = None, **keys: Any) -> StageSpec:
    """Make a stage with the keys that ``part`` sets; ``keys`` take precedence."""
    values = {key: getattr(part, key) for key in part.model_fields_set} if part else {}
    values.update({key: value for key, value in keys.items() if value is not None})
    names = {"kind", "name", *values} & set(StageSpec.model_fields)
    fields = {key: value for key, value in values.items() if key in StageSpec.model_fields}
    return StageSpec.model_construct(_fields_set=names, **{"kind": kind, "name": name, **fields})


def _main(job: Job, kind: str, name: str, **keys: Any) -> StageAt:
    """Make the stage that has the job's own prompt, output, answers and agent."""
    answers = keys.pop("answers", job.answers)
    spec = _stage(
        kind, name, prompt=job.prompt, output=job.output, answers=answers, agent=job.agent, **keys
    )
    return StageAt(spec, (), ("prompt",))


def _part(job: Job, key: str, kind: str, name: str, **keys: Any) -> StageAt:
    """Make the stage that ``topology.KEY`` describes; it needs a prompt."""
    part: StagePart | None = getattr(job.topology, key)
    if part is None or part.prompt is None:
        raise JobError(
            f"topology {job.topology.name} needs a prompt for its {key} stage",
            hint=f"topology: {{name: {job.topology.name}, {key}: {{prompt: ...}}}}",
            at=job.source.position(("topology",)),
        )
    path: KeyPath = ("topology", key)
    return StageAt(_stage(kind, name, part, **keys), path, (*path, "prompt"))


def _on_failure(
    topology: TopologySpec, part: StagePart | None = None, default: OnFailure = "drop"
) -> OnFailure:
    """Return ``on_failure`` of a stage: the part's, the topology's, else ``default``."""
    return (part.on_failure if part else None) or topology.on_failure or default


def _need_prompt(job: Job) -> None:
    command = job.agent.command if job.agent else ()
    if job.prompt is None and not command:
        raise JobError(f"topology {job.topology.name} needs a prompt", hint="write prompt: ...")


def _map(job: Job, _: TopologySpec) -> list[StageAt]:
    _need_prompt(job)
    return [_main(job, "map", "main")]


def _broadcast(job: Job, topology: TopologySpec) -> list[StageAt]:
    _need_prompt(job)
    stages = [_main(job, "broadcast", "broadcast")]
    if topology.reduce is not None:
        stages.append(_reduce_part(job, by=topology.by or ("id",)))
    return stages


def _reduce_part(job: Job, **keys: Any) -> StageAt:
    """Make the stage that ``topology.reduce`` describes."""
    topology = job.topology
    keys = {"fanin": topology.fanin, "by": topology.by, **keys}
    on_failure = _on_failure(topology, topology.reduce)
    return _part(job, "reduce", "reduce", "reduce", on_failure=on_failure, **keys)


def _reduce(job: Job, topology: TopologySpec) -> list[StageAt]:
    part = topology.reduce
    if part is not None and part.prompt is not None:
        return [_reduce_part(job)]
    _need_prompt(job)
    on_failure = _on_failure(topology, part)
    keys = {"fanin": topology.fanin, "by": topology.by, "on_failure": on_failure}
    main = _main(job, "reduce", "reduce", **keys)
    values = {key: getattr(part, key) for key in part.model_fields_set} if part else {}
    return [StageAt(_changed(main.spec, **values), main.path, main.prompt_at)]


def _map_reduce(job: Job, topology: TopologySpec) -> list[StageAt]:
    _need_prompt(job)
    fanin = TREE_FANIN if topology.name == "tree_reduce" else None
    return [_main(job, "map", "map"), _reduce_part(job, fanin=topology.fanin or fanin)]


def _plan_map_reduce(job: Job, topology: TopologySpec) -> list[StageAt]:
    _need_prompt(job)
    plan = _part(job, "plan", "map", "plan")
    if plan.spec.output is None or plan.spec.output.schema_ is None:
        output_spec = plan.spec.output or OutputSpec()
        output = output_spec.model_copy(update={"schema_": PLAN_SCHEMA})
        plan = StageAt(_changed(plan.spec, output=output), plan.path, plan.prompt_at)
    return [
        plan,
        StageAt(_stage("expand", "item", items="items"), ("topology",), ("topology",)),
        _main(job, "map", "work"),
        _reduce_part(job, by=topology.by or ("id",)),
    ]


def _pipeline(job: Job, topology: TopologySpec) -> list[StageAt]:
    if not topology.steps:
        raise JobError(
            "topology pipeline needs steps",
            hint="topology: {name: pipeline, steps: [{prompt: ...}, {prompt: ...}]}",
            at=job.source.position(("topology",)),
        )
    stages = []
    for number, part in enumerate(topology.steps):
        path: KeyPath = ("topology", "steps", number)
        at: KeyPath = (*path, "prompt")
        if part.prompt is None:
            _need_prompt(job)
            part, at = part.model_copy(update={"prompt": job.prompt}), ("prompt",)
        spec = _stage(
            "map", f"step{number + 1}", part, on_failure=_on_failure(topology, part, "include")
        )
        stages.append(StageAt(spec, path, at))
    return stages


def _blackboard(job: Job, topology: TopologySpec) -> list[StageAt]:
    if not topology.sections:
        raise JobError(
            "topology blackboard needs sections",
            hint="topology: {name: blackboard, sections: [...]}",
            at=job.source.position(("topology",)),
        )
    if any(section.prompt is None for section in topology.sections):
        _need_prompt(job)
    keys: dict[str, Any] = {
        "sections": topology.sections,
        "max_rounds": topology.max_rounds,
        "until": topology.until,
        "parallel": topology.parallel,
    }
    at = _main(job, "loop", "blackboard", **keys)
    return [StageAt(at.spec, ("topology",), ("prompt",))]


def _self_consistency(job: Job, topology: TopologySpec) -> list[StageAt]:
    _need_prompt(job)
    answers = job.answers if job.answers > 1 else VOTES
    query = sql_recipes.majority("sample", topology.vote)
    return [
        _main(job, "map", "sample", answers=answers),
        StageAt(
            _stage("sql", "vote", query=query, on_failure=_on_failure(topology)),
            ("topology",),
            ("topology",),
        ),
    ]


def _judge(job: Job, topology: TopologySpec) -> list[StageAt]:
    _need_prompt(job)
    judge = _part(job, "judge", "map", "judge", on_failure=_on_failure(topology, topology.judge))
    return [_main(job, "map", "answer"), judge]


_MAKERS: dict[str, Callable[[Job, TopologySpec], list[StageAt]]] = {
    "map": _map,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "tree_reduce": _map_reduce,
    "map_reduce": _map_reduce,
    "plan_map_reduce": _plan_map_reduce,
    "pipeline": _pipeline,
    "blackboard": _blackboard,
    "self_consistency": _self_consistency,
    "judge": _judge,
}


TAKES_THE_PLACE = ("topology", "prompt", "agent", "answers", "output")
"""Keys of a job that its expanded stages replace."""


def topology_yaml(laid: StagedJob, job: Job) -> str:
    """Return the expanded stages as YAML, with secrets masked.

    Keys of the job beside :data:`TAKES_THE_PLACE` stay as they are. Paths are absolute.
    """
    stages = [_stage_document(at.spec, job) for at in laid.stages]
    return yaml.dump(
        {"stages": stages}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )


def _stage_document(spec: Any, job: Job) -> dict[str, Json]:
    dumped = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    first = {key: dumped[key] for key in ("kind", "name") if key in dumped}
    compact: dict[str, Json] = _compact({**first, **dumped}, job)
    return compact


def _compact(value: Any, job: Job) -> Any:
    """Return a value without nulls and empty lists, and with secrets masked."""
    if isinstance(value, dict):
        compact = {name: _compact(item, job) for name, item in value.items()}
        compact = {name: item for name, item in compact.items() if item is not None and item != []}
        # A mapping that holds only a text has a short form.
        return compact["text"] if list(compact) == ["text"] else compact
    if isinstance(value, list):
        return [_compact(item, job) for item in value]
    return mask_text(value, job.source.secrets) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Dumper that writes long texts as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = (
        "|" if "\n" in text and not any(line.endswith(" ") for line in text.split("\n")) else None
    )
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
