"""The text of an HTML page: what a reader sees, and where its links lead."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_SILENT = frozenset({"script", "style", "noscript", "template", "svg", "head"})
_BREAKS = frozenset(
    {"p", "div", "br", "li", "ul", "ol", "tr", "table", "section", "article", "header", "footer"}
    | {"h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote", "hr", "dt", "dd", "title"}
)
_VOID = frozenset({"br", "hr", "img", "input", "meta", "link", "base", "col", "source", "wbr"})


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent: list[str] = []
        self._links: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        shown_title = tag == "title" and self._silent == ["head"]
        if shown_title or tag in _SILENT:
            self._silent.append(tag)
        elif tag == "body":
            self._silent.clear()  # also of a head that nobody closed
        if tag == "a":
            self._links.append(dict(attrs).get("href"))
        if tag in _BREAKS:
            self.parts.append("\n")
        if tag in ("td", "th"):
            self.parts.append("\t")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        if tag == "a" and self._links:
            target = self._links.pop()
            if target and not self._silent and not target.startswith(("#", "javascript:")):
                self.parts.append(f" ({target})")
        if tag in _BREAKS and tag not in _VOID:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._silent or self._silent[-1] == "title":
            self.parts.append(re.sub(r"\s+", " ", data))


def page_text(html: str) -> str:
    """The visible text, a line per block, links in brackets after their words."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    lines = (
        re.sub(r" *\t *", "\t", re.sub(r" +", " ", line)).strip()
        for line in "".join(reader.parts).split("\n")
    )
    return "\n".join(line for line in lines if line)
