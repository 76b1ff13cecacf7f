"""One row of results, typed."""

from __future__ import annotations

import msgspec

from bagent.types import Json, Status


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one (row, stage, answer); a field has the name of its column in ``results``.

    ``output`` is the validated answer as JSON values, ``input`` the input row; both None where
    there is none. Times are Unix seconds (``*_at``) and milliseconds (``*_ms``); what nobody told
    is None, never 0.
    """

    id: Json = None
    row: int
    source: str
    line: int
    stage: str
    answer: int = 0
    status: Status
    output: Json = None
    text: str | None = None
    reasoning: str | None = None
    error_kind: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    model: str | None = None
    endpoint: str | None = None
    attempts: int = 0
    turns: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: float | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    latency_ms: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    parents: list[str] | None = None
    parents_failed: int | None = None
    copied_from: str | None = None
    prompt_sha256: str | None = None
    output_sha256: str | None = None
    logprobs: Json = None
    input: Json = None

    @property
    def ok(self) -> bool:
        """Whether there is a valid answer."""
        return self.status == "ok"
