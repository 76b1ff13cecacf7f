"""Answers of the simulated model, seeded by prompt, seed and sample number, within the limits.

A plan is made once per request (schema, tools), then one answer per sample. The same prompt,
``seed`` field, sample number and engine seed give the same answer in every process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from bagent.sim import tokens
from bagent.sim.config import AnswerConfig
from bagent.sim.requests import (
    ApiError,
    ChatRequest,
    GenerationRequest,
    RequestLimits,
    stop_strings,
)
from bagent.sim.schema_values import SchemaSampler, UnsatisfiableSchema
from bagent.sim.text import UnsupportedPattern, draw_length, free_text, matching_text, seeded
from bagent.types import Json

TextMaker = Callable[[random.Random], str]

_ANY_OBJECT = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "score": {"type": "integer"}},
    "required": ["answer", "score"],
}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MAX_CACHED_SAMPLERS = 256


class SimulatedToolUse(msgspec.Struct, frozen=True):
    """One tool call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True):
    """One sample."""

    text: str
    """The visible text."""
    packed: bytes
    """The generated tokens."""
    finish_reason: str
    stop_reason: str | None = None
    tool: SimulatedToolUse | None = None


class GenerationPlan(msgspec.Struct, frozen=True):
    """How the samples of one request are made."""

    constrained: TextMaker | None = None
    """Makes constrained text; None is free text."""
    tools: dict[str, TextMaker] = msgspec.field(default_factory=dict)
    """Callable tools by name, each with a maker of its arguments."""
    tool_rate: float = 0.0
    """Chance that a sample calls a tool."""
    tool_reason: str = "tool_calls"
    stops: tuple[str, ...] = ()
    seed: int | None = None


