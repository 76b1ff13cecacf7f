"""A conversation goes on where the engine's cache holds what came before."""

from __future__ import annotations

import asyncio
from collections import Counter

from support.jumping_loop import run_jumping
from support.scripted_fleet import always, setup


async def second_turns(s, homes):
    """Submit the second turns of rows, each with its endpoint; wait for their ends."""
    for row, home in homes.items():
        s.fleet.submit(s.call(row, turn=2, prefer=home), urgent=True)
    await s.fleet.idle()


def test_each_second_turn_goes_to_the_endpoint_of_the_first():
    homes = {row: f"e{row * 7 % 4}" for row in range(40)}

    async def main():
        s = setup({f"e{n}": always() for n in range(4)}, limit=16)
        await second_turns(s, homes)
        return s

    sent = {row: name for _, name, row in run_jumping(main()).backend.sent}
    assert sent == homes


def test_a_full_endpoint_loses_its_rows_to_those_with_room():
    async def main():
        s = setup({"home": always(seconds=10.0), "other": always(seconds=10.0)}, limit=8)
        started = asyncio.get_running_loop().time()
        await second_turns(s, dict.fromkeys(range(16), "home"))
        return s, asyncio.get_running_loop().time() - started

    s, seconds = run_jumping(main())
    assert s.backend.shares == {"home": 8, "other": 8}
    assert seconds < 11


def test_a_much_busier_endpoint_is_not_waited_for():
    async def main():
        s = setup({"home": always(seconds=10.0), "other": always(seconds=10.0)}, limit=10)
        for row in range(8):
            s.fleet.submit(s.call(100 + row, only="home"))
        await second_turns(s, {1: "home", 2: "other"})
        return s

    sent = {row: name for _, name, row in run_jumping(main()).backend.sent}
    assert (sent[1], sent[2]) == ("other", "other")


def test_rows_of_an_endpoint_that_has_gone_are_taken_by_the_others():
    async def main():
        s = setup({"home": always(), "other": always()}, limit=8)
        s.fleet.leave(["home"])
        await second_turns(s, {1: "home", 2: "never there"})
        return s

    assert run_jumping(main()).backend.shares == {"other": 2}


def test_new_rows_are_shared_equally_beside_rows_that_come_back():
    async def main():
        s = setup({"e0": always(), "e1": always()}, limit=8)
        s.submit(*range(8))
        await second_turns(s, {100: "e0", 101: "e0"})
        return s

    sent = run_jumping(main()).backend.sent
    assert Counter(name for _, name, row in sent if row < 100) == {"e0": 4, "e1": 4}
    assert {name for _, name, row in sent if row >= 100} == {"e0"}
