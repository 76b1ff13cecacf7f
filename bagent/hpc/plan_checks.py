"""What a batch job would lack on its nodes, known before it waits in a queue."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence

from bagent.errors import JobError, Position
from bagent.hpc.site import Site
from bagent.job.spec_cluster import ClusterSpec

_STAGED = "{stage}"
_GPU_WORD = re.compile(r"(?i)gpu|gres|tres")
_GPU_ENGINE = re.compile(r"(?i)(?:.*/)?(?:vllm|sglang|trtllm-serve|tensorrt_llm|dynamo)\b.*")
_SIZE_OPTIONS = (
    {"--tensor-parallel-size", "-tp", "--tp", "--tp-size"},
    {"--pipeline-parallel-size", "-pp", "--pp", "--pp-size"},
)


def check_staging(cluster: ClusterSpec, at: Position) -> None:
    """Refuse an engine whose staged files would not be there.

    Raises:
        JobError: ``stage`` and ``stage_by`` contradict each other, or nothing is staged.
    """
    if cluster.stage and cluster.stage_by == "none":
        raise JobError(
            "cluster.stage names files, and cluster.stage_by: none copies none of them",
            hint="write stage_by: copy, or leave one of the two out",
            at=at,
        )
    if any(_STAGED in word for word in cluster.engine) and not cluster.stage:
        if cluster.node_setup:
            return  # its lines may fill the folder
        raise JobError(
            f"cluster.engine reads {_STAGED}, and cluster.stage names nothing to put there",
            hint="write stage: [PATH] under cluster:",
            at=at,
        )


def check_gpus(cluster: ClusterSpec, site: Site, at: Position) -> None:
    """Refuse engines that would get no GPUs, or not as many as they work with.

    Raises:
        JobError: the GPUs are not said, cannot be shared, or are too few or of a wrong number.
    """
    gpus, engines = cluster.gpus_per_node, cluster.engines_per_node or 1
    if gpus is None:
        if not requests_gpus(cluster) and any(map(_GPU_ENGINE.fullmatch, engine_words(cluster))):
            raise JobError(
                "not said: cluster.gpus_per_node, so the engines would get no GPUs",
                hint="write gpus_per_node: 4 (0 for engines on CPUs) under cluster:",
                at=at,
            )
        return
    if gpus % engines:
        raise JobError(
            f"{gpus} GPUs cannot be shared evenly by {engines} engines of a node",
            hint="change cluster.engines_per_node or cluster.gpus_per_node",
            at=at,
        )
    span, share = cluster.nodes_per_engine or 1, gpus // engines
    if site.engine_gpus and gpus and span == 1 and share not in site.engine_gpus:
        sizes = ", ".join(map(str, site.engine_gpus))
        fitting = [gpus // size for size in site.engine_gpus if gpus % size == 0]
        counts = " or ".join(map(str, sorted(set(fitting))))
        raise JobError(
            f"an engine would get {share} GPUs of a node, and works with {sizes} here",
            hint=f"write engines_per_node: {counts} under cluster:, or another gpus_per_node",
            at=at,
        )
    used = _used_gpus(engine_words(cluster))
    if gpus and used > share * span:
        raise JobError(
            f"cluster.engine uses {used} GPUs, and gets {share * span}",
            hint="change cluster.gpus_per_node, engines_per_node or nodes_per_engine",
            at=at,
        )


def requests_gpus(cluster: ClusterSpec) -> bool:
    """Whether the job's own directives say something about GPUs."""
    return any(map(_GPU_WORD.search, cluster.directives))


def engine_words(cluster: ClusterSpec) -> list[str]:
    """The engine's command as words; a single text is split as a shell would."""
    given = cluster.engine
    return shlex.split(given[0]) if len(given) == 1 else list(given)


def _used_gpus(words: Sequence[str]) -> int:
    """The GPUs that one engine spreads its model over, by its options; 1 where none says."""
    return math.prod(_size(words, options) for options in _SIZE_OPTIONS)


def _size(words: Sequence[str], options: set[str]) -> int:
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        value = value or (words[number + 1] if number + 1 < len(words) else "")
        if name in options and value.isdecimal():
            return int(value)
    return 1
