"""Requests of a load stage: generated prompts, recorded lengths, or the bodies of a job.

Prompts have a given length, without a tokenizer. A prompt is plain English. Its first words come
from its number and the run's salt, so that no two prompts share a prefix unless groups of shared
prefixes are requested; the other words are a slice of one long text. How many words make N tokens
is measured on the server (:func:`bagent.bench.client.calibrate`).
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bagent.backends.endpoint import Capabilities
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.request import encode_payload
from bagent.bench.plan import AnswerPlan, JobBody, Lengths, LoadConfig
from bagent.bench.schedule import LoadStage
from bagent.check.sample import make_requests
from bagent.errors import JobError
from bagent.fleet.health_check import HealthResult
from bagent.runs.context import RunContext, RunOptions, open_input, prepare
from bagent.runs.plan import make_plan, resolve_model
from bagent.servers.resolve import Servers
from bagent.types import Json

_PATHS = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "list": "/completions",
    "chat-batch": "/chat/completions/batch",
}


class LoadRequest(msgspec.Struct, frozen=True):
    """One request, ready to be sent; ``size`` calls travel in it."""

    path: str
    body: bytes
    stream: bool
    size: int = 1


class ScheduleSlot(msgspec.Struct):
    """One slot in a stage's schedule."""

    number: int
    """Index over all workers."""
    group: int | None = None
    due: float | None = None
    """When it is due, on the test's clock; None is as soon as possible."""
    turn: int = 1
    """Turn of a conversation, from 1."""
    history: list[tuple[str, str]] = []
    """User text and answer of each turn before."""


class RequestFactory:
    """Makes the requests of a load test; equal slots give equal requests in every process."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._text = PromptMaker(config.salt)
        self._fields: dict[tuple[int, int, bool], dict[str, Json]] = {}
        self._prefixes: dict[tuple[str, int], str] = {}

    def make(self, stage: LoadStage, slot: ScheduleSlot, target: int) -> LoadRequest:
        """Return the request for ``slot`` of ``stage`` to the endpoint with the index
        ``target``."""
        if stage.way == "job":
            return self._job(slot.number, target)
        single = stage.way in ("chat", "completions")
        fields = self._fixed(target, self._answer(stage, slot), stream=single)
        size = 1 if single else self._config.list_size
        texts = [self._prompt(stage, slot, target, index) for index in range(size)]
        path = _PATHS[stage.way]
        if stage.way == "chat":
            return LoadRequest(
                path, request_body(fields, "messages", _chat(texts[0], slot.history)), True
            )
        if stage.way == "completions":
            text = (
                "".join(f"{user_text}{answer}\n" for user_text, answer in slot.history) + texts[0]
            )
            return LoadRequest(path, request_body(fields, "prompt", text), True)
        if stage.way == "list":
            return LoadRequest(path, request_body(fields, "prompt", texts), False, size)
        chats: list[Any] = [_chat(text) for text in texts]
        return LoadRequest(path, request_body(fields, "messages", chats), False, size)

    def user_text(self, stage: LoadStage, slot: ScheduleSlot, target: int) -> str:
        """Return what ``slot`` adds to its conversation."""
        return self._prompt(stage, slot, target, 0)

    def _answer(self, stage: LoadStage, slot: ScheduleSlot) -> AnswerPlan:
        plan = self._config.answer
        if stage.speed is None:
            return plan
        tokens = max(1, self._config.trace[slot.number].output_tokens)
        return msgspec.structs.replace(plan, tokens=tokens)

    def _fixed(self, target: int, answer: AnswerPlan, *, stream: bool) -> dict[str, Json]:
        key = target, answer.tokens, stream
        fields = self._fields.get(key)
        if fields is None:
            bench_target = self._config.targets[target]
            fields = fixed_fields(bench_target.model, answer, bench_target.engine)
            if stream:
                fields |= stream_fields(bench_target.engine)
            self._fields[key] = fields
        return fields

    def _prompt(self, stage: LoadStage, slot: ScheduleSlot, target: int, index: int) -> str:
        model = self._config.targets[target].model or ""
        lengths = self._config.lengths.get(model) or Lengths(100)
        name = f"{stage.number}/{'w' if stage.warmup else ''}{slot.number}/{index}"
        if stage.speed is not None:
            return self._text.unique_text(
                lengths.word_count(self._config.trace[slot.number].input_tokens), name
            )
        if slot.turn > 1:
            count = round(self._config.turn_tokens / lengths.per_word)
            return self._text.unique_text(max(1, count), f"{name}/{slot.turn}")
        text, group = self._text.unique_text(lengths.own, name), slot.group
        if group is None:
            return text
        # Each stage has its own prefixes: otherwise the second stage would find them cached.
        key = (f"{stage.number}/group{group}", lengths.prefix)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = self._text.unique_text(lengths.prefix, key[0])
        return f"{prefix} {text}"

    def _job(self, number: int, target: int) -> LoadRequest:
        body = self._config.job[number % len(self._config.job)]
        stream = stream_fields(self._config.targets[target].engine)
        end = encode_payload(stream)[1:]
        return LoadRequest(body.path, body.body[:-1].encode() + b"," + end, True)


def _chat(text: str, history: Sequence[tuple[str, str]] = ()) -> list[dict[str, str]]:
    before = [
        {"role": role, "content": content}
        for turn in history
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    return [*before, {"role": "user", "content": text}]


MOST_ROWS = 2000
"""Rows of a job that are read; a longer load repeats them."""


def prepare_job(
    job: Path, env: Mapping[str, str], cwd: Path, sets: Sequence[str] = ()
) -> RunContext:
    """Return the checked job; nothing is sent.

    Raises:
        UsageError: the job, its schema or its options are wrong.
    """
    return prepare(RunOptions(job, env=env, cwd=cwd, sets=tuple(sets)))


def make_job_bodies(context: RunContext, health: Sequence[HealthResult]) -> list[JobBody]:
    """Return the bodies of the job's first rows for the endpoints that are ready.

    Raises:
        UsageError: no row can be sent, or the endpoints' models differ from the job's.
    """
    capabilities: dict[str, Capabilities] = {
        result.endpoint.name: result.capabilities
        for result in health
        if result.ready and result.capabilities
    }
    models_in_rows = context.own_bodies and context.job.model == "auto"
    model = None if models_in_rows else resolve_model(context.job, capabilities)
    servers = Servers([result.endpoint for result in health], "vllm")
    plan = make_plan(context, servers, model, capabilities)
    source = open_input(context, stdin=sys.stdin.buffer)
    try:
        rows = itertools.chain.from_iterable(source.batches())
        sampled = make_requests(plan, itertools.islice(rows, MOST_ROWS))
    finally:
        source.close()
    native = context.job.output.enforce != "prompt"
    writer = BodyWriter(model or "", native_schema=native)
    bodies = []
    for result in sampled:
        request = result.request
        if request is not None:
            key = "prompt" if request.prompt is not None else None
            body = writer.body(request, key=key, stream=False)
            bodies.append(JobBody(request.path, body.decode()))
    if not bodies:
        reason = sampled[0].error if sampled else "it has no rows"
        raise JobError(f"no row of the job can be sent: {reason}")
    return bodies


_VOCABULARY = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work night point home
water room mother area money story fact month lot right study book eye job word issue side kind
head house service friend father power hour game line end member law car city name
"""
WORDS = tuple(_VOCABULARY.split())
"""Sixty-four common words, mostly one token each in any vocabulary."""

