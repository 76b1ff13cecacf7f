"""Records of an earlier start, or of another process, show in nothing but the rows left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from bagent.errors import InputError
from bagent.rows import RowReader, RowsConfig, open_rows
from bagent.rows.resume_cache import MAGIC, InputPiece, ResumeCache, digest_of, identity_of
from bagent.types import Row

COUNT = 800
PARTS = 3
PAD = "x" * 1200


def line(number: int, text: str = PAD) -> str:
    return json.dumps({"id": f"r{number}", "text": text}) + "\n"


def lines(start: int, stop: int) -> str:
    return "".join(map(line, range(start, stop)))


# Each with what is unusual about it behind some pieces that are as usual.
INPUTS = {
    "ascending": [lines(0, COUNT)],
    "blank lines and a mark": [
        "\ufeff" + lines(0, 300) + "\n \n\r\n" + lines(300, COUNT),
    ],
    "a line that is blank in an unusual way": [lines(0, 600) + "\u3000\n" + lines(600, COUNT)],
    "two files": [lines(0, 400), lines(400, COUNT)],
    "a repeated row": [lines(0, COUNT) + line(7) + line(8, "other") + lines(COUNT, 2 * COUNT)],
    "an id that does not ascend": [lines(0, 600) + line(5) + lines(601, COUNT)],
    "a broken row": [lines(0, 600) + '{"id": \n' + lines(600, COUNT)],
    "rows without an id": [lines(0, 600) + '{"text": "a"}\n' * 3 + lines(600, COUNT)],
    "no line feed at the end": [lines(0, COUNT).rstrip()],
}


def write(folder: Path, texts: list[str]) -> RowsConfig:
    for number, text in enumerate(texts):
        (folder / f"in{number}.jsonl").write_text(text, encoding="utf-8")
    return RowsConfig(("*.jsonl",), folder)


def all_of(source: RowReader) -> list[Row]:
    return [row for batch in source.batches() for row in batch]


def plain(config: RowsConfig) -> tuple[list[Row], list[str]]:
    """The rows without any records, and the warnings."""
    source = open_rows(config)
    return all_of(source), source.warnings


def recording(config: RowsConfig, finished: Callable[[Sequence[int]], bool] | None) -> RowReader:
    source = open_rows(config)
    source.remember(config.base / "notes", finished)
    return source


def resumed(
    config: RowsConfig, done: Collection[int], *, peek: int = 0
) -> tuple[list[Row], RowReader]:
    """The rows that come when those of ``done`` are finished."""
    source = open_rows(config)
    source.take_notes()
    source.peek(peek)
    source.remember(config.base / "notes", lambda keys: all(key in done for key in keys))
    return all_of(source), source


def following(config: RowsConfig, peek: int = 0) -> RowReader:
    source = open_rows(config)
    source.share(config.base / "notes")
    source.peek(peek)
    source.remember(config.base / "own", lambda _: False)
    return source


def part_of(config: RowsConfig, part: int) -> RowsConfig:
    return replace(config, shard=(part, PARTS))


@pytest.fixture(params=INPUTS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> RowsConfig:
    return write(tmp_path, INPUTS[request.param])


@pytest.fixture
def read_before(tmp_path: Path) -> RowsConfig:
    """A file that an earlier start has read."""
    config = write(tmp_path, INPUTS["ascending"])
    resumed(config, ())
    return config


@pytest.mark.parametrize(("peek_before", "peek"), [(0, 0), (300, 0), (0, 100)])
def test_rows_that_still_come_are_the_same_as_without_records(config, peek_before, peek):
    resumed(config, (), peek=peek_before)
    rows, warnings = plain(config)
    unfinished = {700, len(rows) - 1}
    done = {row.key for row in rows if row.index not in unfinished}
    remaining, source = resumed(config, done, peek=peek)
    assert 0 < source.passed == len(rows) - len(remaining)
    numbers = {row.index for row in remaining}
    assert unfinished <= numbers
    assert remaining == [row for row in rows if row.index in numbers]
    assert source.warnings == warnings


@pytest.mark.parametrize("peek", [0, 300])
def test_each_part_has_the_same_rows_and_warnings_as_without_records(config, peek):
    recording(config, lambda _: True).note_all()
    for part in range(1, PARTS + 1):
        source = following(part_of(config, part), peek)
        assert (all_of(source), source.warnings) == plain(part_of(config, part))
    assert not (config.base / "own").exists()


def test_records_that_another_process_still_writes_are_used_as_they_come(config):
    part = part_of(config, 2)
    recorded = recording(config, lambda _: True).batches()
    source = following(part)
    read: list[Row] = []
    for step, batch in enumerate(source.batches()):
        read += batch
        ahead: Iterator[object] = recorded if step % 3 else iter(())
        for _ in range(4):
            next(ahead, None)
    assert (read, source.warnings) == plain(part)


def test_a_changed_line_comes_again_with_all_behind_it(read_before):
    done = {row.key for row in plain(read_before)[0]}
    write(read_before.base, [lines(0, 500) + line(500, "new") + lines(501, COUNT)])
    remaining, source = resumed(read_before, done)
    rows, _ = plain(read_before)
    assert source.passed > 0
    assert 500 in {row.index for row in remaining}
    assert remaining == rows[-len(remaining) :]
    assert resumed(read_before, {row.key for row in rows})[0] == []


def test_lines_put_in_front_change_no_key_and_no_row_is_lost(read_before):
    done = {row.key for row in plain(read_before)[0]}
    write(read_before.base, [json.dumps({"id": "a"}) + "\n" + lines(0, COUNT)])
    remaining, _ = resumed(read_before, done)
    assert remaining == plain(read_before)[0]
    assert [row.index for row in remaining if row.key not in done] == [0]


def test_only_rows_of_the_shard_need_be_finished(read_before):
    part = part_of(read_before, 2)
    own, _ = plain(part)
    resumed(part, ())
    remaining, source = resumed(part, {row.key for row in own})
    assert (remaining, source.passed) == ([], len(own))


@pytest.mark.parametrize("setting", [{"limit": 10}, {"sample": 10}, {"where": "id != 'r3'"}])
def test_what_picks_rows_looks_at_all_of_them(read_before, setting):
    picking = replace(read_before, **setting)
    rows, _ = plain(picking)
    remaining, source = resumed(picking, {row.key for row in rows})
    assert (remaining, source.passed) == (rows, 0)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    config = write(tmp_path, [lines(0, 2 * COUNT) + line(5)])
    batches = recording(config, None).batches()
    for _ in range(2):
        next(batches)
    with (tmp_path / "in0.jsonl").open("r+") as file:
        file.write("{")
        file.seek(8)
        file.write("z")
    with pytest.raises(InputError, match="changed while it was read"):
        list(batches)


def write_piece(config: RowsConfig, data: bytes, keys: list[int]) -> None:
    """Write the record of one file with rows r0 to r19."""
    packed = b"".join(key.to_bytes(8, "big") for key in keys)
    cache = ResumeCache()
    cache.attach(config.base / "notes", identity_of(config), None)
    name = plain(config)[0][0].source
    cache.note(InputPiece(name, 0, len(data), digest_of(data), 20, 20, "r0", "r19", packed))
    cache.stop()


def test_rows_of_other_parts_are_not_decoded(tmp_path):
    config = write(tmp_path, [lines(0, 20)])
    rows, _ = plain(config)
    own, _ = plain(part_of(config, 1))
    numbers = {row.index for row in own}
    assert 0 < len(numbers) < 20
    broken = "".join(line(n) if n in numbers else "{\n" for n in range(20))
    write(tmp_path, [broken])
    write_piece(config, broken.encode(), [row.key for row in rows])
    assert all_of(following(part_of(config, 1))) == own


def test_keys_that_are_not_those_of_the_rows_are_not_believed(tmp_path):
    config = write(tmp_path, [lines(0, 20)])
    rows, _ = plain(config)
    write_piece(config, lines(0, 20).encode(), [row.key + PARTS for row in rows])
    for part in range(1, PARTS + 1):
        assert all_of(following(part_of(config, part))) == plain(part_of(config, part))[0]


def test_a_last_line_without_line_feed_is_read_anew(tmp_path):
    config = write(tmp_path, ['{"id":1}\n{"id":2}'])
    resumed(config, ())
    done = {row.key for row in plain(config)[0]}
    write(tmp_path, ['{"id":1}\n{"id":2}x\n'])
    (bad,), source = resumed(config, done)
    assert source.passed == 1
    assert bad.error is not None


IDENTITY = bytes(32)


def piece(number: int) -> InputPiece:
    return InputPiece(
        "a", 10 * number, 10, b"d", 1, number + 1, number, number, bytes([number]) * 8
    )


def noted(path: Path, *pieces: InputPiece) -> ResumeCache:
    memory = ResumeCache()
    memory.attach(path, IDENTITY, None)
    for one in pieces:
        memory.note(one)
    return memory


def read(path: Path) -> list[InputPiece]:
    memory = noted(path)
    found = []
    while known := memory.at("a", 10 * len(found)):
        found.append(known)
        memory.note(known)
    memory.stop()
    return found


@pytest.mark.parametrize("at", [-1, -30, 48, 53, 58])
def test_a_torn_or_damaged_record_ends_the_notes(tmp_path, at):
    path = tmp_path / "p"
    noted(path, piece(0), piece(1)).stop()
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-1])
    assert read(path) == [piece(0)]
    data[at] ^= 255
    path.write_bytes(data)
    assert read(path) == ([piece(0)] if at < 0 else [])
    noted(path, piece(0), piece(1)).stop()
    assert read(path) == [piece(0), piece(1)]


def test_notes_with_other_keys_are_dropped(tmp_path):
    path = tmp_path / "p"
    noted(path, piece(0)).stop()
    memory = ResumeCache()
    memory.attach(path, b"\1" * 32, None)
    assert memory.at("a", 0) is None
    memory.stop()
    assert path.read_bytes() == MAGIC + b"\1" * 32


def test_the_identity_follows_what_makes_keys(tmp_path):
    config = RowsConfig(("a.jsonl",), tmp_path, fields=("x",))
    assert identity_of(config) == identity_of(replace(config, inputs=("b.jsonl",), limit=3))
    assert identity_of(config) != identity_of(replace(config, fields=("y",)))
    assert identity_of(config) != identity_of(replace(config, fields=None))
    assert identity_of(config) != identity_of(replace(config, id_field="x"))


def test_notes_end_at_the_first_difference(tmp_path):
    path = tmp_path / "p"
    noted(path, piece(0), piece(1), piece(2)).stop()
    other = changed(piece(1), digest=b"e")
    noted(path, piece(0), other).stop()
    assert read(path) == [piece(0), other]


def test_a_follower_skips_the_rest_of_an_earlier_file(tmp_path):
    second = [changed(piece(number), source="b") for number in range(2)]
    noted(tmp_path / "p", piece(0), piece(1), *second).stop()
    follower = ResumeCache()
    follower.follow(tmp_path / "p", IDENTITY, None)
    assert follower.at("a", 0) == piece(0)
    assert follower.at("b", 10) == second[1]
    follower.stop()
