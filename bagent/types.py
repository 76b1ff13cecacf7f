"""The records that packages exchange.

They are plain values without I/O. JSON values are Python values as made by ``msgspec.json.decode``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
"""Failures for a passing reason, which are sent again."""

EXTERNAL_KINDS: frozenset[str] = frozenset({"auth", "budget", "tool", "internal"})
"""Failures with a cause outside of the job and its input, which may have been fixed since."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """One row of the input, or one made by a stage.

    A row that cannot be read has ``error``, ``raw`` and empty ``data``; one of which some columns
    can, has ``error`` and those.
    """

    index: int
    """Number in the input, from 0, before any filter; blank lines have none."""
    key: int
    """64-bit hash of the id, the fields that the job uses, and earlier occurrences of that pair."""
    id: Json
    data: dict[str, Any]
    source: str
    line: int
    """Physical line in ``source``, from 1, or the row number if the source has no lines."""
    error: str | None = None
    raw: bytes | None = None
    parents: tuple[str, ...] = ()
    """Of a row made by a stage: what it was made of, each as ``STAGE:ID:ANSWER``."""
    parents_failed: int | None = None
    """How many input rows among the parents failed."""
    extra: dict[str, Any] | None = None
    """Additional variables of its prompt."""
    endpoint: str | None = None
    """The only endpoint that may answer it."""


PROGRAM_ROWS = "rows"
"""The source of rows that a program gives to the library."""


def row_location(source: str, line: int) -> str:
    """Return where a row is, for people: ``FILE:LINE``, or the file alone without a line."""
    if source == PROGRAM_ROWS:
        return f"row {line} of {source}"
    return f"{source}:{line}" if line else source


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Token counts as reported by the server; an unreported count is None.

    ``prompt`` includes ``cached`` tokens, read from a prompt cache, and ``cache_write`` tokens,
    written to one. ``gpu_seconds`` is the answer's share of GPU time on own servers.
    """

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    reasoning: int | None = None
    cache_write: int | None = None
    gpu_seconds: float | None = None


NO_USAGE = Usage()
"""No count was reported."""


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call of a model; ``arguments`` is JSON text as received."""

    id: str
    name: str
    arguments: str


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The answer of an endpoint to one call, independent of its wire protocol."""

    text: str | None
    """None if the response had no content."""
    finish_reason: str | None
    """``stop``, ``length``, ``tool_calls`` or ``content_filter``, or the provider's own value."""
    model: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = NO_USAGE
    ttft_ms: float | None = None
    """None if the response was not streamed and the server did not report it."""
    logprobs: Json = None
    request_id: str | None = None
    blocks: list[Json] | None = None
    """The turn in the provider's form, if a conversation must return it (signed thinking)."""
    vectors: list[list[float]] | None = None
    """Embeddings, one for each text of the request."""
    message: dict[str, Json] | None = None
    """Fields of an OpenAI message besides text and tool calls that a conversation returns."""
    body: bytes | None = None
    """The JSON body as received, for requests whose body was written by the user."""


class Failure(msgspec.Struct, frozen=True, gc=False):
    """The reason why a call or a row has no valid answer."""

    kind: ErrorKind
    message: str
    passing: bool = False
    """Whether the same request may succeed later."""
    status: int | None = None
    """HTTP status; None without an HTTP response."""
    retry_after: float | None = None
    """Seconds from the response, if the server asked for a wait."""
    text: str | None = None
    """Partial answer text, for people."""
    finish_reason: str | None = None
    busy: bool = False
    """The server or this machine is full: waiting helps and does not count as an attempt."""


def _column(description: str, sql: str = "") -> msgspec.Meta:
    """Describe a column of a table, with its SQL type where the Python type does not give it.

    :mod:`bagent.store.tables.schema` makes the tables and the reference from these.
    """
    return msgspec.Meta(description=description, extra={"sql": sql} if sql else None)


_RowNumber = Annotated[int, _column("number of the input row, from 0")]
_Stage = Annotated[str, _column("name of the stage; `main` where the job has one")]
_Answer = Annotated[int, _column("number of the answer to the row, from 0")]
_UnitId = Annotated[
    Json,
    _column(
        "id of the stage's row, as in results; null in runs begun before it was kept", "VARCHAR"
    ),
]
_PromptTokens = Annotated[int | None, _column("tokens of the prompt, cached ones too")]
_CachedTokens = Annotated[int | None, _column("those that the server's prefix cache knew")]
_CompletionTokens = Annotated[int | None, _column("tokens of the answer, reasoning too")]


