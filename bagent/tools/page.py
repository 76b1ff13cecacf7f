"""The text of an HTML page: what a reader sees, and where its links lead."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from html.parser import HTMLParser

_SILENT = frozenset({"script", "style", "noscript", "template", "svg", "head"})
_BREAKS = frozenset(
    {"p", "div", "br", "li", "ul", "ol", "tr", "table", "section", "article", "header", "footer"}
    | {"h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote", "hr", "dt", "dd", "title"}
)
_VOID = frozenset({"br", "hr", "img", "input", "meta", "link", "base", "col", "source", "wbr"})

MOST_SECONDS = 8.0
"""Seconds of CPU for one page: the parser takes minutes for a few kilobytes that were made for
it, in a thread that nobody can stop. Another page of 2 MiB takes two or three."""

_DEEPEST = 64
"""Silent elements inside one another that are looked through at each tag; no page has so many."""


class _TooLongError(Exception):
    """The page takes too much time."""


class _Reader(HTMLParser):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._clock = clock
        self._end = clock() + MOST_SECONDS
        self._silent: list[str] = []
        self._links: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._look_at_the_clock()
        shown_title = tag == "title" and self._silent == ["head"]
        if shown_title or tag in _SILENT:
            if len(self._silent) < _DEEPEST:
                self._silent.append(tag)
        elif tag == "body":
            self._silent.clear()  # also of a head that nobody closed
        if tag == "a":
            self._links.append(dict(attrs).get("href"))
        if tag in _BREAKS:
            self.parts.append("\n")
        if tag in ("td", "th"):
            self.parts.append("\t")

    def _look_at_the_clock(self) -> None:
        if self._clock() > self._end:
            raise _TooLongError

    def handle_endtag(self, tag: str) -> None:
        self._look_at_the_clock()
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        if tag == "a" and self._links:
            target = self._links.pop()
            if target and not self._silent and not target.startswith(("#", "javascript:")):
                self.parts.append(f" ({target})")
        if tag in _BREAKS and tag not in _VOID:
            self.parts.append("\n")

    def handle_comment(self, data: str) -> None:
        self._look_at_the_clock()

    def handle_data(self, data: str) -> None:
        self._look_at_the_clock()
        if not self._silent or self._silent[-1] == "title":
            self.parts.append(re.sub(r"\s+", " ", data))


def page_text(html: str, clock: Callable[[], float] = time.thread_time) -> str:
    """The visible text, a line per block, links in brackets after their words.

    Of a page that takes too much CPU, by ``clock`` in seconds, what was read until then.
    """
    reader = _Reader(clock)
    try:
        reader.feed(html)
        reader.close()
    except _TooLongError:
        reader.parts.append("\n[cut: the rest of this page takes too long to read]")
    lines = (
        re.sub(r" *\t *", "\t", re.sub(r" +", " ", line)).strip()
        for line in "".join(reader.parts).split("\n")
    )
    return "\n".join(line for line in lines if line)
