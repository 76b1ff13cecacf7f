"""Cutting a template into what is fixed and what differs by row."""

from __future__ import annotations

import pytest

from bagent.check.prompt_reorder import TemplateSplit, split_template


def differs(piece: str) -> bool:
    """Fields differ by row, unless they are called ``same``."""
    return "same" not in piece and not piece.startswith("{#")


def parts(template: str) -> TemplateSplit:
    found = split_template(template, differs)
    assert found is not None
    return found


BLOCK = "{% if a %}A {{ a }}.\n\nMore text.{% else %}None.{% endif %}"
LINES = "Title: {{ title }}\nFrom a journal.\nAbstract: {{ abstract }}"
RATE = "Rate it for:\n1. novelty\n2. rigour"
RULES = "<rules>\nbe fair\n\nbe short\n</rules>"


@pytest.mark.parametrize(
    ("template", "front", "moved", "rest"),
    [
        (f"A: {{{{ a }}}}\n{{{{ b }}}}\n\n{RATE}\n", [], [RATE], ["A: {{ a }}\n{{ b }}"]),
        (
            "You are an expert. Classify this text: {{ text }}. Answer A or B.",
            ["You are an expert."],
            ["Answer A or B."],
            ["Classify this text: {{ text }}."],
        ),
        ("One.\n\nA: {{ a }}\n\nRate it.\n", ["One."], ["Rate it."], ["A: {{ a }}"]),
        ("One.\n\nTwo.", ["One.", "Two."], [], []),
        (f"{{{{ text }}}}\n\n{RULES}", [], [RULES], ["{{ text }}"]),
        (
            "Q: {{ q }}\n\nUse one word.\n\nAnswer:",
            [],
            ["Use one word."],
            ["Q: {{ q }}", "Answer:"],
        ),
        (f"{BLOCK}\n\nFixed tail.", [], ["Fixed tail."], [BLOCK]),
        ("{{ a }}\n\nFollow {{ same }} now.", [], ["Follow {{ same }} now."], ["{{ a }}"]),
        (LINES, [], [], [LINES]),
        ("Review {{ symbol }}: {{ text }}", [], [], ["Review {{ symbol }}: {{ text }}"]),
        ("{{ gene }} is an oncogene, is it not?", [], [], None),
        ("See {{ text }}, e.g. the start of it", [], [], None),
        ("Read {{ name }} in 3. Then stop", [], [], None),
    ],
)
def test_fixed_text_behind_a_field_moves_and_sentences_stay_whole(template, front, moved, rest):
    found = parts(template)
    assert (found.front, found.moved) == (tuple(front), tuple(moved))
    assert found.varying == (tuple(rest) if rest is not None else (template,))
    assert found.fixed == "\n\n".join([*front, *moved])


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
    assert "\n\n".join(found.varying) == held
    assert found.moved == ("Answer yes or no.",)


@pytest.mark.parametrize("heading", ["## Abstract", "Abstract:", "**Abstract**", "[ABSTRACT]"])
def test_a_heading_stays_with_its_field(heading: str) -> None:
    found = parts(f"{heading}\n\n{{{{ text }}}}\n\n## Task\n\nRate it.\n")
    assert found.varying == (heading, "{{ text }}")
    assert found.moved == ("## Task", "Rate it.")


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
    assert split_template(template, differs) is None


def test_a_word_that_points_back_is_told() -> None:
    assert parts("{{ text }}\n\nJudge the text above.").points_back == "above"
    assert parts("{{ text }}\n\nJudge the text.").points_back is None
