"""Which of the conversations that wait for a slot goes on first, on a clock that jumps."""

from __future__ import annotations

from random import Random

from support.jumping_loop import run_jumping
from support.scripted_fleet import always, setup


def order_of(turns: dict[int, int]) -> list[int]:
    """The rows in the order in which they were sent: all wait for one slot that row 0 holds."""

    async def main() -> list[int]:
        s = setup({"only": always()}, limit=1)
        s.request(s.call(0))
        for row, turn in turns.items():
            s.request(s.call(row, turn=turn), urgent=turn > 1)
        await s.fleet.wait_idle()
        return [row for _, _, row in s.backend.sent][1:]

    return run_jumping(main())


def test_conversations_nearest_their_end_go_before_others_and_all_before_new_rows():
    assert order_of({1: 1, 2: 2, 3: 5, 4: 3, 5: 1, 6: 5}) == [3, 6, 4, 2, 1, 5]


def test_conversations_as_near_their_end_go_on_in_the_order_of_their_return():
    rows = list(range(1, 41))
    Random(7).shuffle(rows)
    assert order_of(dict.fromkeys(rows, 2)) == rows
