"""A conversation goes on where the engine's cache holds what came before."""

from __future__ import annotations

from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import always, setup


async def second_turns(s, homes):
    """Submit the second turns of rows, each with its endpoint; wait for their ends."""
    for row, home in homes.items():
        s.request(s.call(row, turn=2, preferred=home), urgent=True)
    await s.fleet.wait_idle()


@on_jumping_clock
async def test_each_second_turn_goes_to_the_endpoint_of_the_first():
    homes = {row: f"e{row * 7 % 4}" for row in range(40)}
    s = setup({f"e{n}": always() for n in range(4)}, limit=16)
    await second_turns(s, homes)
    sent = {row: name for _, name, row in s.backend.sent}
    assert sent == homes


@on_jumping_clock
async def test_a_much_busier_endpoint_is_not_waited_for():
    s = setup({"home": always(seconds=10.0), "other": always(seconds=10.0)}, limit=10)
    for row in range(8):
        s.request(s.call(100 + row, pinned_to="home"))
    await second_turns(s, {1: "home", 2: "other"})
    sent = {row: name for _, name, row in s.backend.sent}
    assert (sent[1], sent[2]) == ("other", "other")
