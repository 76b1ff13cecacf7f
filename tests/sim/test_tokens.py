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


def test_english_has_four_characters_a_token() -> None:
    assert tokens.count(tokens.pack("word" * 100)) == 100
    assert tokens.count(tokens.pack("words")) == 2


def test_special_marks_are_one_token_each() -> None:
    assert tokens.count(tokens.pack("<|im_start|><|im_end|>")) == 2
    ids = tokens.ids_of(tokens.pack("<|im_start|>user\nhi"))
    assert ids[0] == 0xFF000001
    assert tokens.token_texts(tokens.pack("<|im_start|>user\n")) == ["<|im_start|>", "user", "\n"]


def test_blocks_are_named_by_everything_before_their_end() -> None:
    one = tokens.block_hashes(tokens.pack("a" * 256 + "b" * 64), 16, None)
    two = tokens.block_hashes(tokens.pack("a" * 256 + "c" * 70), 16, None)
    assert len(one) == len(two) == 5
    assert one[:4] == two[:4]
    assert one[4] != two[4]
    assert tokens.block_hashes(tokens.pack("a" * 256), 16, "salt") != one[:4]


def test_chat_template_is_chatml() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "U1"}, {"type": "text", "text": "U2"}],
        },
    ]
    assert tokens.render(messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1\nU2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokens.render(messages, add_generation_prompt=False).endswith("U2<|im_end|>\n")
    assert tokens.render(messages, continue_final_message=True).endswith("U2")


def test_tools_calls_and_images_change_the_prompt() -> None:
    user = [{"role": "user", "content": "x"}]
    tool = {"type": "function", "function": {"name": "look"}}
    call = {"function": {"name": "look", "arguments": "{}"}}
    called = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    other = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}}]
    texts = {
        tokens.render(user),
        tokens.render(user, [tool]),
        tokens.render(called),
        tokens.render([{"role": "user", "content": image}]),
        tokens.render([{"role": "user", "content": other}]),
    }
    assert len(texts) == 5


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
    lengths = [draw_length(rng, config) for _ in range(4000)]
    assert min(lengths) >= 1
    assert statistics.mean(lengths) == pytest.approx(100, rel=0.06)
    assert statistics.pstdev(lengths) == pytest.approx(deviation, rel=0.1)
