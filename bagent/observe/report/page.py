"""The page put together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.observe.report import (
    agents,
    endpoints,
    failures,
    fields,
    modes,
    overview,
    rows,
    stages,
)
from bagent.observe.report.ask import Ask
from bagent.observe.report.html import WEAK, Html, block, heading, join, note, section, text
from bagent.observe.report.traits import Traits
from bagent.types import Json

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_HERE = Path(__file__).parent

ALIKE = 1.05
"""Endpoints whose times differ by less take about the same time."""


PROMPTS = 40
CHARACTERS = 20_000
"""So many texts of the job are shown, and so many characters of each."""


class About(msgspec.Struct, frozen=True):
    """What the tables do not say of a run.

    ``facts`` are (what, value) for its head, ``stages`` the names of its stages in order,
    ``in_prompt`` the names that its prompts use; None: not known, or the row as a whole.
    ``prices`` are those of each stage, as run.json holds them. ``prompts`` are (whose, text), and
    ``settings`` the job beside them; both without secrets.
    """

    name: str
    facts: Sequence[tuple[str, str]] = ()
    stages: Sequence[str] = ()
    in_prompt: frozenset[str] | None = None
    prices: Sequence[Json] = ()
    prompts: Sequence[tuple[str, str]] = ()
    settings: str = ""


def make_page(connection: DuckDBPyConnection, about: About) -> str:
    """The whole page.

    Args:
        connection: with the views of :func:`bagent.store.asking.connect`.
        about: the run.

    Raises:
        duckdb.Error: the tables cannot be read.
    """
    ask = Ask(connection)
    sums = overview.totals(ask)
    if not sums["rows"]:
        return _page(about, [Html("<p>No row has ended yet.</p>")])
    served = endpoints.endpoint_rows(ask)
    by_stage = stages.stage_rows(ask, about.stages, sums)
    faults = failures.find(ask)
    traits = Traits(ask, about.in_prompt)
    calls = agents.tool_rows(ask)

    shared = [fields.shared(traits, number) for number in range(1, failures.FAULTS + 1)]
    told = {key for one in shared for key in one.fields}
    found = {
        "Endpoints": endpoints.findings(served) or _no_slow_one(served),
        "Failures": [
            *stages.findings(by_stage),
            *failures.findings(faults, sums, [one.words for one in shared]),
            *fields.failing(traits, told),
        ],
        "Long answers": fields.long_answers(traits),
        "Tools": agents.findings(calls),
    }
    parts = [
        overview.cards(ask, sums),
        _findings(found),
        stages.stages(by_stage, sums),
        overview.timeline(ask, sums),
        overview.distributions(ask),
        endpoints.endpoints(ask, served),
        failures.failures(ask, faults, sums),
        fields.fields(traits),
        agents.agents(ask, calls),
        overview.cost(ask, sums),
        modes.modes(ask, about.prices),
        rows.extremes(ask, sums["stages"]),
        rows.sample(ask),
        _job(about),
    ]
    facts = list(about.facts)
    if sums["began"] is not None:
        facts.append(("rows from", f"{_when(sums['began'])} to {_when(sums['ended'])}"))
    return _page(About(about.name, facts), parts)


def _job(about: About) -> Html:
    """What was asked: the prompts before rows are put in, and the settings."""
    texts = [(f"prompt: {whose}", text) for whose, text in about.prompts[:PROMPTS]]
    if about.settings:
        texts.append(("settings that differ from the defaults", about.settings))
    parts = [Html(heading(title) + block(text, CHARACTERS)) for title, text in texts]
    return section("The job", *parts, name="job")


def _no_slow_one(served: Sequence[dict[str, Any]]) -> list[str]:
    slower = [row["slower"] for row in served if row["slower"] is not None]
    if len(slower) < 2:
        return []
    most = max(slower)
    if most < ALIKE:
        return ["no endpoint stands out: all take about the same time"]
    return [f"no endpoint stands out: the slowest takes {most:.1f} times the others' time"]


def _findings(found: Mapping[str, Sequence[str]]) -> Html:
    """What stands out, by question; the parts of one finding are parted by `` | ``."""
    parts = []
    for title, words in found.items():
        if words:
            items = "".join(_item(one) for one in dict.fromkeys(words))
            parts.append(Html(f'{heading(title)}<ul class="findings">{items}</ul>'))
    if any(one.startswith(WEAK) for words in found.values() for one in words):
        parts.append(note("Weak: shown by few rows only, or by what many other rows have too."))
    return section("What stands out", *(parts or [note("Nothing.")]))


def _item(words: str) -> str:
    weak = " class=weak" * words.startswith(WEAK)
    return f"<li{weak}>{_lines(words)}</li>"


def _lines(words: str) -> str:
    return "<br>".join(text(part, 500) for part in words.split(" | "))


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def _page(about: About, parts: Sequence[Html]) -> str:
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    facts = " · ".join(f"{escape(what)} {text(value, 120)}" for what, value in about.facts)
    made = f"{_when(time.time())} UTC"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
        " style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
        f"<title>{text(about.name)}</title><style>{style}</style></head><body><main>"
        f"<h1>{text(about.name)}</h1>"
        f'<p class="note">{facts}</p>{join(parts)}'
        f'<p class="note">Times of day are UTC. Made {made}.</p>'
        f"</main><script>{script}</script></body></html>\n"
    )
