import pytest

from bagent.answers.reasoning import split_reasoning


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ('<think effort="high">', "</think >"),
        ("<thinking>", "</thinking>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("<|channel|>analysis<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
    ],
)
def test_leading_thinking_is_parted_from_the_answer(opening, closing):
    split = split_reasoning(f"\n{opening}\nhm, {{\n{closing}\n\nParis.\n")
    assert split == ("hm, {", "Paris.", True)


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("<think>still at it", ("still at it", "", False)),
        ("<think>a</thinking> b", ("a</thinking> b", "", False)),  # another tag closes nothing
        # the template opened it
        ("first, then\n</think>\n\nParis", ("first, then", "Paris", True)),
        ("<think>a</think>x <think>b</think> y", ("a", "x <think>b</think> y", True)),
        ("<|channel|>final<|message|>It is yes.", (None, "It is yes.", True)),
    ],
)
def test_only_what_is_closed_before_the_answer_is_parted(text, split):
    assert split_reasoning(text) == split


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris.",
        "Models write <think>…</think> first.",
        "use text.split('</think>')[1]\nto cut it",
        "The <think> tag opens, and this closes it:\n</think>\n",
        "<answer>4</answer>",
    ],
)
def test_other_text_is_left_as_it_is(text):
    assert split_reasoning(text) == (None, text, True)


THOUGHT, ANSWER = "the user wants yes", "It is yes."


@pytest.mark.parametrize(
    "form",
    [
        "{0}[/THINK]{1}",
        "{0}\nso </think> is a word\n</think>\n{1}",
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
