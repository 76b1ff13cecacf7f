"""What every worker of a load test is told, as values that travel between processes."""

from __future__ import annotations

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.bench.prompts import AnswerPlan, Lengths
from bagent.bench.trace import Recorded


class Target(msgspec.Struct, frozen=True):
    """One endpoint under load: how it is reached, and what it is asked for."""

    endpoint: Endpoint
    model: str | None = None
    engine: str | None = None


class JobBody(msgspec.Struct, frozen=True):
    """One row of a real job as the body of its first request, less streaming."""

    path: str
    body: str


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One load test as its workers see it.

    Attributes:
        targets: the endpoints that answered before, in the order of the hostfile.
        lengths: sizes of prompts by model name (an empty name where none is known).
        list_size: calls in one request, where calls travel in lists or batches.
        groups: number of shared prefixes; 0 shares none.
        turn_tokens: what each turn of a conversation after the first adds.
        trace: recorded requests to send again.
        job: bodies to send in turn in place of made prompts.
        origin: seconds of the monotonic clock that all times of rows count from.
        folder: where raw rows are written.
        worker, workers: which of the workers this is.
    """

    targets: list[Target]
    lengths: dict[str, Lengths]
    answer: AnswerPlan
    timeouts: Timeouts
    salt: str
    origin: float
    folder: str
    list_size: int = 8
    groups: int = 0
    skew: float = 0.0
    turn_tokens: int = 0
    trace: list[Recorded] = []
    job: list[JobBody] = []
    worker: int = 0
    workers: int = 1


class Material(msgspec.Struct, frozen=True):
    """What is sent in place of made prompts: the bodies of a job, the times and lengths of a
    recorded load; empty where there is none."""

    job: list[JobBody] = []
    trace: list[Recorded] = []


def portable(endpoint: Endpoint) -> Endpoint:
    """``endpoint`` made of values that can be written as JSON."""
    return msgspec.structs.replace(
        endpoint,
        headers=dict(endpoint.headers),
        query=dict(endpoint.query),
        tags=dict(endpoint.tags),
    )
