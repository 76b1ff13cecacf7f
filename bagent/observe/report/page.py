"""The page put together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.observe.report import endpoints, failures, overview, rows
from bagent.observe.report.ask import Ask
from bagent.observe.report.fields import Fields
from bagent.observe.report.html import Html, join, section, text

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_HERE = Path(__file__).parent


class About(msgspec.Struct, frozen=True):
    """What the tables do not say of a run: its name, and facts as (what, value) for its head."""

    name: str
    facts: Sequence[tuple[str, str]] = ()


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
    fields = Fields(ask)
    found = [
        *endpoints.findings(served),
        *failures.findings(ask, sums),
        *fields.findings(),
    ]
    parts = [
        overview.cards(ask, sums),
        _findings(found),
        overview.timeline(ask, sums),
        overview.distributions(ask),
        endpoints.endpoints(ask, served),
        failures.failures(ask),
        fields.section(),
        overview.tools(ask),
        overview.cost(ask, sums),
        rows.extremes(ask),
        rows.sample(ask),
    ]
    facts = list(about.facts)
    if sums["began"] is not None:
        facts.append(("rows from", f"{_when(sums['began'])} to {_when(sums['ended'])}"))
    return _page(About(about.name, facts), parts)


def _findings(words: Sequence[str]) -> Html:
    if not words:
        return Html("")
    items = "".join(f"<li>{text(one, 400)}</li>" for one in words)
    return section("What stands out", Html(f'<ul class="findings">{items}</ul>'))


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
