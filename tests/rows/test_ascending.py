from bagent.rows.resume_cache import AscendingIds


def note(count: int) -> list[bytes]:
    return [bytes([number]) for number in range(count)]


def test_holds_numbers_and_counted_text_while_they_ascend():
    numbers = AscendingIds(1)
    assert numbers.add([1, 2, 10], [11, 12, 13], note(3))
    assert numbers.add([11], [14], note(1))
    text = AscendingIds(1)
    assert text.add(["r1", "r2", "r10"], [1, 2, 3], note(3))


def test_gives_everything_back_in_order_once_the_order_breaks():
    held = AscendingIds(1)
    assert held.add([1, 2], [11, 12], [b"a", b"b"])
    assert held.add([3], [13], [b"c"])
    assert not held.add([3], [14], [b"d"])
    assert [(list(keys), notes) for keys, notes in held.drain()] == [
        ([11, 12], [b"a", b"b"]),
        ([13], [b"c"]),
    ]
    assert not held.add([99], [15], [b"e"])
    assert list(held.drain()) == []


def test_equal_falling_mixed_and_missing_ids_are_not_held():
    for ids in ([1, 1], [2, 1], ["b", "a"], [1, "2"], [None, None], [1.0, 2.0], [True, 2]):
        assert not AscendingIds(1).add(ids, [1, 2], note(2))


def test_text_after_numbers_is_not_held():
    held = AscendingIds(1)
    assert held.add([1], [1], note(1))
    assert not held.add(["r2"], [2], note(1))


def test_rows_that_can_be_read_again_are_given_back_from_there():
    held = AscendingIds(1)
    assert held.add(["r1", "r2"], [11, 12], [b"a", b"b"])
    mark = held.mark
    assert held.add(["r3"], [13], [b"c"])
    held.replace_since(mark, lambda: iter([([13], [b"C"])]))
    assert not held.skip("r3", "r4", lambda: iter([]))
    assert not held.skip(9, 10, lambda: iter([]))
    assert held.skip("r5", "r10", lambda: iter([([15, 20], [b"d", b"e"])]))
    assert not held.add(["r9"], [19], [b"f"])
    assert [(list(keys), notes) for keys, notes in held.drain()] == [
        ([11, 12], [b"a", b"b"]),
        ([13], [b"C"]),
        ([15, 20], [b"d", b"e"]),
    ]
    assert held.ended
    assert not held.skip("r99", "r99", lambda: iter([]))
