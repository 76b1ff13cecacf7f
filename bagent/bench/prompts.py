"""Prompts of a wanted length, without a tokenizer of our own.

A prompt is plain English words. Its first words are made from its number and the run's salt, so
that no two prompts begin alike and no prefix cache helps unless groups of shared prefixes are
asked for; the rest is a slice of one long text. How many words make N tokens is measured on the
server (see :mod:`bagent.bench.client`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import msgspec

from bagent.backends.request import encode_payload
from bagent.types import Json

_VOCABULARY = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work night point home
water room mother area money story fact month lot right study book eye job word issue side kind
head house service friend father power hour game line end member law car city name
"""
WORDS = tuple(_VOCABULARY.split())
"""Sixty-four common words, mostly one token each in any vocabulary."""

NONCE = 10
"""Words of a prompt that are its own: 60 bits."""

_POOL = 4096


class Lengths(msgspec.Struct, frozen=True):
    """Sizes of prompts in words, as calibration found them, for one model.

    ``prefix`` words are shared by a group, ``own`` follow. ``tokens`` is what a prompt was
    measured to have, chat template included; None where nothing could be measured. A word makes
    ``per_word`` tokens, and what is put around a prompt ``extra``.
    """

    own: int
    prefix: int = 0
    tokens: int | None = None
    measured: str = "not measured"
    per_word: float = 1.0
    extra: float = 0.0

    def words(self, tokens: int) -> int:
        """How many words make a prompt of ``tokens``, at least one."""
        return max(1, round((tokens - self.extra) / self.per_word))


class PromptMaker:
    """Makes the texts of prompts.

    Args:
        salt: differs from run to run, so that the caches of servers hold nothing of it yet.
    """

    def __init__(self, salt: str) -> None:
        self._salt = salt
        rng = random.Random(f"{salt}/pool")
        self._pool = rng.choices(WORDS, k=_POOL)

    def own(self, words: int, name: str) -> str:
        """A text of ``words`` words that begins like no other: ``name`` is the prompt's."""
        digest = hashlib.blake2b(f"{self._salt}/{name}".encode(), digest_size=16).digest()
        bits = int.from_bytes(digest[:8], "little")
        nonce = [WORDS[bits >> 6 * place & 63] for place in range(min(NONCE, words))]
        return " ".join([*nonce, *self._slice(words - len(nonce), digest[8:])])

    def _slice(self, words: int, digest: bytes) -> Sequence[str]:
        start = int.from_bytes(digest, "little") % _POOL
        found = self._pool[start : start + words]
        while len(found) < words:
            found += self._pool[: words - len(found)]
        return found


class PromptGroups:
    """Which group of a shared prefix each request belongs to.

    Args:
        count: number of groups.
        skew: 0 makes all as frequent; above it group k comes with frequency 1/(k+1)**skew (Zipf).
    """

    def __init__(self, count: int, skew: float, seed: str) -> None:
        self.count = count
        self._weights = [1 / (number + 1) ** skew for number in range(count)]
        self._rng = random.Random(seed)

    def next(self, among: Sequence[int] | None = None) -> int:
        """The group of the next request; ``among`` leaves a choice of some."""
        if among is None:
            return self._rng.choices(range(self.count), self._weights)[0]
        return self._rng.choices(among, [self._weights[one] for one in among])[0]


def json_schema(tokens: int) -> Json:
    """A schema whose answers have about ``tokens`` tokens (10 for each finding)."""
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


class AnswerPlan(msgspec.Struct, frozen=True):
    """What answers are asked for: ``tokens`` long, as JSON by a schema or free."""

    tokens: int
    as_json: bool = False

    @property
    def most(self) -> int:
        """The limit that is sent: JSON gets room to end."""
        return self.tokens + _JSON_ROOM * self.as_json


_JSON_ROOM = 32


EXACT = frozenset({"vllm", "sglang", "dynamo"})
"""Engines that know ``ignore_eos`` and ``min_tokens``."""


def fixed_fields(model: str | None, answer: AnswerPlan, engine: str | None) -> dict[str, Json]:
    """The members of a body that all requests of one endpoint share.

    Engines that know ``ignore_eos`` are made to give free answers of exactly the length; JSON
    ends where it ends.
    """
    fields: dict[str, Json] = {"model": model} if model else {}
    fields |= {"max_tokens": answer.most, "temperature": 0}
    if answer.as_json:
        form = {"name": "findings", "schema": json_schema(answer.tokens)}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    elif engine in EXACT:
        fields |= {"ignore_eos": True, "min_tokens": answer.tokens}
    return fields


def stream_fields(engine: str | None) -> dict[str, Json]:
    """The members that make a server stream, and count tokens chunk by chunk where it can."""
    options: dict[str, Json] = {"include_usage": True}
    if engine == "vllm":
        options["continuous_usage_stats"] = True
    return {"stream": True, "stream_options": options}


def body_of(fields: dict[str, Json], key: str, value: Json) -> bytes:
    """A request body: the fixed members and the prompt under its ``key``."""
    return encode_payload({**fields, key: value})