NONCE = 10
"""Words at the start of a prompt that make it unique: 60 bits."""

_POOL = 4096


class PromptMaker:
    """Makes the texts of prompts.

    Args:
        salt: differs between runs, so that servers have nothing cached.
    """

    def __init__(self, salt: str) -> None:
        self._salt = salt
        rng = random.Random(f"{salt}/pool")
        self._pool = rng.choices(WORDS, k=_POOL)

    def unique_text(self, count: int, name: str) -> str:
        """Return ``count`` words with a prefix that only the prompt ``name`` has."""
        digest = hashlib.blake2b(f"{self._salt}/{name}".encode(), digest_size=16).digest()
        bits = int.from_bytes(digest[:8], "little")
        nonce = [WORDS[bits >> 6 * index & 63] for index in range(min(NONCE, count))]
        return " ".join([*nonce, *self._slice(count - len(nonce), digest[8:])])

    def _slice(self, count: int, digest: bytes) -> Sequence[str]:
        start = int.from_bytes(digest, "little") % _POOL
        piece = self._pool[start : start + count]
        while len(piece) < count:
            piece += self._pool[: count - len(piece)]
        return piece


class PromptGroups:
    """Draws the prefix group of each request.

    Args:
        count: number of groups.
        skew: Zipf exponent: group k has the frequency 1/(k+1)**skew.
    """

    def __init__(self, count: int, skew: float, seed: str) -> None:
        self.count = count
        self._weights = [1 / (number + 1) ** skew for number in range(count)]
        self._rng = random.Random(seed)

    def next(self, among: Sequence[int] | None = None) -> int:
        """Return the group of the next request, one of ``among`` if set."""
        if among is None:
            return self._rng.choices(range(self.count), self._weights)[0]
        return self._rng.choices(among, [self._weights[group] for group in among])[0]


def json_schema(tokens: int) -> Json:
    """Return a schema whose answers have about ``tokens`` tokens (10 per finding)."""
    finding = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["bug", "style", "speed"]},
            "line": {"type": "integer", "minimum": 100, "maximum": 999},
        },
        "required": ["kind", "line"],
        "additionalProperties": False,
    }
    count = max(1, tokens // 10)
    items = {"type": "array", "items": finding, "minItems": count, "maxItems": count}
    return {
        "type": "object",
        "properties": {"findings": items},
        "required": ["findings"],
        "additionalProperties": False,
    }


EXACT = frozenset({"vllm", "sglang", "dynamo"})
"""Engines that support ``ignore_eos`` and ``min_tokens``."""


def fixed_fields(model: str | None, answer: AnswerPlan, engine: str | None) -> dict[str, Json]:
    """Return the body fields that all requests of an endpoint share.

    Engines in :data:`EXACT` are told to give free answers of exactly the length; JSON ends by
    itself.
    """
    fields: dict[str, Json] = {"model": model} if model else {}
    fields |= {"max_tokens": answer.max_tokens, "temperature": 0}
    if answer.as_json:
        form = {"name": "findings", "schema": json_schema(answer.tokens)}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    elif engine in EXACT:
        fields |= {"ignore_eos": True, "min_tokens": answer.tokens}
    return fields


def stream_fields(engine: str | None) -> dict[str, Json]:
    """Return the fields that request a stream, with usage per chunk where the engine supports
    it."""
    options: dict[str, Json] = {"include_usage": True}
    if engine == "vllm":
        options["continuous_usage_stats"] = True
    return {"stream": True, "stream_options": options}


def request_body(fields: dict[str, Json], key: str, value: Json) -> bytes:
    """Return a request body: the fixed fields and the prompt under ``key``."""
    return encode_payload({**fields, key: value})
