"""Records of a check; ``bagent check --json`` prints them unchanged."""

from __future__ import annotations

import msgspec

from bagent.money.prices import ModeCost
from bagent.types import Json, Message


class EndpointReport(msgspec.Struct, frozen=True):
    """One endpoint; what it did not report is null."""

    name: str
    url: str
    alive: bool
    error: str | None
    models: tuple[str, ...]
    context: int | None
    """Context length in tokens."""
    version: str | None
    engine: str | None
    kv_tokens: int | None
    """Tokens that its KV cache holds."""
    not_asked: str | None = None
    """Why it was not asked, or did not answer without a key."""


class SchemaReport(msgspec.Struct, frozen=True):
    """The output schema."""

    source: str
    """Its file, or ``inline``."""
    enforce: str
    native: bool
    """The server is asked to enforce it."""
    described: bool
    """The prompt describes it."""
    strict: bool


class PromptReport(msgspec.Struct, frozen=True):
    """One row's prompt as it is sent: ``messages``, raw text as ``prompt``, or an ``error``."""

    id: Json
    source: str
    line: int
    tokens: int | None
    counted: bool
    """Whether ``tokens`` were counted by the server; else they are estimated."""
    max_tokens: int | None
    messages: list[Message] | None
    prompt: str | None
    error: str | None


class RowReport(msgspec.Struct, frozen=True):
    """A row that will fail, and why."""

    id: Json
    source: str
    line: int
    error: str


class MaxTokens(msgspec.Struct, frozen=True):
    """The range of ``max_tokens`` over the sample; null: the server decides for some request."""

    least: int | None
    most: int | None
    automatic: bool
    without: int = 0
    """Requests that ask for text without it."""
    generating: int = 0
    """Requests that ask for text."""


class TokenReport(msgspec.Struct, frozen=True):
    """Tokens of prompts."""

    how: str
    """``tokenize``, ``simulated`` or ``characters``."""
    by: str
    rows: int
    counted: int
    """How many of the ``rows`` were counted by the server; the others are estimated."""
    least: int | None
    median: int | None
    most: int | None
    mean: float | None
    prompts: int | None
    answers_at_most: int | None
    """Tokens of all answers if each takes its ``max_tokens``."""
    images: int
    repeats: int
    grows: bool = False
    """Turns or rounds ask again, with longer prompts: ``prompts`` is what there is at least."""


class CostReport(msgspec.Struct, frozen=True):
    """Cost in dollars; all null where no price is known."""

    price_in: float | None
    price_out: float | None
    """``price_in``, ``price_out``: dollars per million tokens."""
    prompts_usd: float | None
    answers_usd_at_most: float | None
    total_usd_at_most: float | None
    """Null where turns or rounds ask again: ``prompts_usd`` is the least then."""
    modes: tuple[ModeCost, ...] = ()
    """The ways to send the job, each at most; what only a run can measure is null."""


class WarmReport(msgspec.Struct, frozen=True):
    """Whether one request precedes the others at each cold endpoint."""

    tokens: int
    """Tokens that all prompts begin with."""
    rows: int
    """Rows that start together at one endpoint."""
    saves: int
    """Prompt tokens that the other rows save if they wait for the first."""
    warms: bool
    why: str
    """The reason for ``warms``, what a run does."""


class ShareReport(msgspec.Struct, frozen=True):
    """Tokens of a mean prompt by how many rows share them, in whole blocks; see
    :class:`bagent.check.prefix_sharing.Shares`."""

    block: int
    rows: int
    exact: bool
    """By token ids, else by characters."""
    prompt: float
    by_all: float
    by_most: float
    by_some: float
    by_none: float
    kv_tokens: int | None
    """The smallest KV cache of the endpoints."""
    kv_rows: int | None
    """Rows that fit into it at once, with shared blocks counted once and answers at their
    longest."""
    warming: WarmReport


class ReorderReport(msgspec.Struct, frozen=True):
    """A prompt in an order that shares more."""

    gain: int
    """Tokens per row."""
    gain_total: int
    """Tokens over all rows."""
    points_back: str | None
    """A word such as ``above`` in the text that was moved."""
    yaml: str
    """The prompt, ready to paste."""


class ExecuteReport(msgspec.Struct, frozen=True):
    """Something that a run would execute; ``kind`` is the job's key."""

    kind: str
    what: str


class SendReport(msgspec.Struct, frozen=True):
    """An environment variable whose value a run would send, and to whom."""

    variable: str
    to: str


class EffectsReport(msgspec.Struct, frozen=True):
    """What a run would execute and send."""

    executes: tuple[ExecuteReport, ...] = ()
    sends: tuple[SendReport, ...] = ()


class CheckReport(msgspec.Struct, frozen=True):
    """Everything that ``bagent check`` found."""

    job: str
    file: str
    backend: str
    planned: str | None
    """What a run would start by itself."""
    endpoints: tuple[EndpointReport, ...]
    model: str | None
    model_auto: bool
    context: int | None
    inputs: tuple[str, ...]
    rows: int
    rows_how: str
    """``counted``, ``about`` or ``at least``."""
    looked_at: int
    answers: int
    max_tokens: MaxTokens
    schema: SchemaReport | None
    dedupe: bool
    stream: str
    results: str
    parameters: dict[str, Json]
    """The request body without the prompt."""
    prompts: tuple[PromptReport, ...]
    tokens: TokenReport
    cost: CostReport
    sharing: ShareReport | None
    reorder: ReorderReport | None
    failing: tuple[RowReport, ...]
    """Rows of the sample that cannot be read or rendered; the first of ``failing_count``."""
    failing_count: int
    too_long: tuple[RowReport, ...]
    """Rows that do not fit the context; the first of ``too_long_count``."""
    too_long_count: int
    warnings: tuple[str, ...]
    dead: str | None = None
    """Why no endpoint answers."""
    changed: str | None = None
    """Why the next start refuses to continue the run: its job changed."""
    refused: str | None = None
    """Why all endpoints refuse the key."""
    unserved: str | None = None
    """Why no endpoint takes a model that the job asks for."""
    unsendable: str | None = None
    """Why no row of the sample can be sent."""
    stages: str | None = None
    """The stages of a topology as YAML; then all numbers are of the first requesting stage."""
    effects: EffectsReport = EffectsReport()
    """What a run would do; where ``opened``, the check did so too."""
    hosted: bool = False
    """The servers are those of a provider."""
    without_ids: bool = False
    """The first row is named by its content."""
    opened: bool = False
    tools: tuple[Json, ...] = ()
    """The definitions that the model gets."""
    batching: str = ""
    """How rows reach a provider's batches by a time; empty without one."""
