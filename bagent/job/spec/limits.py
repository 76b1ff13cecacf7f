"""Concurrency, rate, time and cost limits, and prices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from bagent.job.spec.types import Duration, IntegerKind, NumberKind, Section, invalid
from bagent.types import Json


class TimeoutSpec(Section):
    """Time limits of one request, in seconds; none is no limit."""

    short_form: ClassVar[list[Json]] = [Duration().describe()]

    connect: Annotated[float | None, Duration()] = Field(
        default=10.0, description="To a connection."
    )
    first_token: Annotated[float | None, Duration()] = Field(
        default=300.0, description="To the first token of a streamed answer."
    )
    idle: Annotated[float | None, Duration()] = Field(
        default=120.0, description="Between two pieces of a streamed answer."
    )
    total: Annotated[float | None, Duration()] = Field(
        default=1800.0, description="Of one request."
    )

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Expand one duration to all four limits."""
        if isinstance(data, (dict, list)):
            return data
        seconds = Duration().read(data, None)
        return dict.fromkeys(cls.model_fields, "none" if seconds is None else seconds)


class LimitsSpec(Section):
    """Limits of the run, of a row, of an endpoint and of a request."""

    misplaced: ClassVar[Mapping[str, str]] = {
        "budget": "did you mean budget_usd?",
        "max_retries": "did you mean retries?",
        "max_concurrency": "did you mean concurrency?",
        "requests_per_minute": "did you mean rpm?",
        "tokens_per_minute": "did you mean tpm?",
    }

    concurrency: Annotated[int | Literal["auto"], IntegerKind(1, 1_000_000, ("auto",))] = Field(
        default="auto", description="Rows in flight over the whole run."
    )
    per_endpoint: Annotated[int | Literal["auto"], IntegerKind(1, 1_000_000, ("auto",))] = Field(
        default="auto", description="Rows in flight over one endpoint."
    )
    retries: Annotated[int, IntegerKind(0, 1000)] = Field(
        default=5,
        description="How many times a failed row is retried."
        " Retries for a busy or lost server do not count.",
    )
    hedge: Annotated[float | Literal["off", "auto"] | None, Duration(("off", "auto"))] = Field(
        default="off", description="Send a late request a second time elsewhere, after this long."
    )
    timeout: TimeoutSpec = Field(
        default_factory=TimeoutSpec,
        description="Time limits of one request; one duration sets all four.",
        examples=["2m"],
    )
    row: Annotated[float | None, Duration()] = Field(
        default=None, description="Time limit of one row, over all its requests; default: none."
    )
    retry_after_max: Annotated[float, Duration(finite=True)] = Field(
        default=120.0, description="A wait that a server asks for is cut to this; it is reported."
    )
    rpm: Annotated[int | None, IntegerKind(1, keywords=("none",))] = Field(
        default=None, description="Requests a minute."
    )
    tpm: Annotated[int | None, IntegerKind(1, keywords=("none",))] = Field(
        default=None, description="Tokens a minute."
    )
    budget_usd: Annotated[float | None, NumberKind(0, keywords=("none",))] = Field(
        default=None, description="Stop before more than this is spent."
    )
    stop_after_failures: Annotated[int | None, IntegerKind(1, keywords=("none",))] = Field(
        default=None, description="Stop, for a person to look, after this many failed rows."
    )


class PricesSpec(Section):
    """What tokens cost, in dollars per million, before the prices that come with bagent; and what
    GPUs of one's own cost."""

    input: Annotated[float | None, NumberKind(0)] = Field(
        default=None, description="Tokens of prompts, in dollars per million."
    )
    output: Annotated[float | None, NumberKind(0)] = Field(
        default=None, description="Tokens of answers, in dollars per million."
    )
    cached: Annotated[float | None, NumberKind(0)] = Field(
        default=None, description="Prompt tokens read from a cache; default: as input."
    )
    cache_write: Annotated[float | None, NumberKind(0)] = Field(
        default=None, description="Prompt tokens written to a cache; default: as input."
    )
    batch: Annotated[float | None, NumberKind(0, 1)] = Field(
        default=None, description="Share of these prices that the provider's batch service takes."
    )
    gpu_hour: Annotated[float | None, NumberKind(0)] = Field(
        default=None,
        description="One GPU of your own for an hour, in dollars; tag gpus of a hostfile: how many"
        " an endpoint has.",
    )

    @model_validator(mode="after")
    def _both(self) -> PricesSpec:
        set_keys = {name for name in type(self).model_fields if getattr(self, name) is not None}
        if set_keys == {"gpu_hour"}:
            return self
        missing = [name for name in ("input", "output") if getattr(self, name) is None]
        if missing:
            needed = " and ".join(f"{name}:" for name in missing)
            raise invalid(
                f"prices need {needed} too, since they replace the known prices as a whole",
                "write prices: {input: 0.15, output: 0.60}",
            )
        return self
