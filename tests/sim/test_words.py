from __future__ import annotations

import random
import statistics

import pytest

from bagent.sim.config import AnswerConfig
from bagent.sim.words import drawn_length, free_text, seeded

GOLDEN_BITS = 3291700513
GOLDEN_TEXT = "Sample moves record number warm moves s."


def test_draws_are_the_same_in_every_process_and_release() -> None:
    assert seeded(b"prompt", 0, None, 1).getrandbits(32) == GOLDEN_BITS
    assert free_text(seeded(b"prompt", 0), 40, ended=True) == GOLDEN_TEXT


@pytest.mark.parametrize("size", [1, 4, 8, 63, 64, 500])
def test_texts_have_the_size_asked(size: int) -> None:
    for seed in range(50):
        cut = free_text(random.Random(seed), size, ended=False)
        assert len(cut) == size
        assert cut.isascii()
        ended = free_text(random.Random(seed), size, ended=True)
        assert -(-len(ended) // 4) == -(-size // 4)
        assert ended.endswith(".") or size == 1


@pytest.mark.parametrize(
    ("spread", "deviation"), [("geometric", 100), ("normal", 25), ("fixed", 0)]
)
def test_lengths_spread_as_said(spread: str, deviation: float) -> None:
    rng = random.Random(1)
    config = AnswerConfig(output_tokens=100, output_spread=spread)
    lengths = [drawn_length(rng, config) for _ in range(4000)]
    assert min(lengths) >= 1
    assert statistics.mean(lengths) == pytest.approx(100, rel=0.06)
    assert statistics.pstdev(lengths) == pytest.approx(deviation, rel=0.1)