class ResultColumns(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The columns of ``results`` in their order, less ``input``, which the input has.

    Times are Unix seconds (``*_at``) and milliseconds (``*_ms``); what is unknown is None.
    """

    id: Annotated[Json, _column("the row's id as text", "VARCHAR")]
    row: _RowNumber
    source: Annotated[str, _column("file that the row came from")]
    line: Annotated[int, _column("its line there, from 1")]
    stage: _Stage
    answer: _Answer = 0
    status: Annotated[Status, _column("how it ended, see below")]
    output: Annotated[Json, _column("the validated answer, JSON")] = None
    text: Annotated[str | None, _column("the answer as it came")] = None
    reasoning: Annotated[str | None, _column("the model's reasoning, where it is told apart")] = (
        None
    )
    error_kind: Annotated[str | None, _column("why it is not ok, see below")] = None
    error: Annotated[str | None, _column("the same in words")] = None
    finish_reason: Annotated[
        str | None, _column("why the model stopped: stop, length, tool_calls ...")
    ] = None
    model: Annotated[str | None, _column("the model that answered")] = None
    endpoint: Annotated[str | None, _column("the endpoint that answered last")] = None
    attempts: Annotated[int, _column("tries of all its turns")] = 0
    turns: Annotated[int, _column("requests of its conversation")] = 0
    prompt_tokens: _PromptTokens = None
    cached_tokens: _CachedTokens = None
    completion_tokens: _CompletionTokens = None
    reasoning_tokens: Annotated[int | None, _column("those of the reasoning")] = None
    cost_usd: Annotated[
        float | None, _column("US dollars; null where a price or a count is unknown")
    ] = None
    queue_ms: Annotated[float | None, _column("waiting before it was sent")] = None
    ttft_ms: Annotated[
        float | None,
        _column("to the first token: from sending where it streamed, else as the server tells"),
    ] = None
    latency_ms: Annotated[float | None, _column("from the first sending to the whole answer")] = (
        None
    )
    started_at: Annotated[float | None, _column("when it was sent first")] = None
    finished_at: Annotated[float | None, _column("when it ended")] = None
    parents: Annotated[list[str] | None, _column("what it was made of: STAGE:ID:ANSWER")] = None
    parents_failed: Annotated[int | None, _column("how many rows behind it had failed")] = None
    copied_from: Annotated[
        str | None, _column("the id of the equal request whose answer this is")
    ] = None
    prompt_sha256: Annotated[str | None, _column("hash of what was sent")] = None
    output_sha256: Annotated[str | None, _column("hash of the answer")] = None
    logprobs: Annotated[Json, _column("log probabilities, where asked for, JSON")] = None


class Outcome(ResultColumns, kw_only=True, omit_defaults=True, gc=False):
    """The end of one (row, stage, answer): one line of the journal, one row of ``results``."""

    key: str
    """The row's key as 16 hex digits."""
    output: msgspec.Raw | None = None
    first_try_valid: bool | None = None
    group: str | None = None
    """Id of the request that carried the answer."""
    request_hash: str | None = None
    """Names the exact request (16 hex digits), so that an equal one can reuse the answer."""
    response: msgspec.Raw | None = None
    """The body that answered a line of a batch file, as received; for ``openai-batch`` files."""

    @property
    def accepted(self) -> bool:
        """Whether it is a truncated answer that the job accepts: those have no error kind."""
        return self.status == "truncated" and self.error_kind is None

    @property
    def failed(self) -> bool:
        """Whether it is neither ok nor accepted."""
        return self.status != "ok" and not self.accepted


class Attempt(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One row's part in one HTTP request: a row of ``attempts``. Times are Unix seconds."""

    key: str
    row: _RowNumber
    stage: _Stage
    answer: _Answer
    turn: Annotated[int, _column("number of the request in its conversation, from 1")]
    try_: Annotated[int, _column("number of the try of that turn, from 1")] = msgspec.field(
        name="try"
    )
    endpoint: Annotated[str, _column("where it was sent")]
    sent: Annotated[float, _column("when it was sent")]
    first_byte: Annotated[float | None, _column("when the answer began")] = None
    first_token: Annotated[
        float | None, _column("when its first token came, where it streamed")
    ] = None
    done: Annotated[float | None, _column("when it was whole, or had failed")] = None
    status_code: Annotated[int | None, _column("HTTP status")] = None
    error_kind: Annotated[str | None, _column("why it failed; null: it did not")] = None
    error: Annotated[str | None, _column("the same in words")] = None
    prompt_tokens: _PromptTokens = None
    cached_tokens: _CachedTokens = None
    completion_tokens: _CompletionTokens = None
    group: Annotated[str, _column("the HTTP request that carried it")]
    group_size: Annotated[int, _column("rows in that request")]
    request_id: Annotated[str | None, _column("the server's own name of the request")] = None
    id: _UnitId = None


class Turn(msgspec.Struct, omit_defaults=True):
    """One turn of an unfinished conversation, from which a resume continues it.

    A later line for the same turn replaces an earlier one; turn 0 restarts the conversation.
    """

    key: str
    row: int
    stage: str
    answer: int
    turn: int
    messages: list[Message]
    """Messages added by this turn: the assistant's and the answers to it, never input text."""
    group: str | None = None
    begun: list[ToolCall] = []
    """Started calls of tools with side effects that have no answer among ``messages``."""
    request_hash: str | None = None
    """Names the first prompt and the settings of the conversation (16 hex digits)."""
    at: float | None = None
    """Unix seconds."""
    usage: Usage | None = None
    """Usage of the conversation so far, without summaries."""
    summary_usage: Usage | None = None
    """Usage of the summaries of the conversation so far."""
    attempts: int = 0
    """Attempts of the conversation so far."""


class EndpointSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state of one endpoint at one time: a row of ``endpoints``."""

    endpoint: Annotated[str, _column("the endpoint")]
    at: Annotated[float, _column("when it was looked at")]
    healthy: Annotated[bool, _column("whether it takes requests")]
    in_flight: Annotated[int, _column("rows of this run in flight there")]
    limit: Annotated[int, _column("how many may be")]
    reason: Annotated[str | None, _column("why the limit is what it is")] = None
    waiting: Annotated[int | None, _column("requests in its own queue")] = None
    running: Annotated[int | None, _column("requests that it works on")] = None
    kv_usage: Annotated[float | None, _column("share of its KV cache in use, 0 to 1")] = None
    cache_hits: Annotated[
        int | None, _column("tokens that its prefix cache knew, since it started")
    ] = None
    cache_queries: Annotated[int | None, _column("tokens that were looked for")] = None


class ToolRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One tool call of one row: a row of ``tool_calls``."""

    key: str
    row: _RowNumber
    stage: _Stage
    answer: _Answer
    turn: Annotated[int, _column("number of the turn that asked for it")]
    name: Annotated[str, _column("the tool")]
    arguments: Annotated[str, _column("its arguments as the model wrote them")]
    shared: Annotated[bool, _column("whether it was answered by an equal call in flight")] = False
    cached: Annotated[bool, _column("whether it was answered from the cache")] = False
    started: Annotated[float, _column("when it began")]
    latency_ms: Annotated[float | None, _column("how long it took")] = None
    error: Annotated[
        str | None, _column("why it failed, with the line of its code; null: it did not")
    ] = None
    id: _UnitId = None


class FleetStats(msgspec.Struct, frozen=True):
    """The state of a fleet, for progress displays.

    ``in_flight`` and ``limit`` count rows; ``retrying`` rows wait for their next attempt without a
    slot; ``throttled_s`` is the rest of an account-wide pause, 0 without one.
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
    """The state of the input: rows read, rows skipped as finished earlier, and its size.

    ``position`` and ``size`` are both in bytes or both in rows; ``size`` is None if unknown (a
    pipe). ``ended``: all rows were read. ``expected`` is how many answers the rows read so far
    need. ``finished`` is how many rows of the input an earlier start finished, None if unknown.
    ``most`` is how many rows a limit or a sample lets through at most, None without one.
    ``empty_pipe``: standard input ended without a row. ``unselected`` rows were left out by
    ``where``. ``empty`` counts the rows to be sent without a value in a column of the prompt, by
    column.
    """

    read: int
    skipped: int
    position: int
    size: int | None
    ended: bool
    expected: int = 0
    finished: int | None = None
    most: int | None = None
    empty_pipe: bool = False
    unselected: int = 0
    empty: dict[str, int] = {}
