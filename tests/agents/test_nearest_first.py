"""Which of the conversations that wait for a slot goes on first, on a clock that jumps."""

from __future__ import annotations

from random import Random

from support.jumping_loop import on_jumping_clock, run_jumping
from support.scripted_fleet import always, setup


def order_of(turns: dict[int, int]) -> list[int]:
    """The rows in the order in which they were sent: all wait for one slot that row 0 holds."""

    async def main() -> list[int]:
        s = setup({"only": always()}, limit=1)
        s.fleet.submit(s.call(0))
        for row, turn in turns.items():
            s.fleet.submit(s.call(row, turn=turn), urgent=turn > 1)
        await s.fleet.wait_idle()
        return [row for _, _, row in s.backend.sent][1:]

    return run_jumping(main())


def test_conversations_nearest_their_end_go_before_others_and_all_before_new_rows():
    assert order_of({1: 1, 2: 2, 3: 5, 4: 3, 5: 1, 6: 5}) == [3, 6, 4, 2, 1, 5]


def test_conversations_as_near_their_end_go_on_in_the_order_of_their_return():
    rows = list(range(1, 41))
    Random(7).shuffle(rows)
    assert order_of(dict.fromkeys(rows, 2)) == rows


@on_jumping_clock
async def test_a_later_conversation_nearer_its_end_goes_before_earlier_ones():
    s = setup({"only": always(seconds=1.0)}, limit=1)
    s.recorder.on_reply = lambda call, reply: (
        s.fleet.submit(s.call(99, turn=4), urgent=True) if call.row == 1 else None
    )
    s.fleet.submit(s.call(1))
    for row in (2, 3, 4):
        s.fleet.submit(s.call(row, turn=2), urgent=True)
    await s.fleet.wait_idle()
    assert [row for _, _, row in s.backend.sent] == [1, 99, 2, 3, 4]
