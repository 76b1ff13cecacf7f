"""Guides in the terminal."""

from __future__ import annotations

from bagent.cli.commands import guide
from support.pages import GUIDES


def test_guide_lists_every_topic_in_the_order_of_need(bagent):
    done = bagent(["guide"])
    names = [line.split()[0] for line in done.out.splitlines()]
    assert done.code == 0
    assert set(names) == {*(path.stem for path in GUIDES.glob("*.md")), "reference"}
    assert names[0] == "jobs"
    assert [line["topic"] for line in bagent(["guide", "--json"]).lines()] == names


def test_a_guide_in_a_pipe_is_its_markdown(bagent):
    assert bagent(["guide", "resume"]).out == (GUIDES / "resume.md").read_text(encoding="utf-8")
    assert bagent(["guide", "reference"]).out.startswith("# Reference")


def test_a_guide_on_a_terminal_has_styles_and_no_fences(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    guide.guide("python")
    text = capsys.readouterr().out
    assert "open_run" in text
    assert "```" not in text
