"""What a check found, as plain records; ``bagent check --json`` prints them as they are."""

from __future__ import annotations

import msgspec

from bagent.money.prices import ModeCost
from bagent.types import Json, Message


class EndpointReport(msgspec.Struct, frozen=True):
    """One endpoint. ``context`` and ``kv_tokens`` are in tokens; null: it did not tell.

    ``not_asked`` says why it was not asked, or did not answer a question without a key.
    """

    name: str
    url: str
    alive: bool
    error: str | None
    models: tuple[str, ...]
    context: int | None
    version: str | None
    engine: str | None
    kv_tokens: int | None
    not_asked: str | None = None


class SchemaReport(msgspec.Struct, frozen=True):
    """The output schema: ``source`` is its file or ``inline``. ``native``: the server is asked to
    enforce it. ``described``: the prompt tells it."""

    source: str
    enforce: str
    native: bool
    described: bool
    strict: bool


class PromptReport(msgspec.Struct, frozen=True):
    """One row's prompt as it is sent: ``messages``, or raw text as ``prompt``, or ``error``.

    ``tokens`` is counted where ``counted``, else estimated.
    """

    id: Json
    source: str
    line: int
    tokens: int | None
    counted: bool
    max_tokens: int | None
    messages: list[Message] | None
    prompt: str | None
    error: str | None


class RowReport(msgspec.Struct, frozen=True):
    """A row that will not come out well, and why."""

    id: Json
    source: str
    line: int
    error: str


class MaxTokens(msgspec.Struct, frozen=True):
    """``max_tokens`` as it is sent, over the rows looked at; null: the server decides."""

    least: int | None
    most: int | None
    automatic: bool


class TokenReport(msgspec.Struct, frozen=True):
    """Tokens of prompts. ``how``: ``tokenize``, ``simulated`` or ``characters``.

    ``counted`` of the ``rows`` looked at were counted by the server, the others are estimated.
    ``answers_at_most`` is what all answers have if each takes its ``max_tokens``.
    """

    how: str
    by: str
    rows: int
    counted: int
    least: int | None
    median: int | None
    most: int | None
    mean: float | None
    prompts: int | None
    answers_at_most: int | None
    images: int
    repeats: int


class CostReport(msgspec.Struct, frozen=True):
    """Dollars by the given price, in dollars per million tokens; all null where none is known.

    ``modes`` are the ways to send the job, each at most; what only a run can measure is null.
    """

    price_in: float | None
    price_out: float | None
    prompts_usd: float | None
    answers_usd_at_most: float | None
    total_usd_at_most: float | None
    modes: tuple[ModeCost, ...] = ()


class WarmReport(msgspec.Struct, frozen=True):
    """One request ahead of the others at each cold endpoint, or not.

    ``tokens`` begin all prompts, ``rows`` start together at one endpoint, ``saves`` is how many
    prompt tokens all but the first need not compute there if they wait for it. ``warms`` is what a
    run does, ``why`` says it in words.
    """

    tokens: int
    rows: int
    saves: int
    warms: bool
    why: str


class ShareReport(msgspec.Struct, frozen=True):
    """Tokens of a mean prompt by how many rows share them, counted in whole blocks.

    See :class:`bagent.check.prefix_sharing.Shares`. ``exact``: by token ids, else by characters.
    ``kv_tokens`` is the smallest KV cache of the endpoints, ``kv_rows`` how many rows of the job
    fit into it at once, the shared blocks counted once and each answer at its longest.
    """

    block: int
    rows: int
    exact: bool
    prompt: float
    by_all: float
    by_most: float
    by_some: float
    by_none: float
    kv_tokens: int | None
    kv_rows: int | None
    warming: WarmReport


class ReorderReport(msgspec.Struct, frozen=True):
    """A prompt in an order of which more is shared.

    ``gain`` is in tokens a row, ``gain_total`` over all rows. ``yaml`` is ready to paste.
    ``points_back`` is a word such as ``above`` in the text that was moved.
    """

    gain: int
    gain_total: int
    points_back: str | None
    yaml: str


class ExecuteReport(msgspec.Struct, frozen=True):
    """Something that a run would execute: ``kind`` is the key of the job that names it."""

    kind: str
    what: str


class SendReport(msgspec.Struct, frozen=True):
    """A variable of the environment whose value a run would send, and to whom."""

    variable: str
    to: str


class EffectsReport(msgspec.Struct, frozen=True):
    """What a run would execute and send."""

    executes: tuple[ExecuteReport, ...] = ()
    sends: tuple[SendReport, ...] = ()


class CheckReport(msgspec.Struct, frozen=True):
    """Everything that ``bagent check`` found.

    ``planned`` says what a run would start by itself. ``rows_how`` is ``counted``, ``about`` or
    ``at least``. ``parameters`` is the request body less the prompt. ``failing`` are rows of those
    looked at that cannot be read or rendered, ``too_long`` those that do not fit the context;
    both are cut after some, ``failing_count`` and ``too_long_count`` say how many there are.
    ``dead`` says why no endpoint answers, ``refused`` why all of them refuse the key; else null.
    ``stages`` are those of a topology, written out as YAML; then all numbers are of the first one
    that asks. ``effects`` are what a run would do; where ``opened``, the check did so too, and
    ``tools`` are the definitions that the model gets.
    """

    job: str
    file: str
    backend: str
    planned: str | None
    endpoints: tuple[EndpointReport, ...]
    model: str | None
    model_auto: bool
    context: int | None
    inputs: tuple[str, ...]
    rows: int
    rows_how: str
    looked_at: int
    answers: int
    max_tokens: MaxTokens
    schema: SchemaReport | None
    dedupe: bool
    stream: str
    results: str
    parameters: dict[str, Json]
    prompts: tuple[PromptReport, ...]
    tokens: TokenReport
    cost: CostReport
    sharing: ShareReport | None
    reorder: ReorderReport | None
    failing: tuple[RowReport, ...]
    failing_count: int
    too_long: tuple[RowReport, ...]
    too_long_count: int
    warnings: tuple[str, ...]
    dead: str | None = None
    refused: str | None = None
    stages: str | None = None
    effects: EffectsReport = EffectsReport()
    opened: bool = False
    tools: tuple[Json, ...] = ()
