import random
import tracemalloc

from bagent.rows.row_keys import CompactHashSet


def random_keys(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.getrandbits(64) for _ in range(count)]


def test_holds_what_a_set_holds_while_it_grows():
    keys = CompactHashSet()
    known: set[int] = set()
    source = random.Random(7)
    pool = random_keys(10_000, 1)
    for _ in range(20_000):
        key = source.choice(pool)
        assert keys.add(key) == (key not in known)
        known.add(key)
    assert len(keys) == len(known)
    assert all(key in keys for key in known)
    assert not any(key in keys for key in random_keys(5_000, 2))


def test_notes_stay_those_of_the_first_through_all_splits():
    keys = CompactHashSet(note_size=7)
    numbers = random_keys(30_000, 3)
    for start in range(0, len(numbers), 500):
        part = numbers[start : start + 500]
        keys.add_all(part, [number.to_bytes(8, "big")[1:] for number in part])
    assert keys.add(numbers[0], b"another") is False
    assert all(keys.note(number) == number.to_bytes(8, "big")[1:] for number in numbers)
    assert keys.note(1) is None


def test_bytes_that_look_like_a_key_across_two_entries_are_no_key():
    keys = CompactHashSet()
    # All in bucket 0; the bytes of the third stand across the border of the first two.
    first, second = 0x01020304050607 << 8, 0x08090A0B0C0D0E << 8
    across = 0x0708090A0B0C0D << 8
    keys.add(first)
    keys.add(second)
    assert across not in keys
    assert keys.add(across)
    assert across in keys
    assert not keys.add(across)


def test_memory_is_about_ten_bytes_a_key():
    numbers = random_keys(65_000, 5)
    tracemalloc.start()
    try:
        keys = CompactHashSet()
        keys.add_all(numbers)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(keys) == len(numbers)
    assert held < 11 * len(numbers)
