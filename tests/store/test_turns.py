"""Turns of unfinished conversations, found in the journal and read from there."""

import pytest

from bagent.store.journal.codec import unit_of
from bagent.store.journal.journal import Journal
from bagent.store.journal.turns import TurnIndex, turns_of_row
from bagent.types import ToolCall, Turn


def a_turn(key, turn, text="", at=None, **fields):
    message = {"role": "assistant", "content": text or f"turn {turn}"}
    return Turn(f"{key:016x}", 0, "main", 0, turn, [message], at=at, **fields)


def write(folder, turns, part="all", **options):
    journal = Journal.open(folder, part, clock=lambda: 0.0, report=pytest.fail, **options)
    for turn in turns:
        journal.write_turn(turn)
    journal.close()


def load(folder, done=(), report=pytest.fail):
    finished = {unit_of(key, "main", 0) for key in done}
    return TurnIndex.load(folder, lambda unit: unit in finished, report=report)


def texts(index, key):
    return [turn.messages[0]["content"] for turn in index.pop(unit_of(key, "main", 0))]


def test_a_later_line_for_a_turn_takes_the_place_of_the_earlier_one(tmp_path):
    begun = [ToolCall("c", "f", "{}")]
    write(tmp_path, [a_turn(1, 1), a_turn(1, 2, "half", begun=begun), a_turn(1, 2, "whole")])
    (first, second) = load(tmp_path).pop(unit_of(1, "main", 0))
    assert (first.turn, second.turn, second.messages[0]["content"]) == (1, 2, "whole")
    assert second.begun == []


def test_turn_0_says_that_a_conversation_begins_anew(tmp_path):
    write(tmp_path, [a_turn(1, 1), a_turn(1, 2), a_turn(1, 0)])
    assert len(load(tmp_path)) == 0
    write(tmp_path, [a_turn(1, 1, "again")])
    assert texts(load(tmp_path), 1) == ["again"]


def test_turns_come_in_order_and_once_over_segments_without_a_torn_line(tmp_path):
    turns = [a_turn(key, n) for n in range(1, 21) for key in (1, 2)]
    write(tmp_path, turns, segment_bytes=300)
    assert len(list((tmp_path / "journal").glob("turns-*"))) > 3
    last = max((tmp_path / "journal").glob("turns-*"))
    with last.open("ab") as file:
        file.write(b'{"key":"00')
    index = load(tmp_path)
    assert len(index) == 2
    assert texts(index, 1) == [f"turn {n}" for n in range(1, 21)]
    assert texts(index, 1) == texts(index, 3) == []


def test_a_broken_line_is_told_and_left_out(tmp_path):
    write(tmp_path, [a_turn(1, 1)])
    (path,) = (tmp_path / "journal").glob("turns-*")
    whole = path.read_bytes()
    broken = (
        b'{"key": 7}\n',
        whole.replace(b"turn 1", b"\xff").replace(b'"turn":1', b'"turn":2'),
        whole.replace(b"messages", b"mesrages").replace(b'"turn":1', b'"turn":3'),
    )
    path.write_bytes(whole + b"".join(broken))
    messages = []
    index = load(tmp_path, report=messages.append)
    assert ["broken line" in message for message in messages] == [True] * 3
    assert [len(turns) for turns in turns_of_row(tmp_path, 0, "main", 0).values()] == [1]
    assert texts(index, 1) == ["turn 1"]


def test_a_conversation_that_another_part_went_on_with_is_read_by_time(tmp_path):
    write(tmp_path, [a_turn(1, 1, at=1.0), a_turn(1, 2, at=2.0)], part="2-of-4")
    write(tmp_path, [a_turn(1, 3, at=3.0)], part="all")
    assert texts(load(tmp_path), 1) == ["turn 1", "turn 2", "turn 3"]
