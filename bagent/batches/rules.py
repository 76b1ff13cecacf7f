"""Which jobs may go through a provider's batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagent.errors import JobError

if TYPE_CHECKING:
    from bagent.job.spec import Job

KINDS = frozenset({"openai", "anthropic", "bedrock", "compatible"})
"""Kinds of backends that may have a batch service."""


def check_batches(job: Job, *, staged: bool) -> None:
    """Refuse what cannot be done by ``batching: {mode: provider}``.

    Args:
        staged: the job has several stages.

    Raises:
        JobError: with what to change in the job.
    """
    kind = job.backend.kind if job.backend is not None else None
    words = hint = ""
    key: tuple[str, ...] = ("batching",)
    if job.hostfile is not None or kind not in KINDS:
        words = "only openai, anthropic and bedrock, and servers like theirs, have a batch service"
        hint = "write batching: {mode: auto}"
    elif job.agent is not None:
        words, key = "turns with tools cannot wait for a batch each", ("agent",)
        hint = "leave agent out, or write batching: {mode: auto}"
    elif staged:
        words = "the rows of several stages cannot wait for one another's batches"
        hint = "make each stage a job of its own, or write batching: {mode: auto}"
    elif job.batching.service_tier is not None:
        words = "a batch has a tier of its own, so service_tier says nothing"
        hint = "leave out one of the two"
    elif kind == "bedrock" and (job.batching.s3_uri is None or job.batching.role_arn is None):
        words = "Bedrock's batches are files in S3, which it reads and writes by a role"
        hint = "write batching: {mode: provider, s3_uri: s3://BUCKET/FOLDER, role_arn: arn:...}"
    if words:
        raise JobError(f"batching mode provider: {words}", hint=hint, at=job.source.position(key))
