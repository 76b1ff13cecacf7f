"""From a place in the schedule to the request that is sent for it."""

from __future__ import annotations

from typing import Any

import msgspec

from bagent.backends.request import encode_payload
from bagent.bench.config import LoadConfig, Target
from bagent.bench.prompts import Lengths, PromptText, body_of, fixed_fields, stream_fields
from bagent.bench.shape import StageSpec
from bagent.types import Json

_PATHS = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "list": "/completions",
    "chat-batch": "/chat/completions/batch",
}


class Shot(msgspec.Struct, frozen=True):
    """One request, ready to go; ``size`` calls travel in it."""

    path: str
    body: bytes
    stream: bool
    size: int = 1


class ShotMaker:
    """Makes the requests of a load test; equal places give equal requests in every process."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._text = PromptText(config.salt)
        self._fields: dict[tuple[int, bool], dict[str, Json]] = {}
        self._prefixes: dict[tuple[str, int], str] = {}

    def make(self, stage: StageSpec, number: int, target: int, group: int | None) -> Shot:
        """Request ``number`` of ``stage``, for the endpoint with the place ``target``."""
        if stage.way == "job":
            return self._job(number, target)
        single = stage.way in ("chat", "completions")
        one = self._config.targets[target]
        fields = self._fixed(target, one, stream=single)
        size = 1 if single else self._config.list_size
        name = f"{stage.number}/{'w' if stage.warmup else ''}{number}"
        texts = [self._prompt(stage, one, f"{name}/{place}", group) for place in range(size)]
        path = _PATHS[stage.way]
        if stage.way == "chat":
            return Shot(path, body_of(fields, "messages", _chat(texts[0])), True)
        if stage.way == "completions":
            return Shot(path, body_of(fields, "prompt", texts[0]), True)
        if stage.way == "list":
            return Shot(path, body_of(fields, "prompt", texts), False, size)
        chats: list[Any] = [_chat(text) for text in texts]
        return Shot(path, body_of(fields, "messages", chats), False, size)

    def _fixed(self, target: int, one: Target, *, stream: bool) -> dict[str, Json]:
        found = self._fields.get((target, stream))
        if found is None:
            found = fixed_fields(one.model, self._config.answer, one.engine)
            if stream:
                found |= stream_fields(one.engine)
            self._fields[target, stream] = found
        return found

    def _prompt(self, stage: StageSpec, target: Target, name: str, group: int | None) -> str:
        lengths = self._config.lengths.get(target.model or "") or Lengths(100)
        own = self._text.own(lengths.own, name)
        if group is None:
            return own
        # Every stage has prefixes of its own: else the second one would find them cached.
        key = (f"{stage.number}/group{group}", lengths.prefix)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = self._text.own(lengths.prefix, key[0])
        return f"{prefix} {own}"

    def _job(self, number: int, target: int) -> Shot:
        one = self._config.job[number % len(self._config.job)]
        stream = stream_fields(self._config.targets[target].engine)
        end = encode_payload(stream)[1:]
        return Shot(one.path, one.body[:-1].encode() + b"," + end, True)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
