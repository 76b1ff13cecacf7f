"""The README and the guides: what they show of commands is what the commands print."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from itertools import takewhile
from pathlib import Path

import pytest

from bagent.cli.app import COMMANDS, load_command
from support.pages import FENCE, GUIDES, PAGES, ROOT, Shell, agrees, check_page, steps

pytestmark = pytest.mark.database

SHELL = {"|", "<", ">", "&&"}
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_commands_print_what_a_page_shows(page: Path, tmp_path: Path) -> None:
    """UPDATE_GOLDEN=1 writes the outputs into the pages."""
    update = os.environ.get("UPDATE_GOLDEN") == "1"
    differences = check_page(page, tmp_path, update=update)
    assert update or not differences, "\n\n".join(differences)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_make_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    for folder in ("jobs/sentiment", "schemas"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    recipe = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    commands = re.findall(r"\(BIN\)/(bagent .*)", recipe)
    output = "".join(map(Shell(tmp_path, timeout=240).run, commands))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = (
        step.output
        for language, _, body in FENCE.findall(readme)
        if language == "console"
        for step in steps(body)
        if step.command == "make demo"
    )
    assert agrees(shown, output), output


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_commands_of_a_page_that_are_not_run_can_be_parsed(page: Path) -> None:
    wrong = []
    for language, _, body in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in body.splitlines() if language == "sh" else []:
            words = list(
                takewhile(lambda word: word not in SHELL, shlex.split(line, comments=True))
            )
            if words[:1] == ["bagent"] and words[1] in COMMANDS:
                try:
                    load_command(words[1]).make_context(words[1], words[2:])
                except Exception as error:  # click's own errors have no public base
                    wrong.append(f"{line}: {error!r}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_guide_begins_with_an_example_and_its_output() -> None:
    for page in sorted(GUIDES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        before = text.split("\n## ")[0]
        assert text.startswith("# "), page
        if page.stem not in ("glossary", "inside"):
            (first,) = re.findall(r"```console\n(.*?)```", before, re.DOTALL)[:1] or [""]
            assert any(step.output for step in steps(first)), page


def test_the_readme_is_short_and_links_every_guide() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 9_000
    assert [page.name for page in GUIDES.glob("*.md") if f"guides/{page.name})" not in text] == []


def test_outputs_agree_but_for_numbers_times_and_lines_left_out() -> None:
    assert agrees("rows 8 ok in 3.2s\n", "rows   1,234 ok in 1m03s\n")
    assert agrees("a\n...\nd\n", "a\nb\nc\nd\n")
    assert agrees("...\nd\n", "a\nd\n")
    assert not agrees("8 rows: 8 ok\n", "8 rows: 7 failed\n")
    assert not agrees("a\nd\n", "a\nb\nd\n")
