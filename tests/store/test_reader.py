from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest

from bagent.store.journal.reader import BLOCK_LINES, JournalReader
from bagent.store.journal.supersession import superseded_lines


def lines_of(lines: JournalReader) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Rows with codes, and texts, of all blocks."""
    blocks = list(lines.blocks())
    assert all(len(b.rows) == len(b.codes) == len(b.texts) <= BLOCK_LINES for b in blocks)
    messages = [(row, code) for b in blocks for row, code in zip(b.rows, b.codes, strict=True)]
    return messages, list(chain.from_iterable(b.texts for b in blocks))


def check(store: Any) -> int:
    """Blocks are what places and texts are, one by one; how many lines they hold."""
    with JournalReader(store.path, store.reports.append) as lines:
        places = list(lines.ordered())
        messages, texts = lines_of(lines)
        assert messages == [(location.row, location.code) for location in places]
        assert texts == [lines.read(location) + b"\n" for location in places]
    return len(places)


def shuffled(count: int, width: int, seed: int) -> list[int]:
    """Rows out of order by some ``width`` places."""
    dice = random.Random(seed)
    return sorted(range(count), key=lambda n: n + dice.random() * width)


@pytest.mark.parametrize("width", [0, 300, 5000])
def test_blocks_of_segments_that_overlap_a_little_or_wholly(
    store: Any, outcome: Any, failure: Any, width: int
) -> None:
    rows = shuffled(2000, width, 1)
    created = [failure(n) if n % 17 == 0 else outcome(n) for n in rows]
    store.write(*created, segment_bytes=60_000)
    assert check(store) == 2000


def test_blocks_of_parts_stages_answers_and_rows_sent_again(
    store: Any, outcome: Any, failure: Any
) -> None:
    for part in range(2):
        rows = range(part, 900, 2)
        created = [failure(n) for n in rows if n % 5 == 0]
        created += [outcome(n) for n in rows]
        created += [outcome(n, answer=1) for n in rows if n % 50 < 2]
        created += [outcome(n, stage="two") for n in rows if n % 3 == 0]
        store.write(*created, part=f"{part + 1}-of-2", segment_bytes=40_000)
    assert check(store) == 900 + 36 + 300


@pytest.mark.parametrize("most", [0, 40, 10_000])
def test_what_does_not_count_is_the_same_however_much_is_looked_at_once(
    store: Any, outcome: Any, failure: Any, most: int
) -> None:
    dice = random.Random(3)
    created = [
        dice.choice([failure, outcome])(dice.randrange(300), answer=dice.randrange(2))
        for _ in range(900)
    ]
    store.write(*created, segment_bytes=20_000)
    current: dict[tuple[int, int], int] = {}
    for number, item in enumerate(created):
        unit = (item.row, item.answer)
        if unit not in current or created[current[unit]].status != "ok":
            current[unit] = number
    with JournalReader(store.path, store.reports.append) as lines:
        firsts = [0]
        for index in lines.indexes:
            firsts.append(firsts[-1] + len(index))
        result = {firsts[n >> 32] + (n & 0xFFFFFFFF) for n in superseded_lines(lines.indexes, most)}
    assert result == set(range(900)) - set(current.values())
