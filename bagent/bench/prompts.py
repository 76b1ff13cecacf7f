"""Prompts of a given length, without a tokenizer.

A prompt is plain English. Its first words come from its number and the run's salt, so that no two
prompts share a prefix unless groups of shared prefixes are requested; the other words are a slice
of one long text. How many words make N tokens is measured on the server
(:func:`bagent.bench.client.calibrate`).
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
"""Words at the start of a prompt that make it unique: 60 bits."""

_POOL = 4096


class Lengths(msgspec.Struct, frozen=True):
    """Calibrated sizes of one model's prompts, in words."""

    own: int
    """Words of a prompt after its shared prefix."""
    prefix: int = 0
    """Words that a group shares."""
    tokens: int | None = None
    """Measured tokens of a prompt with its chat template; None where nothing was measured."""
    measured: str = "not measured"
    per_word: float = 1.0
    extra: float = 0.0
    """``per_word``, ``extra``: tokens of a word, and tokens added around a prompt."""

    def word_count(self, tokens: int) -> int:
        """Return how many words make a prompt of ``tokens``, at least one."""
        return max(1, round((tokens - self.extra) / self.per_word))


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


class AnswerPlan(msgspec.Struct, frozen=True):
    """Length and form of the requested answers."""

    tokens: int
    as_json: bool = False

    @property
    def max_tokens(self) -> int:
        """Return the limit to send, with room for JSON to end."""
        return self.tokens + _JSON_ROOM * self.as_json


_JSON_ROOM = 32


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
