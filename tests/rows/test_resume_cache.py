from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from bagent.rows import RowsConfig
from bagent.rows.resume_cache import MAGIC, InputPiece, ResumeCache, identity_of

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
