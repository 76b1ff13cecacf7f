"""How many words make a prompt of N tokens: asked of the server, for each model of a fleet.

``/tokenize`` tells it exactly, chat template included; where there is none, the usage of two
small real requests gives tokens a word and what the template adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.transport import Transport
from bagent.bench.config import Target
from bagent.bench.prompts import AnswerPlan, Lengths, PromptText, body_of, fixed_fields
from bagent.bench.sender import count_tokens, prompt_tokens_by_usage
from bagent.bench.shots import Shot
from bagent.types import Failure

ROUNDS = 4
"""Corrections of the word count at most."""

_PROBE_WORDS = (64, 320)
_SECONDS = 60.0


class Wanted(msgspec.Struct, frozen=True):
    """Prompt sizes in tokens: ``prefix`` shared by a group, ``total`` with it; ``chat`` or text."""

    total: int
    prefix: int = 0
    chat: bool = True


async def calibrate(
    transport: Transport, targets: Sequence[Target], wanted: Wanted, salt: str
) -> dict[str, Lengths]:
    """Sizes in words for each model among ``targets``, measured on its first endpoint."""
    found: dict[str, Lengths] = {}
    for target in targets:
        model = target.model or ""
        if model in found and found[model].tokens is not None:
            continue
        found[model] = await _Scale(transport, target, wanted, salt).lengths()
    return found


class _Scale:
    """Weighs prompts of one endpoint."""

    def __init__(self, transport: Transport, target: Target, wanted: Wanted, salt: str) -> None:
        self._transport = transport
        self._target = target
        self._wanted = wanted
        self._text = PromptText(salt)
        self._weighed = 0
        self._way = "/tokenize"

    async def lengths(self) -> Lengths:
        """The sizes, exact to a token or two where the server counts quickly."""
        wanted = self._wanted
        small, large = [await self._weigh(words) for words in _PROBE_WORDS]
        if small is None or large is None:
            return self._lengths((1.0, 0.0), wanted.total, None)
        per_word = max(0.05, (large - small) / (_PROBE_WORDS[1] - _PROBE_WORDS[0]))
        extra = small - per_word * _PROBE_WORDS[0]
        words = max(1, round((wanted.total - extra) / per_word))
        tokens: int | None = round(extra + per_word * words)
        for _ in range(ROUNDS if self._way == "/tokenize" else 0):
            tokens = await self._weigh(words)
            if tokens is None or tokens == wanted.total:
                break
            step = round((wanted.total - tokens) / per_word)
            if step == 0 or words + step < 1:
                break
            words += step
        if tokens is not None and abs(words - _PROBE_WORDS[0]) >= _PROBE_WORDS[0]:
            per_word = max(0.05, (tokens - small) / (words - _PROBE_WORDS[0]))
            extra = small - per_word * _PROBE_WORDS[0]
        return self._lengths((per_word, extra), words, tokens)

    def _lengths(self, line: tuple[float, float], words: int, tokens: int | None) -> Lengths:
        prefix = min(words - 1, round(self._wanted.prefix / line[0])) if words > 1 else 0
        way = self._way if tokens is not None else "one word a token is guessed"
        return Lengths(words - prefix, prefix, tokens, way, *line)

    async def _weigh(self, words: int) -> int | None:
        """The tokens of a prompt with so many words; None where no way of asking works."""
        self._weighed += 1
        text = self._text.own(words, f"calibrate/{self._weighed}")
        target = self._target
        key: str = "messages" if self._wanted.chat else "prompt"
        value: Any = [{"role": "user", "content": text}] if self._wanted.chat else text
        if self._way == "/tokenize":
            body = {"model": target.model} if target.model else {}
            counted = await count_tokens(
                self._transport, target.endpoint, {**body, key: value}, _SECONDS
            )
            if counted is not None:
                return counted
            self._way = "usage of two requests"
        fields = fixed_fields(target.model, AnswerPlan(1), None)
        path = "/chat/completions" if self._wanted.chat else "/completions"
        shot = Shot(path, body_of(fields, key, value), False)
        told = await prompt_tokens_by_usage(
            self._transport, target.endpoint, shot, Timeouts(total=_SECONDS)
        )
        return None if isinstance(told, Failure) else told
