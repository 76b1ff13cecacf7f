from __future__ import annotations

import random
import statistics

import pytest

from bagent.sim import tokens
from bagent.sim.config import AnswerConfig
from bagent.sim.text import draw_length, free_text, seeded


@pytest.mark.parametrize(
    "text",
    [
        "", "a", "Hello, world", "naïve café — 数据 🙂", "<|im_start|>user\nhi<|im_end|>\n",
        "<|im_sta and <| half marks |>", "nul \0 inside\0\0", "  blanks  \n\t\r\n",
    ],
)  # fmt: skip
def test_detokenize_gives_back_the_text(text: str) -> None:
    packed = tokens.pack(text)
    assert tokens.text_of(packed) == text
    assert tokens.text_of(tokens.pack_ids(tokens.ids_of(packed))) == text
    assert b"".join(t.encode() for t in [text]) == tokens.bytes_of(packed)


def test_chat_template_is_chatml() -> None:
    parts = [{"type": "text", "text": "U1"}, {"type": "text", "text": "U2"}]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": parts}]
    assert tokens.render(messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1\nU2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokens.render(messages, add_generation_prompt=False).endswith("U2<|im_end|>\n")
    assert tokens.render(messages, continue_final_message=True).endswith("U2")


@pytest.mark.parametrize(
    "message", [{}, {"role": 1}, {"role": "user", "content": 5}, {"role": "user", "content": [5]}]
)
def test_broken_messages_are_refused(message: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        tokens.render([message])


GOLDEN_BITS = 3291700513
GOLDEN_TEXT = "Sample moves record number warm moves s."


def test_draws_are_the_same_in_every_process_and_release() -> None:
    assert seeded(b"prompt", 0, None, 1).getrandbits(32) == GOLDEN_BITS
    assert free_text(seeded(b"prompt", 0), 40, ended=True) == GOLDEN_TEXT


@pytest.mark.parametrize(
    ("spread", "deviation"), [("geometric", 100), ("normal", 25), ("fixed", 0)]
)
def test_lengths_spread_as_said(spread: str, deviation: float) -> None:
    rng = random.Random(1)
    config = AnswerConfig(output_tokens=100, output_spread=spread)
    lengths = [draw_length(rng, config) for _ in range(4000)]
    assert min(lengths) >= 1
    assert statistics.mean(lengths) == pytest.approx(100, rel=0.06)
    assert statistics.pstdev(lengths) == pytest.approx(deviation, rel=0.1)
