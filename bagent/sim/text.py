"""Seeded draws and free text: the simulated model's unconstrained answers."""

from __future__ import annotations

import functools
import math
import random
from hashlib import blake2b

from bagent.sim.config import AnswerConfig

_TEXT = """
the a this each every one other new small large early late open simple clear useful
common rare steady quiet bright warm cold deep high low long short first second last
main whole model answer question sample result value reason method field record table
figure source change effect signal pattern measure study group region system process
stage level rate number part point line form case state time day season river mountain
island city garden forest harbour bridge road letter story song colour light water stone
metal paper glass shows gives takes keeps holds finds makes moves turns starts ends
grows falls rises stays follows leads joins leaves meets names counts reads writes asks
tells seems needs allows explains supports suggests depends agrees differs varies
increases decreases improves and or but so while because when where before after under
over between with without from into near across about against during through toward
slowly quickly often seldom always never also only even still again together apart
mostly partly clearly perhaps indeed
"""
_WORDS = tuple(_TEXT.split())
_POOL = 2048
_POOL_SEED = 20_261_127


@functools.cache
def sentences() -> tuple[str, ...]:
    """Return the fixed pool of ASCII sentences that texts are made of."""
    rng = random.Random(_POOL_SEED)
    pool: list[str] = []
    for _ in range(_POOL):
        sentence = rng.choices(_WORDS, k=rng.randint(5, 14))
        pool.append(" ".join(sentence).capitalize() + ".")
    return tuple(pool)


def seeded(prompt: bytes, *parts: object) -> random.Random:
    """Return a random source that depends on its arguments alone, in every process."""
    digest = blake2b(prompt, digest_size=8, person=b"bagent-sim")
    digest.update(repr(parts).encode("utf-8", "backslashreplace"))
    return random.Random(int.from_bytes(digest.digest(), "little"))


def draw_length(rng: random.Random, config: AnswerConfig) -> int:
    """Return the length of one free answer in tokens, at least 1.

    ``geometric``: a chance of 1/mean at each token to end there. ``normal``: a deviation of a
    quarter of the mean. ``fixed``: the mean.
    """
    mean = config.output_tokens
    if config.output_spread == "fixed" or mean == 1:
        return mean
    if config.output_spread == "normal":
        return max(1, round(rng.gauss(mean, mean / 4)))
    return 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean))


def free_text(rng: random.Random, size: int, *, ended: bool) -> str:
    """Return ASCII sentences of ``size`` characters.

    An ``ended`` text closes with a full stop and may be one character shorter.
    """
    pool = sentences()
    parts: list[str] = []
    length = 0
    while length <= size:
        parts.append(pool[int(rng.random() * _POOL)])
        length += len(parts[-1]) + 1
    text = " ".join(parts)[:size]
    if ended and size > 1:
        text = text[: size - 1].rstrip() + "."
    return text


def random_words(rng: random.Random, number: int) -> str:
    """Return ``number`` words, separated by blanks."""
    return " ".join(rng.choices(_WORDS, k=number))


def unit_vector(rng: random.Random, size: int) -> list[float]:
    """Return a random direction: ``size`` numbers whose squares add up to 1."""
    values = [rng.gauss(0.0, 1.0) for _ in range(size)]
    norm = math.sqrt(sum(v * v for v in values))
    return [v / norm for v in values]
