"""A run that is killed anywhere goes on with the same batches: nothing is sent or paid twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.batch_runs import SCHEMA, Killed, Options, Run, assert_ok, row, run_rows, served
from support.batch_services import Course, OpenAIServer, good, never_asked, row_of

ROWS = 5
SIZE = 3


def scripted() -> OpenAIServer:
    """Two rows have to be asked again: one is invalid, one expired."""
    expired: set[str] = set()

    def answer(asked: Any) -> Any:
        name = row_of(asked)
        if name == "r1" and len(asked["body"]["messages"]) == 1:
            return good('{"score": "no"}')(asked)
        label = asked["custom_id"].rpartition("-")[0]
        if name == "r4" and expired <= {label}:  # in the first batch with it, however often read
            expired.add(label)
            return never_asked("batch_expired")(asked)
        return good('{"score": 1}')(asked)

    return OpenAIServer(Course(("completed",), answer))


async def start(folder: Path, url: str, **options: Any) -> Run:
    rows = [row(n) for n in range(ROWS)]
    return await run_rows(folder, url, rows, Options(schema=SCHEMA, size=SIZE, **options))


def asked_rows(server: OpenAIServer) -> Counter[str]:
    """How often each row was asked, over all batches that were made."""
    return Counter(row_of(line) for batch in server.made for line in batch["lines"])


WANTED = Counter({f"r{n}": 2 if n in (1, 4) else 1 for n in range(ROWS)})


def check(run: Run, server: OpenAIServer) -> None:
    assert_ok(run, ROWS)
    assert asked_rows(server) == WANTED
    assert server.complaints == []
    assert {record.state for record in run.records} == {"done"}
    assert run.files == []


async def run_twice(folder: Path, **kill: Any) -> bool:
    """Start, and once more where that was killed; return whether it was."""
    server = scripted()
    async with served(server) as url:
        run = await start(folder, url, **kill)
        was_killed = isinstance(run.error, Killed)
        check(await start(folder, url) if was_killed else run, server)
        return was_killed


async def test_killed_at_any_change_of_the_ledger_it_goes_on(tmp_path: Path) -> None:
    """By turns before and after the change is noted."""
    kills = 0
    while await run_twice(
        tmp_path / str(kills), kill_save=(kills + 1, ("before", "after")[kills % 2])
    ):
        kills += 1
    assert kills > 12


@pytest.mark.parametrize("rows", [1, 3, 5])
async def test_killed_while_answers_are_read_it_goes_on(tmp_path: Path, rows: int) -> None:
    assert await run_twice(tmp_path, kill_row=rows)


async def test_a_copy_that_was_torn_while_written_is_asked_again(tmp_path: Path) -> None:
    server = OpenAIServer()
    rows = [row(n, id="same") for n in range(5)]
    async with served(server) as url:
        run = await run_rows(tmp_path, url, rows, Options(dedupe=True, kill_save=(4, "after")))
        assert isinstance(run.error, Killed)
        copies = next((tmp_path / "batches").glob("*.copies"))
        whole = copies.read_bytes()
        copies.write_bytes(whole[:-9])
        run = await run_rows(tmp_path, url, rows, Options(dedupe=True))
    assert_ok(run, 5)


async def test_batches_of_another_division_of_the_rows_are_taken_over_once(tmp_path: Path) -> None:
    rows = [row(n) for n in range(6)]
    server = OpenAIServer()
    async with served(server) as url:
        killed = await run_rows(tmp_path, url, rows, Options(kill_save=(4, "after")))
        assert isinstance(killed.error, Killed)
        second = await run_rows(tmp_path, url, rows[1::2], Options(part="2-of-2"))
        first = await run_rows(tmp_path, url, rows[::2], Options(part="1-of-2"))
    assert (second.error, second.lines) == (None, [])
    assert first.error is None
    assert sorted(line["row"] for line in first.lines) == list(range(6))
    assert len(server.made) == 1
    assert {record.state for record in first.records} == {"done"}
