"""Passing over finished pieces must show in nothing but the rows that do not come."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from bagent.errors import InputError
from bagent.rows import RowReader, RowsConfig, open_rows
from bagent.types import Row

COUNT = 4000
PAD = "x" * 200


def line(number: int, text: str = PAD) -> str:
    return json.dumps({"id": f"r{number}", "text": text}) + "\n"


def write(folder: Path, text: str, name: str = "in.jsonl") -> RowsConfig:
    (folder / name).write_text(text)
    return RowsConfig(("*.jsonl",), folder)


def plain(config: RowsConfig) -> list[Row]:
    return [row for batch in open_rows(config).batches() for row in batch]


def again(
    config: RowsConfig, done: Collection[int], *, peek: int = 0
) -> tuple[list[Row], RowReader]:
    """The rows that come when those of ``done`` are finished."""
    source = open_rows(config)
    source.peek(peek)
    source.remember(config.base / "notes", lambda keys: all(key in done for key in keys))
    return [row for batch in source.batches() for row in batch], source


@pytest.fixture
def config(tmp_path: Path) -> RowsConfig:
    """A file that an earlier start has read."""
    config = write(tmp_path, "".join(map(line, range(COUNT))))
    again(config, ())
    return config


@pytest.mark.parametrize("peek", [0, 100, 1500])
def test_rows_that_still_come_are_the_same_as_without_notes(config, peek):
    rows = plain(config)
    done = {row.key for row in rows if row.index not in (1500, 3999)}
    left, source = again(config, done, peek=peek)
    assert 0 < len(left) < COUNT
    assert len(left) + source.passed == COUNT
    assert {1500, 3999} <= {row.index for row in left}
    numbers = {row.index for row in left}
    assert left == [row for row in rows if row.index in numbers]


def test_a_changed_line_comes_again_with_all_behind_it(config):
    done = {row.key for row in plain(config)}
    write(config.base, "".join(line(n, "y" if n == 2500 else PAD) for n in range(COUNT)))
    left, source = again(config, done)
    assert source.passed > 0
    assert 2500 in {row.index for row in left}
    rows = plain(config)
    assert left == rows[-len(left) :]
    done = {row.key for row in rows}
    assert again(config, done)[0] == []


def test_lines_put_in_front_change_no_key_and_no_row_is_lost(config):
    done = {row.key for row in plain(config)}
    text = (config.base / "in.jsonl").read_text()
    write(config.base, json.dumps({"id": "a"}) + "\n" + text)
    left, _ = again(config, done)
    assert left == plain(config)
    assert [row.index for row in left if row.key not in done] == [0]


def test_a_last_line_without_line_feed_is_read_anew(tmp_path):
    config = write(tmp_path, '{"id":1}\n{"id":2}')
    again(config, ())
    done = {row.key for row in plain(config)}
    write(tmp_path, '{"id":1}\n{"id":2}x\n')
    left, source = again(config, done)
    assert source.passed == 1
    assert [row.error is None for row in left] == [False]


def test_a_repeat_of_a_row_that_was_passed_over_is_seen(config):
    done = {row.key for row in plain(config)}
    with (config.base / "in.jsonl").open("a") as file:
        file.write(line(7) + line(8, "other"))
    left, source = again(config, done)
    assert source.passed > 0
    assert left[-2:] == plain(config)[-2:]
    assert left[-2].key not in done
    assert source.warnings == [
        "rows with an id that came before: 2, each stays a row of its own; first:"
        ' "r7" at in.jsonl:4001, before at in.jsonl:8'
        " (if another column names the rows: --set id=COLUMN)"
    ]


def test_notes_end_where_ids_do_not_ascend(tmp_path):
    order = [*range(2000), 5, *range(2001, COUNT)]
    config = write(tmp_path, "".join(map(line, order)))
    again(config, ())
    rows = plain(config)
    left, source = again(config, {row.key for row in rows})
    assert 0 < source.passed < 2000
    assert left == rows[source.passed :]


def test_only_rows_of_the_shard_need_be_finished(config):
    part = replace(config, shard=(2, 3))
    mine = plain(part)
    again(part, ())
    left, source = again(part, {row.key for row in mine})
    assert left == []
    assert source.passed == len(mine)


def test_several_files_are_passed_over_up_to_one_that_is_not_plain(tmp_path):
    for name, start in (("a", 0), ("b", 2000), ("d", 6000)):
        write(tmp_path, "".join(line(n) for n in range(start, start + 2000)), f"{name}.jsonl")
    (tmp_path / "c.csv").write_text("id,text\nr5000,x\n")
    config = RowsConfig(("a.jsonl", "b.jsonl", "c.csv", "d.jsonl"), tmp_path)
    again(config, ())
    rows = plain(config)
    left, source = again(config, {row.key for row in rows})
    assert source.passed == 4000
    assert left == rows[4000:]
    assert source.progress()[0] == source.progress()[1]


@pytest.mark.parametrize("setting", [{"limit": 10}, {"sample": 10}, {"where": "id != 'r3'"}])
def test_what_picks_rows_looks_at_all_of_them(config, setting):
    picking = replace(config, **setting)
    rows = plain(picking)
    left, source = again(picking, {row.key for row in rows})
    assert left == rows
    assert source.passed == 0


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    config = write(tmp_path, "".join(map(line, range(COUNT))) + line(5))
    source = open_rows(config)
    source.remember(tmp_path / "notes", None)
    batches = source.batches()
    for _ in range(4):
        next(batches)
    with (tmp_path / "in.jsonl").open("r+") as file:
        file.write("{")
        file.seek(8)
        file.write("z")
    with pytest.raises(InputError, match="changed while it was read"):
        list(batches)
