"""From a place in the schedule to the request that is sent for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bagent.backends.endpoint import Capabilities
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.request import encode_payload
from bagent.bench.plan import JobBody, LoadConfig
from bagent.bench.prompts import (
    AnswerPlan,
    Lengths,
    PromptMaker,
    body_of,
    fixed_fields,
    stream_fields,
)
from bagent.bench.schedule import LoadStage
from bagent.check.sample import open_rows_as_requests
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
    """One request, ready to go; ``size`` calls travel in it."""

    path: str
    body: bytes
    stream: bool
    size: int = 1


class ScheduleSlot(msgspec.Struct):
    """A place in a stage's schedule."""

    number: int
    """Over all workers."""
    group: int | None = None
    due: float | None = None
    """When it is to be sent, on the test's clock; None is as soon as it can be."""
    turn: int = 1
    """Of a conversation, from 1."""
    said: list[tuple[str, str]] = []
    """What was said in the turns before: what was asked and what was answered."""


class RequestFactory:
    """Makes the requests of a load test; equal places give equal requests in every process."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._text = PromptMaker(config.salt)
        self._fields: dict[tuple[int, int, bool], dict[str, Json]] = {}
        self._prefixes: dict[tuple[str, int], str] = {}

    def make(self, stage: LoadStage, spot: ScheduleSlot, target: int) -> LoadRequest:
        """The request for ``spot`` of ``stage``, to the endpoint with the place ``target``."""
        if stage.way == "job":
            return self._job(spot.number, target)
        single = stage.way in ("chat", "completions")
        fields = self._fixed(target, self._answer(stage, spot), stream=single)
        size = 1 if single else self._config.list_size
        texts = [self._prompt(stage, spot, target, place) for place in range(size)]
        path = _PATHS[stage.way]
        if stage.way == "chat":
            return LoadRequest(path, body_of(fields, "messages", _chat(texts[0], spot.said)), True)
        if stage.way == "completions":
            text = "".join(f"{asked}{answer}\n" for asked, answer in spot.said) + texts[0]
            return LoadRequest(path, body_of(fields, "prompt", text), True)
        if stage.way == "list":
            return LoadRequest(path, body_of(fields, "prompt", texts), False, size)
        chats: list[Any] = [_chat(text) for text in texts]
        return LoadRequest(path, body_of(fields, "messages", chats), False, size)

    def asked(self, stage: LoadStage, spot: ScheduleSlot, target: int) -> str:
        """What ``spot`` adds to its conversation, before it is answered."""
        return self._prompt(stage, spot, target, 0)

    def _answer(self, stage: LoadStage, spot: ScheduleSlot) -> AnswerPlan:
        plan = self._config.answer
        if stage.speed is None:
            return plan
        tokens = max(1, self._config.trace[spot.number].output_tokens)
        return msgspec.structs.replace(plan, tokens=tokens)

    def _fixed(self, target: int, answer: AnswerPlan, *, stream: bool) -> dict[str, Json]:
        key = target, answer.tokens, stream
        found = self._fields.get(key)
        if found is None:
            one = self._config.targets[target]
            found = fixed_fields(one.model, answer, one.engine)
            if stream:
                found |= stream_fields(one.engine)
            self._fields[key] = found
        return found

    def _prompt(self, stage: LoadStage, spot: ScheduleSlot, target: int, place: int) -> str:
        model = self._config.targets[target].model or ""
        lengths = self._config.lengths.get(model) or Lengths(100)
        name = f"{stage.number}/{'w' if stage.warmup else ''}{spot.number}/{place}"
        if stage.speed is not None:
            return self._text.own(lengths.words(self._config.trace[spot.number].input_tokens), name)
        if spot.turn > 1:
            words = round(self._config.turn_tokens / lengths.per_word)
            return self._text.own(max(1, words), f"{name}/{spot.turn}")
        own, group = self._text.own(lengths.own, name), spot.group
        if group is None:
            return own
        # Every stage has prefixes of its own: else the second one would find them cached.
        key = (f"{stage.number}/group{group}", lengths.prefix)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = self._text.own(lengths.prefix, key[0])
        return f"{prefix} {own}"

    def _job(self, number: int, target: int) -> LoadRequest:
        one = self._config.job[number % len(self._config.job)]
        stream = stream_fields(self._config.targets[target].engine)
        end = encode_payload(stream)[1:]
        return LoadRequest(one.path, one.body[:-1].encode() + b"," + end, True)


def _chat(text: str, said: Sequence[tuple[str, str]] = ()) -> list[dict[str, str]]:
    before = [
        {"role": role, "content": words}
        for turn in said
        for role, words in zip(("user", "assistant"), turn, strict=True)
    ]
    return [*before, {"role": "user", "content": text}]


MOST_ROWS = 2000
"""Rows of a job that are read; a longer load sends them again."""


def prepare_job(
    job: Path, env: Mapping[str, str], cwd: Path, sets: Sequence[str] = ()
) -> RunContext:
    """The checked job; nothing is sent.

    Raises:
        UsageError: the job, its schema or its options are wrong.
    """
    return prepare(RunOptions(job, env=env, cwd=cwd, sets=tuple(sets)))


def job_bodies(prepared: RunContext, called: Sequence[HealthResult]) -> list[JobBody]:
    """The bodies of the job's first rows, for the endpoints that are ready.

    Raises:
        UsageError: no row can be sent, or the endpoints' models differ from the job's.
    """
    known: dict[str, Capabilities] = {
        one.endpoint.name: one.known for one in called if one.ready and one.known
    }
    own = prepared.own_bodies and prepared.job.model == "auto"
    model = None if own else resolve_model(prepared.job, known)
    servers = Servers([one.endpoint for one in called], "vllm")
    plan = make_plan(prepared, servers, model, known)
    source = open_input(prepared)
    try:
        rows = itertools.chain.from_iterable(source.batches())
        sampled = open_rows_as_requests(plan, itertools.islice(rows, MOST_ROWS))
    finally:
        source.close()
    native = prepared.job.output.enforce != "prompt"
    writer = BodyWriter(model or "", native_schema=native)
    found = []
    for one in sampled:
        request = one.request
        if request is not None:
            key = "prompt" if request.prompt is not None else None
            body = writer.body(request, key=key, stream=False)
            found.append(JobBody(request.path, body.decode()))
    if not found:
        words = sampled[0].error if sampled else "it has no rows"
        raise JobError(f"no row of the job can be sent: {words}")
    return found
