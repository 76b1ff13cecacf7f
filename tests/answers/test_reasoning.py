import pytest

from bagent.answers.reasoning import split_reasoning


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
    split = split_reasoning(f"\n{opening}\nhm, {{\n{closing}\n\nParis.\n")
    assert split == ("hm, {", "Paris.", True)


@pytest.mark.parametrize("opening", ["<think>", "<reasoning>", "[THINK]", "◁think▷"])
def test_unclosed_thinking_leaves_no_answer(opening):
    assert split_reasoning(f"{opening}still at it") == ("still at it", "", False)


def test_another_tag_does_not_close():
    assert split_reasoning("<think>a</thinking> b").closed is False


def test_closing_mark_without_opening_ends_thinking_that_the_template_opened():
    assert split_reasoning("first, then\n</think>\n\nParis") == ("first, then", "Paris", True)
    assert split_reasoning("first, then</think>") == ("first, then", "", True)


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
    assert split_reasoning(text) == (None, text, True)


def test_only_the_leading_block_is_parted():
    split = split_reasoning("<think>a</think>x <think>b</think> y")
    assert split == ("a", "x <think>b</think> y", True)


def test_harmony_end_token_is_no_part_of_the_answer():
    thinking = "<|channel|>analysis<|message|>hm<|end|>"
    answer = "<|start|>assistant<|channel|>final<|message|>5<|return|>"
    assert split_reasoning(thinking + answer) == ("hm", "5", True)


THOUGHT, ANSWER = "the user wants yes", "It is yes."


@pytest.mark.parametrize(
    "form",
    [
        "{0}</think>{1}",
        "{0}[/THINK]{1}",
        "{0}\nso </think> is a word\n</think>\n{1}",
        "<think>\n{0}\n</think>\n<answer>\n{1}\n</answer>",
        "{0}\n</think>\n\n<response>\n{1}\n</response>\n",
        "Here is my thought process: {0} Here is my response: {1}",
        "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "more<|end|><|start|>assistant<|channel|>final<|message|>{1}<|return|>",
        "analysis{0}assistantfinal{1}",
        "<|channel>thought\n{0}<channel|>{1}",
        "<|START_THINKING|>{0}<|END_THINKING|><|START_RESPONSE|>{1}<|END_RESPONSE|>",
        "<|inner_prefix|>{0}<|inner_suffix|>{1}",
        "[unused16]{0}[unused17]{1}",
        "<|open|>think<|sep|>{0}<|close|>think<|sep|><|open|>response<|sep|>{1}",
        "<think>{0}</think>\n<think>more</think>\n{1}",
        "{1}\n<think>{0}</think>",
    ],
)
def test_reasoning_of_every_family_is_divided_from_the_answer(form):
    split = split_reasoning(form.format(THOUGHT, ANSWER))
    assert split.text == ANSWER
    assert THOUGHT in (split.reasoning or "")
    assert split.closed


def test_a_final_message_alone_has_no_reasoning():
    assert split_reasoning("<|channel|>final<|message|>It is yes.") == (None, "It is yes.", True)


@pytest.mark.parametrize("text", ["<answer>4</answer>", "the </think> mark", "say `</think>` now"])
def test_words_in_tags_that_nothing_precedes_are_part_of_the_answer(text):
    assert split_reasoning(text) == (None, text, True)
