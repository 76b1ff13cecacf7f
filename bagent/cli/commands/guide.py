"""``bagent guide``: the guides, in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import bagent
from bagent.cli import options
from bagent.errors import UsageError

FOLDER = Path(bagent.__file__).parent / "guides"
REFERENCE = "reference"
WIDEST = 100
"""Columns of a guide on a terminal; longer lines are hard to read."""

Topic = Annotated[
    str | None,
    typer.Argument(
        metavar="[TOPIC]",
        help="The guide to print.",
        autocompletion=options.complete_topics,
        show_default=False,
    ),
]


def guide(
    topic: Topic = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the list of topics as JSON, one a line.")
    ] = False,
) -> None:
    """Print a guide; without TOPIC, list the guides.

    The topic "reference" lists every option, job key, column, status and exit code.

    Example: bagent guide resume
    """
    if topic is None:
        _list_topics(as_json)
        return
    _print_markdown(read_guide(topic))


def topics() -> dict[str, str]:
    """Return the topics in the order in which people need them, each with its title."""
    titles = {path.stem: _title(path) for path in FOLDER.glob("*.md")}
    ordered = {name: titles.pop(name) for name in ORDER if name in titles}
    return ordered | dict(sorted(titles.items())) | {REFERENCE: "Options, keys, columns, codes"}


ORDER = (
    *("jobs", "outputs", "view", "resume", "stages", "agents", "fleets", "hosted", "batches"),
    *("load-tests", "clusters", "python", "glossary", "inside"),
)


def read_guide(topic: str) -> str:
    """Return the Markdown of a guide.

    Raises:
        UsageError: there is no such topic.
    """
    if topic == REFERENCE:
        from bagent.cli.render.reference import reference_text

        return reference_text()
    names = topics()
    if topic not in names:
        from bagent.text.suggest import did_you_mean

        hint = did_you_mean(topic, names) or f"topics: {', '.join(names)}"
        raise UsageError(f"{topic}: no such guide", hint=hint)
    return (FOLDER / f"{topic}.md").read_text(encoding="utf-8")


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()


def _list_topics(as_json: bool) -> None:
    if as_json:
        for name, title in topics().items():
            typer.echo(json.dumps({"topic": name, "title": title}))
        return
    width = max(map(len, topics()))
    for name, title in topics().items():
        typer.echo(f"{name:<{width}}  {title}")
    typer.echo("next: bagent guide TOPIC", err=True)


def _print_markdown(text: str) -> None:
    """Print Markdown with styles on a terminal, as it is in a pipe."""
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    from bagent.text.terminal import unguarded

    console = Console(file=unguarded(sys.stdout))
    width = min(console.width, WIDEST)
    # A link to a neighbouring guide leads nowhere on a terminal.
    console.print(Markdown(text, hyperlinks=False), width=width)
