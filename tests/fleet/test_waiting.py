"""Calls that hold no slot."""

from __future__ import annotations

from bagent.fleet.call import Call, Delivery
from bagent.fleet.waiting import Waiting
from bagent.types import Failure

FAILURE = Failure("connect", "gone", passing=True)
DELIVERY = Delivery("here", "here/1", 0.0, 0.0, 0.0)


def a_call(row, **fields):
    return Call(None, None, f"k{row}", row, "map", 0, **fields)


def take_all(waiting):
    return [waiting.take("here", lambda _: 1, picky=False)[0].row for _ in range(waiting.ready)]


def test_urgent_calls_go_first_and_each_kind_in_order():
    waiting = Waiting()
    for row, urgent in ((1, False), (2, True), (3, False), (4, True)):
        waiting.add(a_call(row), urgent=urgent)
    assert take_all(waiting) == [2, 4, 1, 3]


def test_sleepers_wake_in_the_order_of_their_times_and_go_first():
    waiting = Waiting()
    waiting.add(a_call(9), urgent=False)
    for row, due in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.0)):
        waiting.sleep(a_call(row), due)
    assert (waiting.ready, waiting.asleep, waiting.next_due) == (1, 4, 1.0)
    waiting.wake(2.0)
    assert (waiting.ready, waiting.asleep, waiting.next_due) == (4, 1, 3.0)
    assert take_all(waiting) == [2, 4, 3, 9]
    waiting.wake(3.0)
    assert take_all(waiting) == [1]
    assert waiting.next_due is None


def test_calls_in_limbo_are_held_by_endpoint():
    waiting = Waiting()
    held = (a_call(1), FAILURE, DELIVERY, True)
    waiting.hold("here", held)
    waiting.hold("there", held)
    assert waiting.asleep == 2
    assert waiting.release("here") == [held]
    assert waiting.release("here") == []
    assert waiting.asleep == 1


def test_calls_whose_time_is_over_are_handed_out_wherever_they_wait():
    waiting = Waiting()
    for row, give_up_at in ((1, 5.0), (2, 6.0), (3, None)):
        waiting.add(a_call(row, give_up_at=give_up_at), urgent=False)
        waiting.add(a_call(row + 10, give_up_at=give_up_at), urgent=True)
        waiting.sleep(a_call(row + 20, give_up_at=give_up_at), 100.0 - row)
    assert sorted(call.row for call in waiting.overdue(5.0)) == [1, 11, 21]
    assert (waiting.ready, waiting.asleep) == (4, 2)
    assert waiting.next_due == 97.0
    assert take_all(waiting) == [12, 13, 2, 3]


def test_all_can_be_forgotten():
    waiting = Waiting()
    waiting.add(a_call(1), urgent=False)
    waiting.add(a_call(2), urgent=True)
    waiting.sleep(a_call(3), 1.0)
    waiting.hold("here", (a_call(4), FAILURE, DELIVERY, True))
    assert waiting.clear() == 4
    assert (waiting.ready, waiting.asleep, waiting.next_due) == (0, 0, None)
