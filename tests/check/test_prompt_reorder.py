"""The suggested order of a prompt, on whole jobs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bagent.check.prompt_reorder import Suggestion, TemplateSplit, split_template, suggest, yaml_of
from bagent.job.load import JobRequest, load_job
from bagent.job.spec.job import Job
from bagent.job.templates.prompt import Prompt

ROWS = [{"id": n, "text": f"row {n} says this", "task": "Judge it."} for n in range(6)]


def job_of(tmp_path: Path, prompt: str) -> Job:
    text = f"backend: sim\ninput: rows.jsonl\n{prompt}"
    return load_job(JobRequest(path=tmp_path / "job.yaml", text=text, cwd=tmp_path))


def shared_letters(prompt: Prompt) -> float:
    """Characters that all rows begin with."""
    texts = ["\n".join(str(m["content"]) for m in prompt.render(row)) for row in ROWS]
    same = 0
    for letters in zip(*texts, strict=False):
        if len(set(letters)) > 1:
            break
        same += 1
    return float(same)


def suggested(job: Job, least: float = 16.0) -> Suggestion | None:
    return suggest(job, ROWS, shared_letters, least)


def words(prompt: Prompt) -> list[Counter[str]]:
    return [
        Counter(" ".join(str(m["content"]) for m in prompt.render(row)).split()) for row in ROWS
    ]


def test_fields_move_behind_the_text_that_all_rows_share(tmp_path: Path) -> None:
    job = job_of(
        tmp_path,
        "prompt:\n  system: 'You judge row {{ id }}. Be exact and fair in all that you say.'\n"
        "  user: |\n    {{ text }}\n\n    Do what follows. {{ task }} Say why.\n",
    )
    found = suggested(job)
    assert found is not None
    assert found.changed == ("system", "user")
    assert found.texts["system"] == "Be exact and fair in all that you say."
    assert found.texts["user"] == (
        "Do what follows. {{ task }} Say why.\n\nYou judge row {{ id }}.\n\n{{ text }}\n"
    )


@pytest.mark.parametrize(
    "prompt",
    [
        'prompt: "Answer good or bad and nothing else.\\n\\nText: {{ text }}"\n',
        'prompt: "{{ text }}"\n',
        'prompt: "{{ text }}\\n\\nShort."\n',
        'prompt: {raw: "{{ text }}\\n\\nAnswer good or bad and nothing else."}\n',
        'prompt: {messages: [{role: user, content: "{{ text }}\\n\\nAnswer good or bad now."}]}\n',
    ],
)
def test_nothing_is_suggested_where_nothing_gains_or_order_may_matter(
    tmp_path: Path, prompt: str
) -> None:
    assert suggested(job_of(tmp_path, prompt)) is None


@pytest.mark.parametrize(
    "user",
    [
        "{{ text }}\n\nAnswer good or bad and nothing else.",
        "{{ text }}\n\nAnswer good or bad and nothing else.\n",
        "{{ text }}\n\n  indented, with 'quotes' \"both\": and # marks\n\n\ttab\n",
        "{{ text }}\n\nÜmlauts – and – 日本語 that all rows share.\n\n\n",
        "{{ text }}\n\nA path C:\\new and a \u2028 separator stay as they are.\n",
    ],
)
def test_the_yaml_is_ready_to_paste(tmp_path: Path, user: str) -> None:
    (tmp_path / "user.md").write_text(user, encoding="utf-8")
    job = job_of(tmp_path, "prompt: {user: {file: user.md}}\n")
    found = suggested(job)
    assert found is not None and job.prompt is not None

    again = job_of(tmp_path, yaml_of(found, job.prompt))
    assert again.prompt is not None and again.prompt.user is not None
    assert again.prompt.user.text == found.texts["user"]
    assert words(Prompt.from_job(again)) == words(Prompt.from_job(job))
    assert shared_letters(Prompt.from_job(again)) == shared_letters(Prompt.from_job(job)) + (
        found.gain
    )


def test_a_file_whose_text_stays_is_still_named(tmp_path: Path) -> None:
    (tmp_path / "system.md").write_text("You are exact.\n")
    user = "{{ text }}\\n\\nAnswer good or bad, so."
    job = job_of(tmp_path, f'prompt: {{system: {{file: system.md}}, user: "{user}"}}\n')
    found = suggested(job)
    assert found is not None and job.prompt is not None
    assert '  system: {file: "system.md"}\n' in yaml_of(found, job.prompt)


def test_a_field_that_some_rows_lack_differs_by_row(tmp_path: Path) -> None:
    job = job_of(tmp_path, 'prompt: "{{ text }}\\n\\nSee {{ rare }} and answer good or bad."\n')
    rows = [{**row, "rare": "the page"} for row in ROWS[:3]] + ROWS[3:]

    def only_new_orders(prompt: Prompt) -> float:
        return 100.0 if prompt.render(rows[0]) != Prompt.from_job(job).render(rows[0]) else 0.0

    assert suggest(job, rows, only_new_orders, 16.0) is None
    every = [{**row, "rare": "the page"} for row in rows]
    assert suggest(job, every, only_new_orders, 16.0) is not None


def differs(piece: str) -> bool:
    """Fields differ by row, unless they are called ``same``."""
    return "same" not in piece and not piece.startswith("{#")


def parts(template: str) -> TemplateSplit:
    found = split_template(template, differs)
    assert found is not None
    return found


BLOCK = "{% if a %}A {{ a }}.\n\nMore text.{% else %}None.{% endif %}"
RATE = "Rate it for:\n1. novelty\n2. rigour"
RULES = "<rules>\nbe fair\n\nbe short\n</rules>"


@pytest.mark.parametrize(
    ("template", "front", "moved", "rest"),
    [
        (f"A: {{{{ a }}}}\n{{{{ b }}}}\n\n{RATE}\n", [], [RATE], ["A: {{ a }}\n{{ b }}"]),
        ("Be brief. Judge {{ text }}. Say A.", ["Be brief."], ["Say A."], ["Judge {{ text }}."]),
        ("One.\n\nA: {{ a }}\n\nRate it.\n", ["One."], ["Rate it."], ["A: {{ a }}"]),
        (f"{{{{ text }}}}\n\n{RULES}", [], [RULES], ["{{ text }}"]),
        ("Q: {{ q }}\n\nOne word.\n\nA:", [], ["One word."], ["Q: {{ q }}", "A:"]),
        (f"{BLOCK}\n\nFixed tail.", [], ["Fixed tail."], [BLOCK]),
        ("Review {{ symbol }}: {{ text }}", [], [], ["Review {{ symbol }}: {{ text }}"]),
        ("{{ gene }} is an oncogene, is it not?", [], [], None),
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
    assert found.points_back is None
    assert found.moved == ("Answer yes or no.",)


@pytest.mark.parametrize("heading", ["## Abstract", "Abstract:", "**Abstract**", "[ABSTRACT]"])
def test_a_heading_stays_with_its_field(heading: str) -> None:
    found = parts(f"{heading}\n\n{{{{ text }}}}\n\n## Task\n\nRate it.\n")
    assert found.varying == (heading, "{{ text }}")
    assert found.moved == ("## Task", "Rate it.")


@pytest.mark.parametrize(
    "template", ["{% set x = 1 %}{{ a }}\n\nTail.", "{{- a }}\n\nTail.", "{{ a"]
)
def test_templates_whose_tags_act_on_their_neighbours_are_left_alone(template: str) -> None:
    assert split_template(template, differs) is None


def test_a_word_that_points_back_is_told() -> None:
    assert parts("{{ text }}\n\nJudge the text above.").points_back == "above"
