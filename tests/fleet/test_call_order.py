"""Which call goes first, and to which endpoint: conversations that go on, and pinned calls."""

from __future__ import annotations

from random import Random

import pytest

from bagent.fleet.retry import RetryPolicy
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import REFUSED, always, setup

SHUFFLED = Random(7).sample(range(1, 41), 40)


@pytest.mark.parametrize(
    ("turns", "order"),
    [
        ({1: 1, 2: 2, 3: 5, 4: 3, 5: 1, 6: 5}, [3, 6, 4, 2, 1, 5]),
        (dict.fromkeys(SHUFFLED, 2), SHUFFLED),
    ],
    ids=["nearest their end first", "as near, in the order of their return"],
)
@on_jumping_clock
async def test_conversations_that_go_on_have_an_order_and_go_before_new_rows(turns, order):
    s = setup({"only": always()}, limit=1)
    s.request(s.call(0))
    for row, turn in turns.items():
        s.request(s.call(row, turn=turn), urgent=turn > 1)
    await s.fleet.wait_idle()
    assert [row for _, _, row in s.backend.sent] == [0, *order]


@on_jumping_clock
async def test_each_second_turn_goes_to_the_endpoint_of_the_first():
    homes = {row: f"e{row * 7 % 4}" for row in range(40)}
    s = setup({f"e{n}": always() for n in range(4)}, limit=16)
    for row, home in homes.items():
        s.request(s.call(row, turn=2, preferred=home), urgent=True)
    await s.fleet.wait_idle()
    assert {row: name for _, name, row in s.backend.sent} == homes


@on_jumping_clock
async def test_a_full_endpoint_loses_its_rows_to_those_with_room():
    s = setup({"home": always(seconds=10.0), "other": always(seconds=10.0)}, limit=8)
    for row in range(16):
        s.request(s.call(row, turn=2, preferred="home"), urgent=True)
    await s.fleet.wait_idle()
    assert s.backend.shares == {"home": 8, "other": 8}
    assert max(s.recorder.ended_at.values()) < 1011


@on_jumping_clock
async def test_a_much_busier_endpoint_is_not_waited_for():
    s = setup({"home": always(seconds=10.0), "other": always(seconds=10.0)}, limit=10)
    s.submit(*range(100, 108), pinned_to="home")
    for row, home in ((1, "home"), (2, "other")):
        s.request(s.call(row, turn=2, preferred=home), urgent=True)
    await s.fleet.wait_idle()
    sent = {row: name for _, name, row in s.backend.sent}
    assert (sent[1], sent[2]) == ("other", "other")


@on_jumping_clock
async def test_a_pinned_call_goes_to_its_endpoint_alone_and_fails_with_it():
    scripts = {"dead": always(REFUSED, 0.01), "well": always(), "other": always()}
    retry, probes = RetryPolicy(retries=2), {"dead": lambda number: REFUSED}
    s = setup(scripts, limit=2, retry=retry, probes=probes)
    homes = {row: ("dead", "well", "other")[row % 3] for row in range(30)}
    for row, home in homes.items():
        s.submit(row, pinned_to=home)
    s.submit(*range(30, 40))
    await s.run(0, ticks=True)
    dead = [row for row, home in homes.items() if home == "dead"]
    assert sorted(s.recorder.failures) == dead
    assert len(s.recorder.replies) == 30
    assert s.recorder.failures[0][0].message == (
        "dead serves nothing, and no other endpoint may have this row (3 tries)"
    )
    assert all(name == homes[row] for _, name, row in s.backend.sent if row in homes)
