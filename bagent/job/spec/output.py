"""Answer schema, sampling, batching and results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from bagent.job.spec.paths import (
    AllowFailures,
    AllowFailuresKind,
    PathKind,
    PublishTargetKind,
    ResolvedPath,
    resolve_path,
)
from bagent.job.spec.types import (
    VARIABLE,
    Choice,
    Flag,
    FreeForm,
    IntegerKind,
    Kind,
    NumberKind,
    Section,
    Text,
    TextList,
    invalid,
)
from bagent.job.validation import LoadContext
from bagent.job.yaml.scalars import plain
from bagent.text.durations import time_by
from bagent.text.suggest import describe_value
from bagent.types import Json

Enforce = Literal["auto", "native", "prompt"]
Describe = Literal["auto", "always", "never"]
Truncated = Literal["fail", "accept"]
BatchMode = Literal["auto", "single", "chat", "completions", "provider", "cheapest"]
PrefixMode = Literal["auto", "always", "never"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_NOT_EXTRA = {
    "model": "write model: at the top of the job",
    "messages": "write prompt:",
    "prompt": "write prompt: at the top of the job",
    "n": "write answers: N at the top of the job",
    "stream": "write stream: at the top of the job",
}


@dataclass(frozen=True)
class SchemaKind(Kind):
    """A JSON Schema: a file, or the schema itself as a mapping."""

    def read(self, value: Any, context: LoadContext | None) -> ResolvedPath | dict[str, Json]:
        """Return the schema itself, or the place of its file."""
        if isinstance(value, dict):
            schema: dict[str, Json] = plain(value)
            return schema
        if isinstance(value, str):
            return resolve_path(value, context)
        raise invalid(f"expected a schema's path or the schema itself, got {describe_value(value)}")

    def dump(self, value: Any) -> Json:
        """Return the schema itself, or its file's absolute path."""
        return str(value.path) if isinstance(value, ResolvedPath) else value

    def describe(self) -> Json:
        """Return text or an object."""
        return {"anyOf": [{"type": "string"}, {"type": "object"}]}


@dataclass(frozen=True)
class ModeKind(Kind):
    """The mode of a folder in octal digits, as ``chmod`` takes it."""

    def read(self, value: Any, context: LoadContext | None) -> int:
        """Return the mode as a number; only the owner and the group may write."""
        text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
        if not re.fullmatch(r"0?7[0157][015]", text):
            hint = "750 lets the group in, 770 lets it write, 755 lets everybody read"
            raise invalid(f"expected a mode such as 700, got {describe_value(value)}", hint)
        return int(text, 8)

    def dump(self, value: Any) -> Json:
        """Return the octal digits."""
        return f"{value:o}" if isinstance(value, int) else value

    def describe(self) -> Json:
        """Octal digits, as a number or a text."""
        return {"anyOf": [{"enum": [700, 710, 711, 750, 755, 770, 775]}, VARIABLE]}


class OutputSpec(Section):
    """What an answer must look like."""

    schema_: Annotated[ResolvedPath | dict[str, Json] | None, SchemaKind()] = Field(
        default=None,
        alias="schema",
        description="JSON Schema of an answer: a path, or the schema itself.",
        examples=["review.schema.json"],
    )
    enforce: Annotated[Enforce, Choice(Enforce)] = Field(
        default="auto",
        description="Who makes the answer fit: the engine (native), words in the prompt, or auto.",
    )
    describe: Annotated[Describe, Choice(Describe)] = Field(
        default="auto",
        description="Put the schema in the shared prompt too: auto does so on own engines.",
    )
    retries: Annotated[int, IntegerKind(0, 100)] = Field(
        default=2, description="How often a row is asked again with the validator's words."
    )
    grow: Annotated[float, NumberKind(1, 64)] = Field(
        default=1.0,
        description="A truncated answer may be asked again with this many times max_tokens.",
    )
    truncated: Annotated[Truncated | None, Choice(Truncated)] = Field(
        default=None,
        description="A truncated answer is a failure (fail), or finished with status truncated"
        " (accept). Unset: accept for lines of a batch file with their own max_tokens, else fail.",
    )


