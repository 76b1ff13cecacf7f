from __future__ import annotations

import pytest

from bagent.sim import tokens


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


@pytest.mark.parametrize("ids", [[-1], [2**32], ["x"], [1.5]])
def test_ids_out_of_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        tokens.pack_ids(ids)


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
