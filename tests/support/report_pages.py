"""Pages of reports: tables that a test writes, and the page read back as a person would."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from bagent.duck import quoted
from bagent.report import ReportInfo, make_page
from bagent.store.tables.schema import (
    COLUMNS,
    RENAMED,
    RESULTS,
    VIEWS,
    json_select,
)
from support.jobs import memory

NUMBERS = count()
VOID = {"meta", "input", "br", "img", "link"}


def column_definitions(columns: dict[str, str]) -> str:
    """Return columns as in CREATE TABLE, by their names in the table."""
    return ", ".join(f"{quoted(RENAMED.get(n, n))} {t}" for n, t in columns.items())


class Reader(HTMLParser):
    """Checks that tags close in order; keeps the text, the tags, and the text by section."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self._section = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = str(dict(attrs)["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        self.sections[self._section] = self.sections.get(self._section, "") + data + "\n"


def read(page: str) -> Reader:
    """Return the page's text and tags; fails where tags do not close in order."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


class TableRun:
    """Tables in memory with the views over them."""

    def __init__(self) -> None:
        self.connection = memory().cursor()
        self._name = f"run{next(NUMBERS)}"
        self.connection.execute(f"attach ':memory:' as {self._name}; use {self._name}")
        self._lines: dict[str, list[str]] = {}
        tables = {
            "results": column_definitions(RESULTS),
            "attempts": column_definitions(COLUMNS["attempts"]),
            "tool_calls": column_definitions(COLUMNS["tool_calls"]),
            "endpoints": column_definitions(COLUMNS["endpoints"]),
            "answers": "id varchar",
        }
        for name, columns in tables.items():
            self.connection.execute(f"create table {name} ({columns})")
        for name, sql in VIEWS.items():
            self.connection.execute(f"create view {name} as {sql}")

    def close(self) -> None:
        """Drop the tables."""
        self.connection.execute(f"use memory; detach {self._name}")
        self.connection.close()

    def add(self, table: str, **values: Any) -> None:
        """Add a row to a table, as the journal has it."""
        self._lines.setdefault(table, []).append(json.dumps(values))

    def fill(self) -> None:
        """Put the rows that were added into the tables."""
        for table, lines in self._lines.items():
            with NamedTemporaryFile("w", suffix=".jsonl") as file:
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()
                rows = json_select(table, Path(file.name), 1 << 24)
                self.connection.execute(f"insert into {table} by name {rows}")
        self._lines = {}

    def result(self, row: int, **changes: Any) -> None:
        """Add a result: ok unless ``changes`` say otherwise."""
        values = {
            "id": f"r{row}",
            "row": row,
            "source": "rows.jsonl",
            "line": row + 1,
            "stage": "main",
            "answer": 0,
            "status": "ok",
            "text": f"answer {row}",
            "endpoint": "http://fast:8000",
            "attempts": 1,
            "turns": 0,
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "latency_ms": 100.0 + row,
            "started_at": 1000.0 + row,
            "finished_at": 1001.0 + row,
        }
        self.add("results", **(values | changes))

    def attempt(self, row: int, endpoint: str, seconds: float, **changes: Any) -> None:
        """Add a try of ``seconds``."""
        values = {
            "row": row,
            "stage": "main",
            "answer": 0,
            "turn": 1,
            "try": 1,
            "endpoint": endpoint,
            "sent": 1000.0 + row,
            "done": 1000.0 + row + seconds,
            "group": f"g{row}",
            "completion_tokens": 20,
        }
        self.add("attempts", **(values | changes))

    def section(self, name: str, about: ReportInfo | None = None) -> str:
        """Return the text of a section of the page, empty where the page has none."""
        self.fill()
        page = make_page(self.connection, about or ReportInfo("run"))
        start = page.find(f'<section id="{name}"')
        if start < 0:
            return ""
        return read(page[start : page.index("</section>", start) + 10]).sections[name]

    def page(self, about: ReportInfo | None = None) -> Reader:
        """Return the page, read."""
        self.fill()
        return read(make_page(self.connection, about or ReportInfo("run")))