class AnswerWriter:
    """Plans and writes the answers of one engine.

    Args:
        config: lengths and rates.
        seed: the engine's seed.
    """

    def __init__(self, config: AnswerConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self._samplers: dict[bytes, SchemaSampler] = {}

    def plan(self, request: GenerationRequest) -> GenerationPlan:
        """Return the plan for a request.

        Raises:
            ApiError: 400, a schema, an expression or a tool choice is wrong.
        """
        constrained = self._constraint(request)
        stops = tuple(stop_strings(request))
        if not isinstance(request, ChatRequest) or not (request.tools or request.tool_choice):
            return GenerationPlan(constrained, stops=stops, seed=request.seed)
        tools = {_name(tool): self._tool(tool) for tool in request.tools or ()}
        choice = request.tool_choice or "auto"
        if choice == "none":
            return GenerationPlan(constrained, stops=stops, seed=request.seed)
        if not tools:
            raise ApiError(400, "`tool_choice` is only allowed when `tools` are given.")
        if choice == "auto":
            rate = self.config.tool_rate
            return GenerationPlan(constrained, tools, rate, "tool_calls", stops, request.seed)
        if choice == "required":
            return GenerationPlan(constrained, tools, 1.0, "tool_calls", stops, request.seed)
        name = _name(choice) if isinstance(choice, dict) else choice
        if name not in tools:
            raise ApiError(400, "The tool specified in `tool_choice` is not among the `tools`.")
        return GenerationPlan(constrained, {name: tools[name]}, 1.0, "stop", stops, request.seed)

    def answer(
        self, plan: GenerationPlan, prompt: bytes, limits: RequestLimits, sample: int
    ) -> Answer:
        """Write one sample's answer to a packed prompt.

        Raises:
            ApiError: 400, no instance of the schema was found.
        """
        rng = seeded(prompt, self.seed, plan.seed, sample)
        try:
            if plan.tools and (plan.tool_rate >= 1 or rng.random() < plan.tool_rate):
                return _tool_answer(plan, rng, limits)
            if plan.constrained is not None:
                return _cut(plan.constrained(rng), limits)
        except (UnsatisfiableSchema, UnsupportedPattern) as error:
            raise ApiError(400, str(error)) from None
        return self._free(plan, rng, limits)

    def _free(self, plan: GenerationPlan, rng: random.Random, limits: RequestLimits) -> Answer:
        length = max(draw_length(rng, self.config), limits.min_tokens)
        ended = length <= limits.max_tokens and not limits.ignore_eos
        length = length if ended else limits.max_tokens
        text = free_text(rng, 4 * length, ended=ended)
        packed = tokens.pack(text)
        matches = [(at, stop) for stop in plan.stops if (at := text.find(stop)) >= 0]
        if matches:
            at, stop = min(matches)
            used = packed[: 4 * -(-(at + len(stop)) // 4)]
            return Answer(text[:at], used, "stop", stop)
        return Answer(text, packed, "stop" if ended else "length")

    def _constraint(self, request: GenerationRequest) -> TextMaker | None:
        constraints = {
            k: v for k, v in (request.structured_outputs or {}).items() if k in _KINDS and v
        }
        form = request.response_format or {}
        kind = form.get("type", "text")
        if kind == "json_schema":
            spec = form.get("json_schema")
            if not isinstance(spec, dict) or "schema" not in spec:
                raise ApiError(400, "response_format needs json_schema.schema.")
            constraints["json"] = spec["schema"]
        elif kind == "json_object":
            constraints["json_object"] = True
        elif kind != "text":
            raise ApiError(400, f"The simulated engine has no response_format {kind!r}.")
        if len(constraints) > 1:
            raise ApiError(
                400, f"Only one structured outputs constraint may be set, got {list(constraints)}."
            )
        return self._make_text(*next(iter(constraints.items()))) if constraints else None

    def _make_text(self, kind: str, value: Json) -> TextMaker:
        if kind == "json":
            return self._json(value)
        if kind == "json_object":
            return self._json(_ANY_OBJECT)
        if kind == "regex" and isinstance(value, str):
            return lambda rng: matching_text(rng, value)
        if kind == "choice" and isinstance(value, list):
            return lambda rng: str(rng.choice(value))
        raise ApiError(400, f"The simulated engine cannot obey structured_outputs.{kind}.")

    def _json(self, schema: Json) -> TextMaker:
        """Return a maker of JSON text for a schema; it is cached by schema."""
        try:
            schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
            key = msgspec.json.encode(schema)
            sampler = self._samplers.get(key)
            if sampler is None:
                sampler = SchemaSampler(schema)
                if len(self._samplers) >= _MAX_CACHED_SAMPLERS:
                    self._samplers.clear()
                self._samplers[key] = sampler
        except (UnsatisfiableSchema, msgspec.DecodeError) as error:
            raise ApiError(400, str(error)) from None
        ready = sampler
        return lambda rng: msgspec.json.encode(ready.make(rng)).decode()

    def _tool(self, tool: dict[str, Any]) -> TextMaker:
        parameters = tool["function"].get("parameters")
        return self._json({"type": "object", **(parameters or {})})


def _name(entry: dict[str, Any]) -> str:
    function = entry.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a tool needs a function with a name.", param="tools")
    return str(function["name"])


def _cut(text: str, limits: RequestLimits) -> Answer:
    """Return an answer of ``text``, cut at the limit."""
    packed = tokens.pack(text)
    if tokens.count(packed) <= limits.max_tokens:
        return Answer(text, packed or tokens.pack(" "), "stop")
    packed = packed[: 4 * limits.max_tokens]
    return Answer(tokens.text_of(packed), packed, "length")


def _tool_answer(plan: GenerationPlan, rng: random.Random, limits: RequestLimits) -> Answer:
    name = rng.choice(list(plan.tools))
    arguments = plan.tools[name](rng)
    call_id = f"chatcmpl-tool-{rng.getrandbits(64):016x}"
    answer = _cut(arguments, limits)
    reason = plan.tool_reason if answer.finish_reason == "stop" else "length"
    return Answer("", answer.packed, reason, None, SimulatedToolUse(call_id, name, answer.text))
