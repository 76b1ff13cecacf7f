import pytest

from bagent.answers.thinking import split_thinking


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("<THINK>", "</think>"),
        ('<think effort="high">', "</think >"),
        ("<thinking>", "</thinking>"),
        ("<thought>", "</thought>"),
        ("<reasoning>", "</reasoning>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("◁think▷", "◁/think▷"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
        (
            "<|start|>assistant<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
        ("<|channel|>analysis<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
    ],
)
def test_leading_thinking_is_parted_from_the_answer(opening, closing):
    split = split_thinking(f"\n{opening}\nhm, {{\n{closing}\n\nParis.\n")
    assert split == ("hm, {", "Paris.", True)


@pytest.mark.parametrize("opening", ["<think>", "<reasoning>", "[THINK]", "◁think▷"])
def test_unclosed_thinking_leaves_no_answer(opening):
    assert split_thinking(f"{opening}still at it") == ("still at it", "", False)


def test_another_tag_does_not_close():
    assert split_thinking("<think>a</thinking> b").closed is False


def test_closing_mark_without_opening_ends_thinking_that_the_template_opened():
    assert split_thinking("first, then\n</think>\n\nParis") == ("first, then", "Paris", True)
    assert split_thinking("first, then</think>") == ("first, then", "", True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris.",
        "Models write <think>…</think> first.",
        "use text.split('</think>')[1]\nto cut it",
        "The <think> tag opens, and this closes it:\n</think>\n",
        "a < b </b>\n",
    ],
)
def test_other_text_is_left_as_it_is(text):
    assert split_thinking(text) == (None, text, True)


def test_only_the_leading_block_is_parted():
    split = split_thinking("<think>a</think>x <think>b</think> y")
    assert split == ("a", "x <think>b</think> y", True)


def test_harmony_end_token_is_no_part_of_the_answer():
    thinking = "<|channel|>analysis<|message|>hm<|end|>"
    answer = "<|start|>assistant<|channel|>final<|message|>5<|return|>"
    assert split_thinking(thinking + answer) == ("hm", "5", True)
