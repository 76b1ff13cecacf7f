"""What the pages say of options, keys, columns and codes is what the program itself knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import duckdb
import pytest

import bagent.errors
from bagent.cli.app import COMMANDS, load_command
from bagent.cli.render.reference import reference_text
from bagent.errors import EXIT_CODES
from bagent.store.tables.schema import (
    COLUMN_DESCRIPTIONS,
    COLUMNS,
    ERROR_KINDS,
    RENAMED,
    STATUSES,
    VIEWS,
)
from bagent.types import ErrorKind, Status
from support.report_pages import column_definitions

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "schemas" / "reference.md"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    *(ROOT / folder / "README.md" for folder in ("deploy", "benchmarks")),
    *(ROOT / "bagent" / "guides").glob("*.md"),
]
OTHERS = {"--help", "--version", "--no-deps", "--data-parallel-size"}
OTHER_PROGRAMS = re.compile(
    r"benchmarks/|\bpip\b|gpu_modes|\bscale\.py|\bvllm serve\b|tables_size\.py"
)
"""What else the pages show with options."""


@pytest.fixture(scope="module")
def options() -> dict[str, list[tuple[list[str], str]]]:
    return {
        name: [
            ([*param.opts, *param.secondary_opts], param.help or "")
            for param in load_command(name).params
            if param.param_type_name == "option"
        ]
        for name in COMMANDS
    }


def test_the_reference_is_up_to_date() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference_text(), (
        "make it new: bagent schema --reference -o schemas/reference.md"
    )


def test_every_option_is_explained(options) -> None:
    silent = [
        flags
        for entries in options.values()
        for flags, help_text in entries
        if not help_text.strip()
    ]
    assert silent == []


def test_every_table_and_view_has_its_columns_explained_in_their_order() -> None:
    with duckdb.connect() as connection:
        for table, columns in COLUMNS.items():
            connection.execute(f"create table {table} ({column_definitions(columns)})")
        for name, sql in VIEWS.items():
            connection.execute(f"create view {name} as {sql}")
        for name in (*COLUMNS, *VIEWS):
            result = [row[0] for row in connection.execute(f"describe {name}").fetchall()]
            assert [RENAMED.get(item, item) for item in COLUMN_DESCRIPTIONS[name]] == result, name
    assert set(COLUMN_DESCRIPTIONS) == {*COLUMNS, *VIEWS, "answers"}


def test_every_status_and_error_kind_is_explained() -> None:
    assert list(STATUSES) == list(get_args(Status))
    assert list(ERROR_KINDS) == list(get_args(ErrorKind))


def test_every_exit_code_is_explained_in_the_readme_and_in_the_guide() -> None:
    named = {value for name, value in vars(bagent.errors).items() if re.match("EXIT_[A-Z_]+$", name)
             and isinstance(value, int)}  # fmt: skip
    assert set(EXIT_CODES) == named
    for page in (README, (ROOT / "bagent" / "guides" / "resume.md").read_text(encoding="utf-8")):
        assert {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", page)} == named


def test_the_readme_names_every_command() -> None:
    assert [name for name in COMMANDS if f"`bagent {name}" not in README] == []


def test_every_option_of_a_page_is_one(options) -> None:
    valid = {flag for entries in options.values() for flags, _ in entries for flag in flags}
    named = {page: set(_named(page.read_text(encoding="utf-8"))) for page in PAGES}
    unknown = {page: names - valid - OTHERS for page, names in named.items()}
    assert {page: names for page, names in unknown.items() if names} == {}


def _named(text: str) -> Iterator[str]:
    """The long options in lines that speak of this program."""
    for line in text.splitlines():
        if OTHER_PROGRAMS.search(line) is None and ("bagent" in line or line.startswith("|")):
            yield from re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
