"""Cutting a template into what is fixed and what differs by row."""

from __future__ import annotations

import pytest

from bagent.checks.pieces import Cut, cut


def differs(piece: str) -> bool:
    """Fields differ by row, unless they are called ``same``."""
    return "same" not in piece and not piece.startswith("{#")


def parts(template: str) -> Cut:
    found = cut(template, differs)
    assert found is not None
    return found


def test_fixed_paragraphs_behind_a_field_are_moved() -> None:
    found = parts("Title: {{ title }}\n{{ text }}\n\nRate it for:\n1. novelty\n2. rigour\n")

    assert found.moved == ("Rate it for:\n1. novelty\n2. rigour",)
    assert found.rest == ("Title: {{ title }}\n{{ text }}",)


def test_sentences_behind_the_last_field_of_a_line_are_moved() -> None:
    found = parts("You are an expert. Classify this text: {{ text }}. Answer A or B.")

    assert found.front == ("You are an expert.",)
    assert found.moved == ("Answer A or B.",)
    assert found.rest == ("Classify this text: {{ text }}.",)


@pytest.mark.parametrize(
    "template",
    [
        "Review {{ symbol }}: {{ description }}",
        "{{ gene }} is an oncogene, is it not?",
        "See {{ text }}, e.g. the start of it",
        "Read {{ name }} in 3. Then stop",
    ],
)
def test_a_sentence_is_never_torn(template: str) -> None:
    found = parts(template)

    assert found.moved == ()
    assert found.rest == (template,)


@pytest.mark.parametrize(
    "held",
    [
        "<doc>\n{{ text }}\n</doc>",
        "<doc>\n\nAs it was printed.\n\n{{ text }}\n\nThe end of it.\n</doc>",
        "```\n{{ code }}\n\nreturn 1\n```",
        '"""\n{{ text }}\n"""',
        "Gene: {{ gene }}\n---",
    ],
)
def test_what_encloses_a_field_stays_with_it(held: str) -> None:
    found = parts(f"{held}\n\nAnswer yes or no.\n")

    assert "\n\n".join(found.rest) == held
    assert found.moved == ("Answer yes or no.",)


@pytest.mark.parametrize("heading", ["## Abstract", "Abstract:", "**Abstract**", "[ABSTRACT]"])
def test_a_heading_stays_with_its_field(heading: str) -> None:
    found = parts(f"{heading}\n\n{{{{ text }}}}\n\n## Task\n\nRate it.\n")

    assert found.rest == (heading, "{{ text }}")
    assert found.moved == ("## Task", "Rate it.")


def test_a_tag_pair_with_fixed_text_moves_as_a_whole() -> None:
    found = parts("{{ text }}\n\n<rules>\nbe fair\n\nbe short\n</rules>")

    assert found.moved == ("<rules>\nbe fair\n\nbe short\n</rules>",)


def test_a_last_line_that_asks_to_go_on_stays_last() -> None:
    found = parts("Question: {{ q }}\n\nUse one word.\n\nAnswer:")

    assert found.moved == ("Use one word.",)
    assert found.rest == ("Question: {{ q }}", "Answer:")


def test_lines_between_two_fields_of_a_paragraph_stay() -> None:
    template = "Title: {{ title }}\nFrom a journal.\nAbstract: {{ abstract }}"

    assert parts(template).rest == (template,)


def test_a_block_tag_is_kept_whole() -> None:
    block = "{% if a %}A {{ a }}.\n\nMore text.{% else %}None.{% endif %}"
    found = parts(f"{block}\n\nFixed tail.")

    assert found.rest == (block,)
    assert found.moved == ("Fixed tail.",)


def test_a_field_that_is_the_same_for_all_rows_counts_as_fixed() -> None:
    found = parts("Text: {{ text }}\n\nFollow {{ same }} closely.")

    assert found.moved == ("Follow {{ same }} closely.",)


def test_fixed_text_before_the_first_field_stays_first() -> None:
    found = parts("First words.\n\nGene: {{ gene }}\n\nRate it.\n")

    assert found.front == ("First words.",)
    assert found.fixed == "First words.\n\nRate it."


@pytest.mark.parametrize(
    "template",
    [
        "{% set x = 1 %}{{ a }}\n\nTail.",
        "{{- a }}\n\nTail.",
        "{% macro m() %}x{% endmacro %}{{ a }}{{ m() }}",
        "{{ a",
    ],
)
def test_templates_whose_tags_act_on_their_neighbours_are_left_alone(template: str) -> None:
    assert cut(template, differs) is None


def test_a_word_that_points_back_is_told() -> None:
    assert parts("{{ text }}\n\nJudge the text above.").points_back == "above"
    assert parts("{{ text }}\n\nJudge the text.").points_back is None


def test_a_template_without_fields_is_all_front() -> None:
    found = parts("One.\n\nTwo.")

    assert found == Cut(("One.", "Two."), (), ())
