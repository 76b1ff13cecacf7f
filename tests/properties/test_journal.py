"""A journal that was cut off or damaged anywhere: what is whole stays, and the run goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bagent.store.journal.codec import decode_outcome, encode_outcome, unit_of
from bagent.store.journal.done_index import ResumePolicy, load_index
from bagent.store.journal.journal import Journal
from bagent.store.journal.reader import JournalReader
from bagent.store.journal.turns import TurnIndex
from bagent.types import Outcome, Turn
from support.strategies import ODD_TEXT, json_values

STATUSES = [("ok", None), ("failed", "timeout"), ("invalid", "schema"), ("truncated", "truncated")]


@st.composite
def outcomes(draw: st.DrawFn, row: int) -> Outcome:
    """Return an outcome of a row."""
    status, kind = draw(st.sampled_from(STATUSES))
    output = None
    if status == "ok":
        output = msgspec.Raw(msgspec.json.encode(draw(json_values())))
    return Outcome(
        key=f"{row * 0x9E3779B97F4A7C15 % 2**64:016x}",
        row=row,
        id=draw(json_values(ODD_TEXT)),
        source="rows.jsonl",
        line=row + 1,
        stage="main",
        status=status,
        error_kind=kind,
        error=draw(st.none() | ODD_TEXT) if kind else None,
        output=output,
        text=draw(st.none() | ODD_TEXT),
        prompt_tokens=draw(st.none() | st.integers(0, 10**6)),
        logprobs=draw(st.none() | json_values(ODD_TEXT)),
    )


JOURNALS = st.integers(1, 5).flatmap(
    lambda count: st.tuples(*(outcomes(row) for row in range(count)))
)


class Run:
    """A run directory of one example."""

    def __init__(self, folder: Path, written: tuple[Outcome, ...]) -> None:
        self.path = folder / "run"
        shutil.rmtree(self.path, ignore_errors=True)
        self.reports: list[str] = []
        self.write(*written)
        self.rows = self.path / "journal" / "rows-all-000001.jsonl"

    def open(self) -> Journal:
        return Journal.open(self.path, "all", clock=lambda: 0.0, report=self.reports.append)

    def write(self, *items: Outcome) -> None:
        journal = self.open()
        for item in items:
            journal.write(item)
        journal.close()

    def current(self) -> dict[int, Outcome]:
        """Return the outcomes that readers see, by unit; all of them have to be readable."""
        with JournalReader(self.path, self.reports.append) as reader:
            lines = [line for _, line in reader.texts(reader.written())]
        read = map(decode_outcome, lines)
        return {unit(item): item for item in read}


def unit(item: Outcome) -> int:
    return unit_of(int(item.key, 16), item.stage, item.answer)


def cleaned(item: Outcome) -> Outcome:
    return decode_outcome(encode_outcome(item))


def later(row: int) -> Outcome:
    return Outcome(
        key=f"{row:016x}", row=row, id="z", source="s", line=1, stage="main", status="ok"
    )


def check(run: Run, sound: list[Outcome], damaged: int) -> None:
    """The next start goes on: sound lines stay, and at most the damaged lines changed."""
    new = later(77)
    run.write(new)
    current = run.current()
    for item in [*sound, new]:
        assert current.pop(unit(item)) == cleaned(item)
    assert len(current) <= damaged
    done = load_index(run.path, None, ResumePolicy(), report=run.reports.append)
    for item in [*sound, new]:
        assert done.has(unit(item)) == (item.error_kind != "timeout")


@given(
    written=JOURNALS, cut=st.integers(0, 1 << 20), indexed=st.booleans(), zeros=st.integers(0, 9)
)
def test_a_journal_that_is_cut_at_any_byte_keeps_its_whole_lines(
    folder, written, cut, indexed, zeros
):
    run = Run(folder, written)
    content = run.rows.read_bytes()
    size = cut % (len(content) + 1)
    run.rows.write_bytes(content[:size] + bytes(zeros))
    if not indexed:
        run.rows.with_suffix(".idx").unlink()
    whole = content[:size].count(b"\n")
    # A line is whole from its last brace on.
    whole += content[size : size + 1] == b"\n"
    check(run, list(written[:whole]), 0)


@given(written=JOURNALS, bit=st.integers(0, 1 << 23), indexed=st.booleans())
def test_a_flipped_bit_costs_only_the_lines_that_it_is_in(folder, written, bit, indexed):
    run = Run(folder, written)
    content = bytearray(run.rows.read_bytes())
    at = bit // 8 % len(content)
    before = content[:at].count(b"\n")
    line_end = content[at : at + 1] == b"\n"
    content[at] ^= 1 << bit % 8
    run.rows.write_bytes(content)
    if not indexed:
        run.rows.with_suffix(".idx").unlink()
    broken = {before, before + 1} if line_end else {before}
    check(run, [item for number, item in enumerate(written) if number not in broken], len(broken))


@given(written=JOURNALS, junk=st.binary(max_size=30), at=st.integers(0, 10))
def test_foreign_bytes_between_lines_are_left_out(folder, written, junk, at):
    run = Run(folder, written)
    lines = run.rows.read_bytes().splitlines(keepends=True)
    lines.insert(at % (len(lines) + 1), junk + b"\n")
    run.rows.write_bytes(b"".join(lines))
    check(run, list(written), 0)


@given(item=outcomes(3))
def test_an_outcome_is_one_line_that_is_read_as_it_was(item):
    line = encode_outcome(item)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    read = decode_outcome(line)
    assert encode_outcome(read) == line
    assert (read.key, read.row, read.status) == (item.key, item.row, item.status)
    if item.output is not None:
        assert msgspec.json.decode(read.output) == msgspec.json.decode(item.output)


TURNS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 3), json_values(ODD_TEXT)), min_size=1, max_size=6
)


@given(turns=TURNS, bit=st.integers(0, 1 << 23), cut=st.booleans())
def test_turns_of_a_damaged_journal_are_those_that_were_written(folder, turns, bit, cut):
    run = Run(folder, ())
    journal = run.open()
    for row, number, content in turns:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        journal.write_turn(Turn(f"{row:016x}", row, "main", 0, number, [message]))
    journal.close()
    path = run.path / "journal" / "turns-all-000001.jsonl"
    data = bytearray(path.read_bytes())
    if cut:
        del data[bit % len(data) :]
    else:
        data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)
    run.write(later(77))
    index = TurnIndex.load(run.path, lambda _: False, report=run.reports.append)
    for row in range(3):
        numbers = [turn.turn for turn in index.pop(unit_of(row, "main", 0))]
        assert numbers == sorted(set(numbers))
