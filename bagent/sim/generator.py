"""What a simulated model answers: seeded by prompt, seed and sample number, within the limits.

A plan is made once per request (which schema, which tools); then one answer per sample. The same
prompt, ``seed`` field, sample number and engine seed give the same answer, in every process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from bagent.sim import tokens
from bagent.sim.config import AnswerConfig
from bagent.sim.regex_text import UnsupportedPattern, matching_text
from bagent.sim.requests import ApiError, ChatRequest, Common, RequestLimits, stops_of
from bagent.sim.schema_values import InstanceMaker, NoInstance
from bagent.sim.text import drawn_length, free_text, seeded
from bagent.types import Json

TextMaker = Callable[[random.Random], str]

_ANY_OBJECT = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "score": {"type": "integer"}},
    "required": ["answer", "score"],
}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_KEPT_MAKERS = 256


class SimulatedToolUse(msgspec.Struct, frozen=True):
    """One tool call: ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True):
    """One sample: visible ``text``, the ``packed`` tokens generated, how it ended."""

    text: str
    packed: bytes
    finish_reason: str
    stop_reason: str | None = None
    tool: SimulatedToolUse | None = None


class GenerationPlan(msgspec.Struct, frozen=True):
    """How the samples of one request are made.

    ``shaped`` makes text bound by a schema, None is free text; ``tools`` are callable ones by name
    with a maker of their arguments; ``tool_rate`` is the chance that a sample calls one.
    """

    shaped: TextMaker | None = None
    tools: dict[str, TextMaker] = msgspec.field(default_factory=dict)
    tool_rate: float = 0.0
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
        self._makers: dict[bytes, InstanceMaker] = {}

    def plan(self, request: Common) -> GenerationPlan:
        """Read what shapes the answers.

        Raises:
            ApiError: 400, a schema, an expression or a tool choice is wrong.
        """
        shaped = self._shaped(request)
        stops = tuple(stops_of(request))
        if not isinstance(request, ChatRequest) or not (request.tools or request.tool_choice):
            return GenerationPlan(shaped, stops=stops, seed=request.seed)
        tools = {_name(tool): self._tool(tool) for tool in request.tools or ()}
        choice = request.tool_choice or "auto"
        if choice == "none":
            return GenerationPlan(shaped, stops=stops, seed=request.seed)
        if not tools:
            raise ApiError(400, "`tool_choice` is only allowed when `tools` are given.")
        if choice == "auto":
            rate = self.config.tool_rate
            return GenerationPlan(shaped, tools, rate, "tool_calls", stops, request.seed)
        if choice == "required":
            return GenerationPlan(shaped, tools, 1.0, "tool_calls", stops, request.seed)
        name = _name(choice) if isinstance(choice, dict) else choice
        if name not in tools:
            raise ApiError(400, "The tool specified in `tool_choice` is not among the `tools`.")
        return GenerationPlan(shaped, {name: tools[name]}, 1.0, "stop", stops, request.seed)

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
            if plan.shaped is not None:
                return _cut(plan.shaped(rng), limits)
        except (NoInstance, UnsupportedPattern) as error:
            raise ApiError(400, str(error)) from None
        return self._free(plan, rng, limits)

    def _free(self, plan: GenerationPlan, rng: random.Random, limits: RequestLimits) -> Answer:
        length = max(drawn_length(rng, self.config), limits.least)
        ended = length <= limits.most and not limits.ignore_eos
        length = length if ended else limits.most
        text = free_text(rng, 4 * length, ended=ended)
        packed = tokens.pack(text)
        found = [(at, stop) for stop in plan.stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            used = packed[: 4 * -(-(at + len(stop)) // 4)]
            return Answer(text[:at], used, "stop", stop)
        return Answer(text, packed, "stop" if ended else "length")

    def _shaped(self, request: Common) -> TextMaker | None:
        wanted = {k: v for k, v in (request.structured_outputs or {}).items() if k in _KINDS and v}
        form = request.response_format or {}
        kind = form.get("type", "text")
        if kind == "json_schema":
            spec = form.get("json_schema")
            if not isinstance(spec, dict) or "schema" not in spec:
                raise ApiError(400, "response_format needs json_schema.schema.")
            wanted["json"] = spec["schema"]
        elif kind == "json_object":
            wanted["json_object"] = True
        elif kind != "text":
            raise ApiError(400, f"The simulated engine has no response_format {kind!r}.")
        if len(wanted) > 1:
            raise ApiError(
                400, f"Only one structured outputs constraint may be set, got {list(wanted)}."
            )
        return self._constrained(*next(iter(wanted.items()))) if wanted else None

    def _constrained(self, kind: str, value: Json) -> TextMaker:
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
        """A maker of JSON text for a schema, kept for the next request with the same one."""
        try:
            schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
            key = msgspec.json.encode(schema)
            maker = self._makers.get(key)
            if maker is None:
                maker = InstanceMaker(schema)
                if len(self._makers) >= _KEPT_MAKERS:
                    self._makers.clear()
                self._makers[key] = maker
        except (NoInstance, msgspec.DecodeError) as error:
            raise ApiError(400, str(error)) from None
        found = maker
        return lambda rng: msgspec.json.encode(found.make(rng)).decode()

    def _tool(self, tool: dict[str, Any]) -> TextMaker:
        parameters = tool["function"].get("parameters")
        return self._json({"type": "object", **(parameters or {})})


def _name(entry: dict[str, Any]) -> str:
    function = entry.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a tool needs a function with a name.", param="tools")
    return str(function["name"])


def _cut(text: str, limits: RequestLimits) -> Answer:
    """An answer of given text, cut where it is longer than allowed."""
    packed = tokens.pack(text)
    if tokens.count(packed) <= limits.most:
        return Answer(text, packed or tokens.pack(" "), "stop")
    packed = packed[: 4 * limits.most]
    return Answer(tokens.text_of(packed), packed, "length")


def _tool_answer(plan: GenerationPlan, rng: random.Random, limits: RequestLimits) -> Answer:
    name = rng.choice(list(plan.tools))
    arguments = plan.tools[name](rng)
    call_id = f"chatcmpl-tool-{rng.getrandbits(64):016x}"
    answer = _cut(arguments, limits)
    reason = plan.tool_reason if answer.finish_reason == "stop" else "length"
    return Answer("", answer.packed, reason, None, SimulatedToolUse(call_id, name, answer.text))
