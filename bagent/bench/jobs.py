"""The rows of a real job as the requests that a run would send first for them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagent.backends.chat_wire import BodyWriter
from bagent.backends.endpoint import Capabilities
from bagent.bench.config import JobBody
from bagent.checks.sample import open_rows_as_requests
from bagent.errors import JobError
from bagent.fleet.called import Called
from bagent.runs.endpoints import Servers
from bagent.runs.options import RunOptions
from bagent.runs.plan import make_plan, resolve_model
from bagent.runs.prepare import Prepared, open_input, prepare

MOST_ROWS = 2000
"""Rows of a job that are read; a longer load sends them again."""


def prepare_job(job: Path, env: Mapping[str, str], cwd: Path, sets: Sequence[str] = ()) -> Prepared:
    """The checked job; nothing is sent.

    Raises:
        UsageError: the job, its schema or its options are wrong.
    """
    return prepare(RunOptions(job, env=env, cwd=cwd, sets=tuple(sets)))


def job_bodies(prepared: Prepared, called: Sequence[Called]) -> list[JobBody]:
    """The bodies of the job's first rows, for the endpoints that are ready.

    Raises:
        UsageError: no row can be sent, or the endpoints' models differ from the job's.
    """
    known: dict[str, Capabilities] = {
        one.endpoint.name: one.known for one in called if one.ready and one.known
    }
    own = prepared.own_bodies and prepared.job.model == "auto"
    model = None if own else resolve_model(prepared.job, known)
    servers = Servers([one.endpoint for one in called], "vllm")
    plan = make_plan(prepared, servers, model, known)
    source = open_input(prepared)
    try:
        rows = itertools.chain.from_iterable(source.batches())
        sampled = open_rows_as_requests(plan, itertools.islice(rows, MOST_ROWS))
    finally:
        source.close()
    native = prepared.job.output.enforce != "prompt"
    writer = BodyWriter(model or "", native_schema=native)
    found = []
    for one in sampled:
        request = one.request
        if request is not None:
            key = "prompt" if request.prompt is not None else None
            body = writer.body(request, key=key, stream=False)
            found.append(JobBody(request.path, body.decode()))
    if not found:
        words = sampled[0].error if sampled else "it has no rows"
        raise JobError(f"no row of the job can be sent: {words}")
    return found