class SamplingSpec(Section):
    """How tokens are drawn; what is not set is not sent."""

    misplaced: ClassVar[Mapping[str, str]] = {
        "n": "write answers: N at the top of the job",
        "max_completion_tokens": "write max_tokens; it is sent under the name the server wants",
        "max_new_tokens": "write max_tokens",
        "max_output_tokens": "write max_tokens",
        "model": "write model: at the top of the job",
        "stream": "write stream: at the top of the job",
        "response_format": "write output: {schema: ...}",
    }

    temperature: Annotated[float | None, NumberKind(0, 2)] = Field(
        default=None, description="0 is the most likely token each time.", examples=[0, 0.7]
    )
    max_tokens: Annotated[int | None, IntegerKind(1)] = Field(
        default=None,
        description="Most tokens of an answer; unset: what the context leaves, up to 4096.",
    )
    seed: Annotated[int | None, IntegerKind(-(2**63), 2**63 - 1)] = Field(
        default=None, description="Seed of the sampler."
    )
    top_p: Annotated[float | None, NumberKind(0, 1, above=True)] = Field(
        default=None, description="Keep the likeliest tokens with this total probability."
    )
    top_k: Annotated[int | None, IntegerKind(-1)] = Field(
        default=None, description="Keep this many of the likeliest tokens; -1 keeps all."
    )
    min_p: Annotated[float | None, NumberKind(0, 1)] = Field(
        default=None, description="Drop tokens less likely than this share of the likeliest."
    )
    stop: Annotated[tuple[str, ...] | None, TextList()] = Field(
        default=None, description="Texts that end an answer."
    )
    presence_penalty: Annotated[float | None, NumberKind(-2, 2)] = Field(
        default=None, description="Against tokens that were there before."
    )
    frequency_penalty: Annotated[float | None, NumberKind(-2, 2)] = Field(
        default=None, description="Against tokens by how often they were there before."
    )
    repetition_penalty: Annotated[float | None, NumberKind(0, 10, above=True)] = Field(
        default=None, description="Factor against repeated tokens; 1 is none."
    )
    logprobs: Annotated[bool | None, Flag()] = Field(
        default=None, description="Return the log-probability of each token."
    )
    top_logprobs: Annotated[int | None, IntegerKind(0, 20)] = Field(
        default=None,
        description="Return this many likely tokens for each place; needs logprobs: true.",
    )
    reasoning_effort: Annotated[Effort | None, Choice(Effort)] = Field(
        default=None, description="How long a reasoning model thinks."
    )
    extra: Annotated[Mapping[str, Json], FreeForm(mapping=True)] = Field(
        default_factory=dict, description="Further request fields, sent as they are."
    )

    @classmethod
    def _note_unknown(cls, data: Any, key: str, context: LoadContext | None) -> bool:
        noted = super()._note_unknown(data, key, context)
        if noted and context is not None:
            at, message, hint = context.problems.items[-1]
            if hint.startswith("known:"):
                hint = f"other request fields go under extra: {{{key}: ...}}"
                context.problems.items[-1] = (at, message, hint)
        return noted

    @model_validator(mode="after")
    def _check(self) -> SamplingSpec:
        for key in self.extra:
            if key in _NOT_EXTRA:
                raise invalid(f"extra may not set {key}", _NOT_EXTRA[key], key="extra")
            if key in self.known_keys():
                raise invalid(
                    f"{key} is a known name", f"write sampling: {{{key}: ...}}", key="extra"
                )
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true", key="top_logprobs")
        return self

    def request_fields(self) -> dict[str, Json]:
        """Return the set fields and those of ``extra``, by the names of the OpenAI chat API."""
        fields: dict[str, Json] = {
            key: value
            for key in self.known_keys()
            if key != "extra" and (value := getattr(self, key)) is not None
        }
        if self.stop is not None:
            fields["stop"] = list(self.stop)
        return {**fields, **self.extra}


