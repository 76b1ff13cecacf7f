"""The records that pass between the rooms, on one page.

Everything here is a plain value: no behaviour beyond trivial properties, no I/O, no imports from
other rooms. JSON values are Python values as ``msgspec.json.decode`` makes them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Json = Any
"""A JSON value: None, bool, int, float, str, list or dict."""

Message = dict[str, Any]
"""One chat message in OpenAI form: ``{"role": ..., "content": ...}`` plus tool fields."""

Status = Literal["ok", "invalid", "truncated", "refused", "failed", "bad_input"]

ErrorKind = Literal[
    "bad_input",
    "template",
    "context_overflow",
    "rejected",
    "auth",
    "rate_limited",
    "overloaded",
    "timeout",
    "connect",
    "bad_response",
    "empty",
    "truncated",
    "refused",
    "schema",
    "tool",
    "max_turns",
    "budget",
    "internal",
    "client_closed",
]

PASSING_KINDS: frozenset[str] = frozenset(
    {"rate_limited", "overloaded", "timeout", "connect", "bad_response", "empty"}
)
"""Failures for a passing reason: worth sending again later."""

EXTERNAL_KINDS: frozenset[str] = frozenset({"auth", "budget", "tool", "internal"})
"""Failures by something outside of the job and its input, which may have been mended since."""


class Row(msgspec.Struct, frozen=True):
    """One input row.

    ``index`` is its place in the input, from 0, counted before any filter (blank lines take no
    index). ``key`` is the 64-bit name that survives moving the line: made of the id, the fields
    that the job uses, and how often that pair came before. ``line`` is the physical line (from
    1) in ``source``, or the row number where a source has no lines. A row that cannot be read has
    ``error`` and ``raw`` (its bytes) and empty ``data``.

    A row that a stage made has ``parents``: what it was made of, each as ``STAGE:ID:ANSWER``, and
    ``parents_failed``, how many input rows among those failed. ``extra`` are further names for its
    prompt. ``endpoint`` is the only one that may answer it.
    """

    index: int
    key: int
    id: Json
    data: dict[str, Any]
    source: str
    line: int
    error: str | None = None
    raw: bytes | None = None
    parents: tuple[str, ...] = ()
    parents_failed: int | None = None
    extra: dict[str, Any] | None = None
    endpoint: str | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts as the server told them; None where it did not.

    ``prompt`` is the whole prompt; of it ``cached`` tokens were read from a prompt cache and
    ``cache_write`` tokens were written to one, where providers bill that apart. ``gpu_seconds`` is
    the answer's share of the time of GPUs, where that is paid for.
    """

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    reasoning: int | None = None
    cache_write: int | None = None
    gpu_seconds: float | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call that a model asked for; ``arguments`` is JSON text exactly as received."""

    id: str
    name: str
    arguments: str


class Reply(msgspec.Struct, frozen=True):
    """What an endpoint answered to one call, already freed of its wire form.

    ``finish_reason`` is the wire's word, normalised to the OpenAI words where a provider has
    others (``stop length tool_calls content_filter``); unknown words are kept as they are, a
    missing one is None. ``ttft_ms`` is None where nothing streamed and the server did not tell.
    ``text`` is None where the server sent no content at all. ``blocks`` is the turn in the
    provider's own form where a conversation has to give it back unchanged, such as thinking with
    its signature; None where text and tool calls say all. ``message`` has the fields of an OpenAI
    message beyond text and tool calls that a conversation gives back (its reasoning, under the
    name that the server has for it).
    ``vectors`` are embeddings, one for each text sent. ``body`` is the whole JSON body as
    received, for calls whose body was written by the user.
    """

    text: str | None
    finish_reason: str | None
    model: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    ttft_ms: float | None = None
    logprobs: Json = None
    request_id: str | None = None
    blocks: list[Json] | None = None
    vectors: list[list[float]] | None = None
    message: dict[str, Json] | None = None
    body: bytes | None = None


class Failure(msgspec.Struct, frozen=True):
    """Why a call, or a row, has no good answer.

    ``passing`` says whether sending the same request again may help. ``retry_after`` is in
    seconds from when the answer came, None where the server named none. ``status`` is the HTTP
    status, None where there was no HTTP answer. ``text`` is partial answer text, for people.
    ``busy`` says that the server, or this machine, is full: waiting is the cure, and the waiting
    costs the row no try.
    """

    kind: ErrorKind
    message: str
    passing: bool = False
    status: int | None = None
    retry_after: float | None = None
    text: str | None = None
    finish_reason: str | None = None
    busy: bool = False


class Outcome(msgspec.Struct, omit_defaults=True):
    """The end of one (row, stage, answer): one line of the journal, one row of ``results``.

    Field names are the column names of the ``results`` table, less ``input`` (joined from the
    input when tables are made). ``key`` is the row's key as 16 hex digits. ``output`` is a raw
    JSON text. Times are Unix seconds (``*_at``) and milliseconds (``*_ms``). ``group`` is the id
    of the request that carried the answer. ``request_hash`` (16 hex digits) names the exact
    request, so that an equal one can take this answer; empty where none was sent. ``parents`` and
    ``parents_failed`` are those of the :class:`Row`. ``response`` is the body that answered a line
    of a batch file, as received: no column, it goes into the files of ``openai-batch``.
    """

    key: str
    row: int
    id: Json
    source: str
    line: int
    stage: str
    status: Status
    answer: int = 0
    output: msgspec.Raw | None = None
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
    first_try_valid: bool | None = None
    group: str | None = None
    request_hash: str | None = None
    response: msgspec.Raw | None = None

    @property
    def accepted(self) -> bool:
        """Whether it is a truncated answer that the job accepts: those have no error kind."""
        return self.status == "truncated" and self.error_kind is None

    @property
    def failed(self) -> bool:
        """Whether it is neither ok nor accepted."""
        return self.status != "ok" and not self.accepted


class Attempt(msgspec.Struct, omit_defaults=True):
    """One row's part in one HTTP request: a row of the ``attempts`` table.

    ``try_`` counts the tries of one turn from 1. Times are Unix seconds; ``first_byte`` and
    ``first_token`` are None where nothing streamed. ``group_size`` is how many rows the request
    carried. ``id`` is that of the stage's row: stages may make several rows of one input row.
    """

    key: str
    row: int
    stage: str
    answer: int
    turn: int
    try_: int = msgspec.field(name="try")
    endpoint: str
    group: str
    group_size: int
    sent: float
    first_byte: float | None = None
    first_token: float | None = None
    done: float | None = None
    status_code: int | None = None
    error_kind: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    request_id: str | None = None
    id: Json = None


class Turn(msgspec.Struct, omit_defaults=True):
    """One turn of a conversation that goes on: what a resume needs to continue it.

    ``messages`` are the messages that this turn added (the assistant's and the answers to it),
    never input text. A later line for the same turn replaces an earlier one, and a turn 0 says
    that the conversation begins anew. ``begun`` are the calls of tools with side effects that were
    started and have no answer among ``messages``. ``request_hash`` (16 hex digits) names the
    prompt and the settings that the conversation began with; ``at`` is in Unix seconds. ``usage``
    and ``attempts`` are what all of it took so far.
    """

    key: str
    row: int
    stage: str
    answer: int
    turn: int
    messages: list[Message]
    group: str | None = None
    begun: list[ToolCall] = []
    request_hash: str | None = None
    at: float | None = None
    usage: Usage | None = None
    attempts: int = 0


class EndpointSample(msgspec.Struct, omit_defaults=True):
    """The state of one endpoint at one time: a row of the ``endpoints`` table."""

    endpoint: str
    at: float
    healthy: bool
    in_flight: int
    limit: int
    reason: str | None = None
    waiting: int | None = None
    running: int | None = None
    kv_usage: float | None = None
    cache_hits: int | None = None
    cache_queries: int | None = None


class ToolRecord(msgspec.Struct, omit_defaults=True):
    """One tool call of one row: a row of the ``tool_calls`` table; ``id`` as in Attempt."""

    key: str
    row: int
    stage: str
    answer: int
    turn: int
    name: str
    arguments: str
    started: float
    shared: bool = False
    cached: bool = False
    latency_ms: float | None = None
    error: str | None = None
    id: Json = None


class FleetStats(msgspec.Struct, frozen=True):
    """The fleet at one moment, for progress displays.

    ``in_flight`` and ``limit`` count rows; ``retrying`` rows wait for their next try and hold no
    slot; ``throttled_s`` is how long the account-wide pause still lasts, 0 where there is none.
    """

    in_flight: int
    limit: int
    ready: int
    retrying: int
    throttled_s: float
    endpoints_up: int
    endpoints: int
    throttle_answers: int = 0
    requests: int = 0


class FeedStats(msgspec.Struct, frozen=True):
    """The input at one moment: rows read, rows skipped as finished earlier, and the size.

    ``expected`` is how many answers the rows read so far need; many of them may not have begun.
    ``position`` and ``size`` are in the same unit (bytes or rows); ``size`` is None where the
    end is not known (a pipe). ``ended``: all rows were read. ``finished`` is how many rows of the
    input an earlier start finished; None where nobody knows.
    """

    read: int
    skipped: int
    position: int
    size: int | None
    ended: bool
    expected: int = 0
    finished: int | None = None