class BatchingSpec(Section):
    """How rows are put together into requests."""

    mode: Annotated[BatchMode, Choice(BatchMode)] = Field(
        default="auto",
        description="auto: what each endpoint can do; provider: the half-price batch service;"
        " cheapest: that service, and single calls for what is late.",
    )
    by: Annotated[str | None, Text()] = Field(
        default=None,
        description="With cheapest: when all rows are to be done, from the start of the run.",
        examples=["18h", "07:30"],
    )
    size: Annotated[int | Literal["auto"], IntegerKind(1, 100_000, ("auto",))] = Field(
        default="auto", description="Rows in one request, or in one batch of a provider."
    )
    s3_uri: Annotated[str | None, Text()] = Field(
        default=None, description="Where Bedrock's batches read and write: s3://BUCKET/FOLDER."
    )
    role_arn: Annotated[str | None, Text()] = Field(
        default=None, description="The role by which Bedrock's batches touch that folder."
    )
    service_tier: Annotated[str | None, Text()] = Field(
        default=None,
        description="Asked for with every single call where the API has tiers, such as flex;"
        " with cheapest, for the first half of the single calls' time.",
    )
    prefix: Annotated[PrefixMode, Choice(PrefixMode)] = Field(
        default="auto",
        description="Rows that begin alike meet the same endpoint, and a cold cache is warmed:"
        " auto where it pays.",
    )

    @property
    def in_batches(self) -> bool:
        """Whether rows go through a provider's batch service."""
        return self.mode in ("provider", "cheapest")

    @model_validator(mode="after")
    def _check_by(self) -> BatchingSpec:
        if (self.mode == "cheapest") != (self.by is not None):
            raise invalid(
                "mode cheapest and by need each other",
                "write batching: {mode: cheapest, by: 18h}",
                key="by" if self.by is not None else "mode",
            )
        if self.by is not None:
            try:
                time_by(self.by, 0.0)
            except ValueError:
                raise invalid(
                    f"expected a duration like 18h or a time like 07:30, got {self.by}", key="by"
                ) from None
        return self


class ResultsSpec(Section):
    """Where results go and how many failures are all right."""

    dir: Annotated[ResolvedPath, PathKind("cwd")] = Field(
        default=ResolvedPath(Path("runs"), "runs"),
        validate_default=True,
        description="Folder of runs, relative to the current folder.",
    )
    mode: Annotated[int | None, ModeKind()] = Field(
        default=None,
        description="Who may enter the run directory, as for chmod; default: 700, you alone.",
        examples=["750"],
    )
    keep_input: Annotated[bool, Flag()] = Field(
        default=True, description="Keep the input in the tables."
    )
    parquet: Annotated[bool, Flag()] = Field(
        default=True, description="Make Parquet files at the end."
    )
    duckdb: Annotated[bool, Flag()] = Field(default=True, description="Make run.duckdb at the end.")
    publish: Annotated[str | None, PublishTargetKind()] = Field(
        default=None,
        description="Bucket or folder that gets a copy of the tables at the end.",
        examples=["s3://bucket/runs/review"],
    )
    allow_failures: Annotated[AllowFailures, AllowFailuresKind()] = Field(
        default=AllowFailures(0),
        description="Up to this many failed rows, or this share of them, the exit code stays 0.",
        examples=[10, "5%"],
    )

    @model_validator(mode="after")
    def _check_publish(self) -> ResultsSpec:
        if self.publish is not None and not (self.parquet or self.duckdb):
            raise invalid(
                "publish copies tables, and parquet and duckdb are both false",
                "leave parquet: false out",
                key="publish",
            )
        return self
